"""Plans that keep fewer copies of a loop's carry than it has iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autoremat as ar
from support.compare import assert_same

LENGTH = 60
W = jnp.eye(16) * 0.5 + 0.01
X = jnp.ones((64, 16))


def long_loop(w: Any, x: Any) -> Any:
    def step(c: Any, t: Any) -> Any:
        return jnp.sin(jnp.cos(c) @ w + 0.01 * t) * jnp.tanh(c), c[0, 0]

    x, firsts = lax.scan(step, jnp.tanh(x @ w), jnp.arange(float(LENGTH)))
    return (jnp.tanh(x @ w) ** 2).sum() + (firsts**2).sum()


def test_a_small_budget_keeps_snapshots(tmp_path: Path) -> None:
    plan = ar.plan(long_loop, W, X, budget="10%")
    (number,) = plan.snapshots
    assert "Snapshots kept" in plan.report
    assert 0 < number < LENGTH
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes < LENGTH * X.nbytes, "less than the carries alone"
    ours = jax.jit(jax.value_and_grad(plan.apply(long_loop), (0, 1)))(W, X)
    assert_same(ours, jax.jit(jax.value_and_grad(long_loop, (0, 1)))(W, X), rtol=2e-5)
    plan.save(tmp_path / "plan.json")
    assert ar.Plan.load(tmp_path / "plan.json").decisions == plan.decisions


def test_recomputed_flops_count_the_steps_between_snapshots() -> None:
    plan = ar.plan(long_loop, W, X, budget="10%")
    emitted, plain = (
        ar.jaxpr_flops(jax.value_and_grad(f, (0, 1)), W, X) for f in (plan.apply(long_loop), long_loop)
    )
    assert plan.recompute_flops == pytest.approx(emitted - plain, rel=0.02)


def test_a_large_budget_keeps_every_carry() -> None:
    plan = ar.plan(long_loop, W, X, budget="90%")
    assert plan.snapshots == ()
    assert "Snapshots" not in plan.report


def test_higher_derivatives() -> None:
    plan = ar.plan(long_loop, W, X, budget="10%")
    assert plan.snapshots

    def along(fun: Any) -> Any:
        return jax.jit(lambda w: jax.jvp(jax.grad(lambda w: fun(w, X)), (w,), (jnp.cos(w),))[1])(W)

    assert_same(along(plan.apply(long_loop)), along(long_loop), rtol=1e-4)


def test_steps_that_may_not_run_again_have_no_snapshots() -> None:
    key = jax.random.key(0, impl="rbg")

    def noisy(w: Any, x: Any) -> Any:
        def step(c: Any, t: Any) -> Any:
            noise = jax.random.normal(jax.random.fold_in(key, t), c.shape)
            return jnp.sin(jnp.cos(c) @ w) * noise, None

        return lax.scan(step, x, jnp.arange(LENGTH))[0].sum()

    # The lowest plan keeps what was drawn.
    with pytest.raises(ar.InfeasibleBudgetError) as error:
        ar.plan(noisy, W, X, budget="5%")
    assert error.value.floor_bytes > LENGTH * X.nbytes
