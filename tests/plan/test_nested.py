"""Plans whose recomputation is recomputed: less memory than all that crosses between stages takes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoremat as ar
from autoremat.plan import _plan
from autoremat.plan._candidates import Candidates
from autoremat.plan._path import Path as PlanPath
from autoremat.plan._program import planned_function
from autoremat.plan._rewrite import nested_blocks
from support.compare import assert_same

LAYERS, BATCH, WIDTH, HIDDEN = 10, 512, 16, 64
KEY = jax.random.key(0, impl="rbg")


def block(x: Any, w: Any) -> Any:
    """Activations are its bulk, and what crosses to the next block is the least of them."""
    return x + jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1])


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = block(x, w)
    return jnp.mean(x**2)


def skipping(ws: Any, x: Any) -> Any:
    """What the first blocks make is read by the last ones, too."""
    early = []
    for w in ws[: LAYERS // 2]:
        x = block(x, w)
        early.append(x)
    for w in ws[LAYERS // 2 :]:
        x = block(x * jnp.cos(early.pop()), w)
    return jnp.mean(x**2)


def noisy(ws: Any, x: Any) -> Any:
    """What is drawn in the middle may not be drawn again."""
    for i, w in enumerate(ws):
        x = block(x, w)
        if i == LAYERS // 2:
            x = x * jax.random.bernoulli(KEY, 0.9, x.shape)
    return jnp.mean(x**2)


def masked(ws: Any, x: Any) -> Any:
    """All blocks read what is computed before them, and part of what they compute is returned."""
    mask = jnp.cos(jnp.arange(float(BATCH)))[:, None] + x[:, :1]
    firsts = []
    for w in ws:
        x = block(x * mask, w)
        firsts.append(x[0, 0])
    return jnp.mean(x**2), firsts


@functools.cache
def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    ws = [
        (
            jnp.asarray(rng.normal(size=(WIDTH, HIDDEN)) / 4, jnp.float32),
            jnp.asarray(rng.normal(size=(HIDDEN, WIDTH)) / 8, jnp.float32),
        )
        for _ in range(LAYERS)
    ]
    return ws, jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)


@functools.cache
def candidates(fun: Callable[..., Any]) -> tuple[Candidates, int, PlanPath]:
    """The candidates of a function, and the first way to stage it that has nested plans."""
    found = _plan.prepare(fun, arguments(), 0, fun is masked, None, None, None)
    number, variant = next((i, v) for i, v in enumerate(found.variants()) if v.path.flat < len(v.path.states))
    return found, number, variant.path


def peak(fun: Callable[..., Any], index: int) -> int:
    found, variant, _ = candidates(fun)
    return found.measure(variant, index).use.peak_bytes


@functools.cache
def tight() -> ar.Plan:
    """A plan for less than any plan without nesting takes."""
    _, _, path = candidates(deep)
    budget = min(peak(deep, path.flat - 1), peak(deep, path.flat - 2)) * 85 // 100
    return ar.plan(deep, *arguments(), budget=budget)


def test_a_budget_below_all_borders_is_met() -> None:
    plan = tight()
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.nested == len(list(nested_blocks(plan.decisions))) > 0
    assert "Nested checkpoints" in plan.report
    gradient = jax.value_and_grad(plan.apply(deep))
    options = dict(plan.compiler_options)
    assert ar.measure(gradient, *arguments(), compiler_options=options).peak_bytes == plan.peak_bytes
    assert_same(
        jax.jit(gradient, compiler_options=options)(*arguments()),
        jax.jit(jax.value_and_grad(deep), compiler_options=options)(*arguments()),
        rtol=1e-6,
    )
    assert plan.predicted_bytes == pytest.approx(plan.peak_bytes, rel=0.12)


def test_recomputed_flops_are_those_of_the_emitted_program() -> None:
    plan = tight()
    emitted, plain = (ar.jaxpr_flops(jax.value_and_grad(f), *arguments()) for f in (plan.apply(deep), deep))
    assert plan.recompute_flops == pytest.approx(emitted - plain, rel=0.02)


def test_a_nested_plan_is_a_file(tmp_path: Path) -> None:
    tight().save(tmp_path / "plan.json")
    assert ar.Plan.load(tmp_path / "plan.json") == tight()


def test_states_follow_by_falling_bytes_and_rising_cost() -> None:
    found, variant, path = candidates(deep)
    tail = path.states[path.flat - 1 :]
    assert len(tail) > 3
    for a, b in itertools.pairwise(tail):
        assert a.nbytes > b.nbytes
        assert a.cost < b.cost
        assert a.flops < b.flops
        assert b.index == a.index + 1
    assert all(any(nested_blocks(found.decisions(variant, s.index))) for s in tail[1:])


def test_the_deepest_nesting_needs_the_least_memory() -> None:
    """Every level has a fence: none may hold what another one has fenced."""
    _, _, path = candidates(deep)
    flat, last = path.flat - 1, len(path.states) - 1
    assert peak(deep, last) < peak(deep, (flat + last) // 2) < peak(deep, flat)


@pytest.mark.parametrize("fun", [deep, skipping, noisy, masked])
def test_gradients_do_not_change(fun: Callable[..., Any]) -> None:
    found, variant, path = candidates(fun)
    want = jax.jit(jax.value_and_grad(fun, has_aux=fun is masked))(*arguments())
    for index in {path.flat, (path.flat + len(path.states)) // 2, len(path.states) - 1}:
        planned = planned_function(found.traced, found.decisions(variant, index))
        assert_same(
            jax.jit(jax.value_and_grad(planned, has_aux=fun is masked))(*arguments()), want, rtol=2e-6
        )


def test_what_may_not_run_again_is_in_no_nested_checkpoint() -> None:
    found, variant, path = candidates(noisy)
    (drawn,) = (i for i, e in enumerate(found.traced.jaxpr.eqns) if e.primitive.name == "random_bits")
    nested = [
        block
        for state in path.states[path.flat :]
        for block in nested_blocks(found.decisions(variant, state.index))
    ]
    assert nested
    assert not any(b.start <= drawn < b.stop for b in nested)


def test_higher_derivatives_and_vmap() -> None:
    ws, x = arguments()

    def along(fun: Any) -> Any:
        return jax.jit(lambda x: jax.jvp(jax.grad(lambda x: fun(ws, x)), (x,), (jnp.cos(x),))[1])(x)

    def batched(fun: Any) -> Any:
        return jax.jit(jax.vmap(jax.grad(lambda s: fun(ws, s * x))))(jnp.array([0.5, 2.0]))

    planned = tight().apply(deep)
    assert_same(along(planned), along(deep), rtol=1e-5)
    assert_same(batched(planned), batched(deep), rtol=1e-5)


def test_a_program_with_a_loop_has_snapshots_instead() -> None:
    def looped(ws: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda c, _: (block(c, ws[0]), None), x, None, length=16)
        return deep(ws, x)

    found = _plan.prepare(looped, arguments(), 0, False, None, None, None)
    for variant in itertools.islice(found.variants(), 3):
        assert any(s.halvings for s in variant.path.states)
        assert not any(s.reversal for s in variant.path.states)
