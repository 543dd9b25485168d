"""What the benchmarks rely on: results that are stored and read again, and models cut into blocks without a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from benchmarks.models.model import unwrapped
from benchmarks.policy_results import Figures, Result, Row, read_results, write_results
from benchmarks.records import write_records
from benchmarks.reruns import Moment


def result(model: str, moments: tuple[Moment, ...] = ()) -> Result:
    figures = Figures(predicted_bytes=210, peak_bytes=200, temp_bytes=100, flops=1000, compiler_flops=900.0)
    row = Row(
        policy="nothing_saveable",
        also=("dots_saveable",),
        theirs=figures,
        ours=figures,
        time_ratio=0.5,
        whole=1e-7,
        worst=1e-6,
        compiles=3,
        seconds=0.1,
    )
    return Result(
        model=model,
        about="a model",
        machine="a machine",
        repeats=1,
        plain=figures,
        sensitivity=1e-7,
        rows=(row,),
        moments=moments,
    )


def test_records(tmp_path: Path) -> None:
    moment = Moment(0.5, 10, 1, 0, 1, 2)
    results = {name: result(name, (moment,)) for name in ("one", "two")}
    path = tmp_path / "records.jsonl"
    assert read_results(path) == {}
    write_records(path, results.values())
    assert read_results(path) == results
    page = write_results(list(results.values()), tmp_path).read_text()
    assert "**2 of 2**" in page
    assert "as it should be" in page


def test_attention_verdict() -> None:
    for moment, right in ((Moment(0.5, 10, 1, 0, 1, 2), True), (Moment(0.5, 10, 1, 1, 1, 2), False)):
        assert result("unfused", (moment,)).attention_right is right


def test_keras_blocks_are_the_model() -> None:
    """A model run layer by layer, blocks wrapped, is the model."""
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    from benchmarks.keras_models import example, loss_of
    from benchmarks.models.keras_applications import make, segments

    keras.utils.set_random_seed(0)
    x = image = keras.Input((8, 8, 3))
    for name in ("block1", "block2"):
        y = keras.layers.Conv2D(4, 3, padding="same", name=f"{name}_conv")(x)
        y = keras.layers.BatchNormalization(name=f"{name}_bn")(y)
        x = keras.layers.Concatenate(name=f"{name}_join")([x, y])
    x = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    net = keras.Model(image, x)
    parts = segments(net, r"block\d+")
    assert [len(p.layers) for p in parts if p.wrapped] == [3, 3]

    args: tuple[Any, ...] = example(net, 8, 4, 10)
    theirs, gradients = jax.value_and_grad(loss_of(net), has_aux=True)(*args)
    for wrap in (unwrapped, jax.checkpoint):
        ours, own_gradients = jax.value_and_grad(make(net, parts)(wrap), has_aux=True)(*args)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
        for a, b in zip(jax.tree.leaves(own_gradients), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
