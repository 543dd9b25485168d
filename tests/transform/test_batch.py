"""`vmap` outside a checkpoint never changes what its policy decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoremat as ar

DOTS = ar.checkpoint_policies.dots_with_no_batch_dims_saveable
X = jax.random.normal(jax.random.key(0), (3, 5, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))
WS = jax.random.normal(jax.random.key(2), (3, 4, 4))


def net(x: Any, w: Any) -> Any:
    return jnp.sin(jnp.sin(x @ w) @ w).sum(0), (x * w[0]).sum()


def layers(checkpoint: Callable[[Any], Any], *, in_axes: Any = (0, 0)) -> Callable[[Any, Any], Any]:
    """The batched network as a scalar, of the checkpointed function."""
    batched = jax.vmap(checkpoint(net), in_axes)
    return lambda x, w: sum(jnp.sum(y**2) for y in batched(x, w))


def dots(f: Any) -> Any:
    return ar.checkpoint(f, policy=DOTS)


def kept_products(loss: Any, *args: Any) -> list[tuple[int, ...]]:
    return [r.shape for r in ar.saved_residuals(loss, *args) if r.primitive == "dot_general"]


def same(f: Any, g: Any, *args: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        jax.jit(jax.grad(f, (0, 1)))(*args),
        jax.grad(g, (0, 1))(*args),
    )


def test_the_policy_is_asked_about_the_unbatched_program():
    asked: list[tuple[int, ...]] = []

    def policy(prim: Any, *avals: Any, **params: Any) -> Any:
        if prim.name == "dot_general":
            asked.append(avals[1].shape)
        return DOTS(prim, *avals, **params)

    loss = layers(lambda f: ar.checkpoint(f, policy=policy))
    same(loss, layers(lambda f: f), X, WS)
    assert asked
    assert set(asked) == {(4, 4)}


@pytest.mark.parametrize(
    ("in_axes", "w"),
    [((0, 0), WS), ((0, None), W), ((0, 1), jnp.moveaxis(WS, 0, 1)), ((0, 2), jnp.moveaxis(WS, 0, 2))],
)
def test_kept_values_are_those_without_vmap(in_axes: Any, w: Any):
    loss = layers(dots, in_axes=in_axes)
    same(loss, layers(lambda f: f, in_axes=in_axes), X, w)
    assert kept_products(loss, X, w) == [(3, 5, 4)] * len(
        kept_products(lambda x, w: dots(net)(x, w)[0].sum(), X[0], W)
    )


def layers_of_layers(checkpoint: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: sum(
        jnp.sum(y**2) for y in jax.vmap(jax.vmap(checkpoint(net), (None, 0)), (0, None))(x, w)
    )


def test_vmap_under_vmap():
    same(layers_of_layers(dots), layers_of_layers(lambda f: f), X, WS)
    # Both products depend on both arguments, so they have both axes. (They may be kept transposed.)
    kept = [r.shape for r in ar.saved_residuals(layers_of_layers(dots), X, WS) if r.kind == "intermediate"]
    assert kept.count((3, 3, 5, 4)) == 2


def test_dead_outputs_are_dropped_from_the_origin_too():
    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda x, w: jax.vmap(lambda x, w: checkpoint(net)(x, w)[0])(x, w).sum()

    same(of(dots), of(lambda f: f), X, WS)
    inside = jax.jit(of(dots))
    assert (
        kept_products(lambda x, w: inside(x, w), X, WS) == kept_products(of(dots), X, WS) == [(3, 5, 4)] * 2
    )


def test_an_outer_policy_reaches_a_batched_inner_checkpoint():
    """An outer `everything_saveable` keeps what the inner would drop, batched or not."""

    def of(checkpoint: Callable[..., Any], inner: Any, outer: Any) -> Any:
        def twice(x: Any, w: Any) -> Any:
            return checkpoint(net, policy=inner)(x, w)[0]

        return lambda x, w: jax.vmap(checkpoint(twice, policy=outer))(x, w).sum()

    nothing, everything = ar.checkpoint_policies.nothing_saveable, ar.checkpoint_policies.everything_saveable
    loss = of(ar.checkpoint, nothing, everything)
    same(loss, of(lambda f, policy: f, None, None), X, WS)
    assert kept_products(loss, X, WS) == []
    assert len(ar.saved_residuals(loss, X, WS)) > len(
        ar.saved_residuals(of(ar.checkpoint, nothing, nothing), X, WS)
    )
    unbatched = [
        len(
            ar.saved_residuals(
                lambda x, w, of=of: ar.checkpoint(of, policy=everything)(x, w)[0].sum(), X[0], W
            )
        )
        for of in (net, ar.checkpoint(net, policy=nothing))
    ]
    assert unbatched[0] == unbatched[1] == len(ar.saved_residuals(loss, X, WS))


def test_constants_of_batching_and_collectives():
    """Batching rules may make constants, and collectives read the axis."""

    def f(x: Any, w: Any) -> Any:
        total = jax.lax.psum(x @ w, "i") * jax.lax.axis_index("i")
        chosen = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("i"), 1)
        return jnp.sin(chosen) * jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (4,))

    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda x, w: jax.vmap(checkpoint(f), axis_name="i", spmd_axis_name=None)(x, w).sum()

    same(of(dots), of(lambda f: f), X, WS)


def test_higher_derivatives():
    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda w: layers(checkpoint, in_axes=(0, None))(X, w)

    np.testing.assert_allclose(
        jax.jit(jax.hessian(of(dots)))(W), jax.hessian(of(lambda f: f))(W), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        jax.grad(lambda w: jnp.sum(jax.grad(of(dots))(w) ** 2))(W),
        jax.grad(lambda w: jnp.sum(jax.grad(of(lambda f: f))(w) ** 2))(W),
        rtol=1e-4,
    )


def test_an_output_that_does_not_depend_on_the_batch():
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(w @ w), jnp.sin(x @ w)

    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda x, w: sum(y.sum() for y in jax.vmap(checkpoint(f), (0, None), (0, 0))(x, w))

    same(of(dots), of(lambda f: f), X, W)


@jax.custom_vjp
def kernel(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


kernel.defvjp(
    lambda x, w: (jnp.sin(x @ w), (x, w, ar.checkpoint_name(jnp.cos(x @ w), "cos"))),
    lambda res, ct: ((ct * res[2]) @ res[1].T * 2.0, res[0].T @ (ct * res[2]) * 3.0),
)


def with_rule(x: Any, w: Any) -> Any:
    return kernel(jnp.tanh(x @ w), w).sum(0)


def with_branches(x: Any, w: Any) -> Any:
    x = jnp.tanh(x @ w)
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x @ w), lambda x: jnp.sqrt(x - x[0, 0] + 1e-9), x).sum(
        0
    )


def with_branches_in_a_loop(x: Any, w: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, _: (with_branches(x, w) * 0.1 + x, None), x, None, length=2)
    return x


def with_rule_in_a_branch(x: Any, w: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: kernel(x, w), lambda x: jnp.cos(kernel(x, w)), x)


@pytest.mark.parametrize("f", [with_rule, with_branches, with_branches_in_a_loop, with_rule_in_a_branch])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (1, None)])
def test_rules_and_branches(f: Callable[..., Any], in_axes: Any):
    """What JAX only batches before it differentiates: a `custom_vjp`, and a `cond` whose predicate is batched."""
    w = WS if in_axes[1] == 0 else W
    x = jnp.moveaxis(X, 0, in_axes[0])
    asked: list[tuple[int, ...]] = []

    def policy(prim: Any, *avals: Any, **params: Any) -> Any:
        if prim.name == "dot_general":
            asked.append(avals[0].shape)
        return DOTS(prim, *avals, **params)

    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda x, w: jax.vmap(checkpoint(f), in_axes)(x, w).sum()

    same(of(lambda f: ar.checkpoint(f, policy=policy)), of(lambda f: f), x, w)
    assert set(asked) == {(5, 4)}


def test_a_rule_under_two_vmaps_and_collectives():
    def f(x: Any, w: Any) -> Any:
        return jax.lax.psum(with_rule(x, w), "i")

    def of(checkpoint: Callable[[Any], Any]) -> Any:
        inner = jax.vmap(checkpoint(f), (0, None), axis_name="i")
        return lambda x, w: jax.vmap(inner, (None, 0))(x, w).sum()

    same(of(dots), of(lambda f: f), X, WS)


@pytest.mark.parametrize("f", [with_rule, with_branches])
def test_higher_derivatives_of_rules_and_branches(f: Callable[..., Any]):
    def of(checkpoint: Callable[[Any], Any]) -> Any:
        return lambda w: jnp.sum(jax.vmap(checkpoint(f), (0, None))(X, w) ** 2)

    second = lambda loss: jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(W)
    np.testing.assert_allclose(second(of(dots)), second(of(lambda f: f)), rtol=1e-3)


@jax.custom_vjp
def summed_by_its_rule(x: Any, w: Any) -> Any:
    return x * w


summed_by_its_rule.defvjp(
    lambda x, w: (x * w, (x, w)), lambda res, ct: (ct * res[1], jax.lax.psum(ct * res[0], "i"))
)


@jax.custom_vjp
def shared(x: Any) -> Any:
    return jax.lax.psum(x, "i")


shared.defvjp(lambda x: (jax.lax.psum(x, "i"), None), lambda _, ct: (ct,))


@jax.custom_vjp
def straight_through(x: Any, w: Any) -> Any:
    return w


straight_through.defvjp(lambda x, w: (w, None), lambda _, ct: (ct, jnp.zeros_like(ct)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: summed_by_its_rule(x, w),
        lambda x, w: shared(x) * x * w,
        lambda x, w: straight_through(x, w) * x,
    ],
    ids=["sums over the batch", "a result that all share", "straight through"],
)
def test_rules_of_what_examples_share(f: Callable[..., Any]):
    """Where operands or results are shared, JAX calls a rule with sums over the batch."""
    x, w = jnp.arange(1.0, 5.0), jnp.float32(2.0)

    def of(checkpoint: Callable[[Any], Any]) -> Any:
        batched = jax.vmap(checkpoint(f), (0, None), axis_name="i")
        return lambda x, w: (batched(x, w) * x).sum()

    same(of(dots), of(lambda f: f), x, w)
    same(of(dots), of(jax.checkpoint), x, w)
