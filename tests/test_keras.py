"""Keras models on the JAX backend, planned without touching them: small images, so that they compile in seconds.

The full size is in `benchmarks/keras_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="Keras runs on another backend")

from benchmarks.double import in_double  # noqa: E402
from benchmarks.gradients import difference  # noqa: E402
from benchmarks.keras_models import build, example, gradient, loss_of  # noqa: E402

import autoremat as ar  # noqa: E402


def small_resnet() -> Any:
    """ResNet50's own blocks, a few of them."""
    from keras.src.applications import resnet

    ResNet: Any = resnet.ResNet  # its annotations forbid the None that its defaults are

    def stacks(x: Any) -> Any:
        x = resnet.stack_residual_blocks_v1(x, 16, 2, stride1=1, name="conv2")
        return resnet.stack_residual_blocks_v1(x, 32, 1, name="conv3")

    return ResNet(
        stacks, False, True, weights_name="small", weights=None, input_shape=(64, 64, 3), classes=10,
        classifier_activation=None,
    )  # fmt: skip


def small_vgg() -> Any:
    """Convolutions and max-pooling, as VGG19 begins."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def problem(make: Callable[[], Any], batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    keras.utils.set_random_seed(0)
    net = make()
    return loss_of(net), example(net, 64, batch, classes=10)


@pytest.mark.parametrize(("make", "percent"), [(small_resnet, 92), (small_vgg, 85)])
def test_gradients_and_budget(make: Callable[[], Any], percent: int):
    """In double precision, where rounding cannot hide a wrong gradient."""
    loss, args = problem(make, batch=8)
    with jax.enable_x64(True):
        wide, wide_args = in_double(loss, *args)
        plan = ar.plan(wide, *wide_args, budget=f"{percent}%", has_aux=True, effort="fast")
        assert plan.checkpoints > 0
        planned = gradient(plan.apply(wide), plan.compiler_options)
        use = ar.measure(
            jax.value_and_grad(plan.apply(wide), has_aux=True),
            *wide_args,
            compiler_options=plan.compiler_options,
        )
        assert plan.unplanned_bytes is not None
        assert use.peak_bytes == plan.peak_bytes <= plan.budget_bytes <= percent * plan.unplanned_bytes / 100
        (loss_before, others_before), before = gradient(wide, plan.compiler_options)(*wide_args)
        (loss_after, others_after), after = planned(*wide_args)
    assert difference(after, before).whole < 1e-9
    np.testing.assert_allclose(loss_after, loss_before, rtol=1e-12)
    # The moving statistics of batch normalization are outputs as before.
    for a, b in zip(jax.tree.leaves(others_after), jax.tree.leaves(others_before), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_floor_names_the_derivative_of_max_pooling():
    loss, args = problem(small_vgg, batch=16)
    with pytest.raises(ar.InfeasibleBudgetError, match="select_and_scatter_add") as caught:
        ar.plan(loss, *args, budget=1, has_aux=True)
    error = caught.value
    assert f"at least {error.floor_bytes:,} bytes" in str(error)
    assert ar.plan(loss, *args, budget=error.floor_bytes, has_aux=True).peak_bytes == error.floor_bytes


def test_notes_say_when_activations_do_not_dominate():
    loss, args = build("VGG19", 32, 1)
    plan = ar.plan(loss, *args, budget="100%", has_aux=True)
    assert any("Activations are not the bulk" in note for note in plan.notes)
    loss, args = problem(small_vgg, batch=16)
    plan = ar.plan(loss, *args, budget="100%", has_aux=True)
    assert not any("Activations are not the bulk" in note for note in plan.notes)


@pytest.mark.slow
def test_resnet50_stages_are_its_blocks():
    """Found, not annotated: the stages begin at the sums that end the residual blocks."""
    from autoremat.plan._plan import prepare

    loss, args = build("ResNet50", 32, 2)
    candidates = prepare(loss, args, 0, True, None, None, None)
    variants = {v.name: v for v in candidates.variants() if v.fence == "dependence"}
    program = variants["one stage a unit"].path.program
    eqns = program.jaxpr.eqns
    ends = [s.span.stop for s in program.stages()]
    # 16 blocks; the last one's stage ends after the pooling.
    assert (
        sum(
            eqns[stop - 1].primitive.name == "add" and eqns[stop - 1].outvars[0].aval.ndim == 4
            for stop in ends
        )
        >= 15
    )
