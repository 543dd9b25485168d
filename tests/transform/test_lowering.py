"""What reaches the compiler: barriers, name scopes, precision, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoremat.transform import checkpoint, checkpoint_policies

X = jnp.linspace(0.1, 0.9, 4)
W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)


def lowered(fun: Callable[..., Any], *args: Any) -> str:
    return jax.jit(fun).lower(*args).as_text()


def barrier_operands(text: str) -> list[int]:
    """How many operands each barrier has."""
    return [
        line.split(" : ")[0].count("%") - 1 for line in text.splitlines() if "optimization_barrier" in line
    ]


def layer(x: Any, w: Any) -> Any:
    return jnp.sin(jnp.sin(x @ w))


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: f(f(x, w), w).sum()


def test_a_barrier_in_the_gradient_only() -> None:
    fun = loss(checkpoint(layer))
    assert barrier_operands(lowered(fun, X, W)) == []
    assert barrier_operands(lowered(lambda x, w: jax.jvp(fun, (x, w), (x, w)), X, W)) == []
    assert len(barrier_operands(lowered(jax.grad(fun, (0, 1)), X, W))) == 2


def test_no_barrier_where_nothing_runs_again() -> None:
    everything = checkpoint(layer, policy=checkpoint_policies.everything_saveable)
    linear = checkpoint(lambda x, w: x @ w)
    for fun in (everything, linear):
        assert "barrier" not in lowered(jax.grad(loss(fun), (0, 1)), X, W)


@pytest.mark.parametrize(
    ("prevent_cse", "operands"),
    [
        (True, 3),
        (False, None),
        ((False, False), None),
        ((True, False), 2),
        ([False, True], 2),
        (({"x": True, "y": False}, False), 2),
    ],
)
def test_barriers_per_argument(prevent_cse: Any, operands: int | None) -> None:
    def with_tree(tree: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(tree["x"] @ w)) + tree["y"]

    def fun(x: Any, w: Any) -> Any:
        return checkpoint(with_tree, prevent_cse=prevent_cse)({"x": x, "y": x}, w).sum()

    found = barrier_operands(lowered(jax.grad(fun, (0, 1)), X, W))
    assert found == ([] if operands is None else [operands])


def test_barriers_with_keyword_arguments_and_mistakes() -> None:
    fun = checkpoint(lambda x, *, w: layer(x, w).sum(), prevent_cse=((True,), {"w": False}))
    assert barrier_operands(lowered(jax.grad(lambda x: fun(x, w=W)), X)) == [2]
    with pytest.raises(ValueError, match="prevent_cse"):
        checkpoint(layer, prevent_cse=(True, False, True))(X, W)
    with pytest.raises(TypeError, match="prevent_cse"):
        checkpoint(layer, prevent_cse="yes")(X, W)


def test_reruns_have_a_name_scope() -> None:
    fun = loss(checkpoint(layer))

    def scopes(f: Callable[..., Any]) -> str:
        return jax.jit(f).lower(X, W).as_text(debug_info=True)

    assert "rematted_computation" not in scopes(fun)
    assert "checkpoint" in scopes(fun)
    reruns = [s for s in re.findall(r'loc\("([^"]*)"', scopes(jax.grad(fun))) if "rematted_computation" in s]
    assert any(s.endswith("/sin") for s in reruns)
    assert not any("transpose" in s.split("rematted_computation")[1] for s in reruns)


def test_recomputation_survives_the_compiler() -> None:
    """As far as it does for JAX: on CPU, compilers before JAX 0.11.1 undo it outside of loops."""

    def products(f: Callable[..., Any]) -> int:
        compiled = jax.jit(jax.value_and_grad(loss(f), (0, 1))).lower(jnp.ones((4, 4)), W).compile()
        return (compiled.as_text() or "").count(" dot(")

    two = lambda x, w: jnp.sin(x @ w) @ w
    assert products(checkpoint(two)) == products(jax.checkpoint(two))
    assert products(checkpoint(two, policy=checkpoint_policies.dots_saveable)) == products(two)


def test_bfloat16_residuals_are_what_the_forward_pass_used() -> None:
    """As in JAX's `test_excess_precision_hell`: the backward pass must not see more digits than the forward pass."""
    finfo = jnp.finfo(jnp.bfloat16)
    eps = finfo.eps

    def first(x: Any) -> Any:
        return x * 1.0078125 + eps / 4

    @jax.custom_vjp
    def spy(x: Any) -> Any:
        return x

    spy.defvjp(lambda x: (x, x), lambda x, ct: (x.astype(ct.dtype),))
    x = (1 + jnp.arange(64) * eps).astype(jnp.bfloat16)
    for policy in (checkpoint_policies.everything_saveable, checkpoint_policies.nothing_saveable):
        wrapped = checkpoint(lambda x: spy(first(x)), policy=policy)
        out, pull = jax.jit(lambda x, f=wrapped: jax.vjp(f, x))(x)
        seen = jax.jit(lambda p: p(jnp.ones_like(out))[0])(pull)
        np.testing.assert_array_equal(
            np.asarray(seen, np.float32),
            np.asarray(jax.grad(lambda x: (first(x) * 1).sum())(x) * out, np.float32),
        )


@pytest.mark.parametrize("place", ["flat", "scan", "cond", "checkpoint"])
def test_kept_bfloat16_values_are_rounded(place: str) -> None:
    step = lambda x: jnp.sin(jnp.sin(x) * 1.25)
    fun = {
        "flat": step,
        "scan": lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0],
        "cond": lambda x: lax.cond(x[0] > 0, step, lambda x: x, x),
        "checkpoint": checkpoint(step),
    }[place]
    wrapped = checkpoint(lambda x: fun(x).sum(), policy=checkpoint_policies.everything_saveable)
    low = str(jax.make_jaxpr(jax.grad(wrapped))(X.astype(jnp.bfloat16)))
    assert low.count("reduce_precision") >= 2
    assert "reduce_precision" not in str(jax.make_jaxpr(jax.grad(wrapped))(X))


def temporaries(fun: Callable[..., Any], *args: Any) -> int:
    analysis: Any = jax.jit(fun).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def _modes(f: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "reverse": jax.grad(f, (0, 1)),
        "reverse over forward": jax.grad(lambda x, ws: jax.jvp(lambda x: f(x, ws), (x,), (x,))[1], (0, 1)),
        "forward over reverse": lambda x, ws: jax.jvp(lambda x: jax.grad(f)(x, ws), (x,), (x,))[1],
        "reverse over reverse": jax.grad(lambda x, ws: jax.grad(f)(x, ws).sum()),
    }


@pytest.mark.parametrize("mode", list(_modes(lambda x, ws: x)))
def test_memory_of_a_scan_of_checkpointed_blocks(mode: str) -> None:
    def block(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = jnp.sin(jnp.tanh(x @ w))
        return x

    def net(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, ws: lax.scan(lambda c, w: (f(c, w), None), x, ws)[0].sum()

    x, ws = jnp.ones((64, 32)), jnp.ones((64, 32, 32))
    ours = temporaries(_modes(net(checkpoint(block)))[mode], x, ws)
    theirs = temporaries(_modes(net(jax.checkpoint(block)))[mode], x, ws)
    assert ours <= 1.05 * theirs
    assert ours < temporaries(_modes(net(block))[mode], x, ws) / 2
