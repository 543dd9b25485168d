"""What plans of a transformer compute again first: of unfused attention the core, of a fused kernel nothing.

The planner knows nothing of attention. The sizes keep the proportions that matter: many tokens, narrow heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.models import transformer
from benchmarks.models.attention import CORE, fused, unfused
from benchmarks.reruns import moment, planned, reruns

LAYERS, BATCH, SEQUENCE, WIDTH = 2, 2, 64, 64
LARGE_SHARE = 2 / 3
"""Of the bytes that recomputation can free."""


def arguments(*, scan: bool) -> tuple[Any, Any]:
    params = transformer.init(jax.random.key(0), LAYERS, WIDTH)
    x = jax.random.normal(jax.random.key(1), (BATCH, SEQUENCE, WIDTH))
    layers = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(LAYERS)]
    return params if scan else layers, x


def loss(attention: Any, *, scan: bool) -> Any:
    return (transformer.scanned if scan else transformer.unrolled)(attention=attention)


@pytest.mark.parametrize("scan", [False, True])
def test_unfused_core_is_the_first_product(scan: bool) -> None:
    found = moment(loss(unfused, scan=scan), arguments(scan=scan), LARGE_SHARE, CORE)
    assert found.products_inside > 0
    assert found.products_outside == 0


@pytest.mark.parametrize("scan", [False, True])
def test_fused_core_stays(scan: bool) -> None:
    found = moment(loss(fused, scan=scan), arguments(scan=scan), LARGE_SHARE, CORE)
    assert found.others_outside > 0
    assert found.operations_inside == 0


@pytest.mark.parametrize("attention", [unfused, fused])
@pytest.mark.parametrize("scan", [False, True])
def test_reruns_are_those_of_the_planner(attention: Any, scan: bool) -> None:
    """What is read from the emitted program is what the planner counts."""
    args = arguments(scan=scan)
    function = loss(attention, scan=scan)
    plan = planned(function, args, LARGE_SHARE)
    again = reruns(jax.value_and_grad(plan.function), *args)
    assert plan.flops > 0
    assert sum(r.flops for r in again) == plan.flops
    assert not reruns(jax.value_and_grad(function), *args)


def test_reruns_of_jax() -> None:
    """JAX's own checkpoints are read, too: everything runs again but what nothing needs."""

    def block(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w)

    x, w = jnp.ones((8, 4)), jnp.eye(4)
    gradient = jax.grad(lambda w: jax.checkpoint(block)(x, w).sum())
    assert [r.primitive for r in reruns(gradient, w)].count("dot_general") == 2


def test_fused_equals_unfused() -> None:
    q, k, v, cotangent = jax.random.normal(jax.random.key(0), (4, 2, 3, 128, 8))
    (theirs, their_pull), (ours, our_pull) = jax.vjp(unfused, q, k, v), jax.vjp(fused, q, k, v)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(our_pull(cotangent), their_pull(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
