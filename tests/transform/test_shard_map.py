"""Checkpoints inside and round `shard_map`, on two of the CPU devices that conftest.py asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoremat.transform import checkpoint, checkpoint_name, checkpoint_policies

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")

X = jnp.arange(12.0).reshape(4, 3) / 10
W = jnp.eye(3) * 0.7 + 0.1


def body(x: Any, w: Any) -> Any:
    """Collectives, a scalar that differs between shards, a loop, a branch."""
    y = checkpoint_name(jnp.sin(x @ w), "y")
    s = jnp.sin(y.sum())
    z = jnp.cos(lax.psum(y * s, "i"))
    z, _ = lax.scan(lambda c, _: (jnp.sin(c + y), None), z + 0.0 * y, None, length=2)
    z = lax.cond(s > 0, lambda z: jnp.sin(jnp.sin(z)), lambda z: 2.0 * jnp.cos(z), z)
    return lax.psum(jnp.sum(z * y), "i") + lax.pmean(s, "i"), jnp.sin(y)


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((2,), ("i",), axis_types=(kind,), devices=jax.devices()[:2])


def sharded(fun: Callable[..., Any], check_vma: bool = True) -> Callable[..., Any]:
    return jax.shard_map(
        fun, mesh=mesh(), in_specs=(P("i"), P()), out_specs=(P(), P("i")), check_vma=check_vma
    )


def loss(fun: Callable[..., Any]) -> Callable[..., Any]:
    def scalar(x: Any, w: Any) -> Any:
        total, y = fun(x, w)
        return total + (y**2).sum()

    return scalar


POLICIES = {
    "nothing": None,
    "everything": checkpoint_policies.everything_saveable,
    "dots": checkpoint_policies.dots_saveable,
    "name": checkpoint_policies.save_only_these_names("y"),
    "sin": lambda prim, *_, **__: prim.name == "sin",
    "psum": lambda prim, *_, **__: prim.name.startswith("psum"),
}


@pytest.mark.parametrize(
    ("policy", "check_vma"), [*((name, True) for name in POLICIES), ("nothing", False), ("everything", False)]
)
def test_values_and_gradients(policy: str, check_vma: bool) -> None:
    wrap = lambda f: checkpoint(f, policy=POLICIES[policy])
    expected = jax.jit(jax.value_and_grad(loss(sharded(body, check_vma)), (0, 1)))(X, W)
    for fun in (wrap(sharded(body, check_vma)), wrap(sharded(wrap(body), check_vma))):
        got = jax.jit(jax.value_and_grad(loss(fun), (0, 1)))(X, W)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_other_transformations(place: str) -> None:
    fun = sharded(checkpoint(body)) if place == "inside" else checkpoint(sharded(body))
    tangents = (jnp.cos(X), jnp.sin(W))

    def forward(f: Callable[..., Any]) -> Any:
        return jax.jvp(f, (X, W), tangents)[1]

    def second_order(f: Callable[..., Any]) -> Any:
        return jax.grad(lambda w: jnp.vdot(jax.grad(f, 1)(X, w), W))(W)

    for mode in (forward, second_order):
        got, expected = (jax.jit(lambda f=f, m=mode: m(loss(f)))() for f in (fun, sharded(body)))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_policy_looks_inside() -> None:
    def sines(policy: Any) -> int:
        return str(jax.make_jaxpr(jax.grad(loss(checkpoint(sharded(body), policy=policy))))(X, W)).count(
            " sin "
        )

    assert sines(POLICIES["sin"]) < sines(POLICIES["nothing"])
    assert sines(POLICIES["everything"]) < sines(POLICIES["nothing"])


def test_what_is_kept_stays_sharded() -> None:
    fun = checkpoint(sharded(body), policy=POLICIES["name"])
    x = jax.device_put(X, NamedSharding(mesh(), P("i")))
    _, pull = jax.jit(lambda x, w: jax.vjp(fun, x, w))(x, W)
    kept = [r for r in jax.tree.leaves(pull) if getattr(r, "shape", None) == X.shape]
    assert kept
    assert all(r.sharding.spec[0] == "i" for r in kept)


def test_a_jit_with_shardings_inside() -> None:
    sharding = NamedSharding(mesh(), P("i"))
    inner = jax.jit(lambda x: jnp.sin(jnp.sin(x)), in_shardings=sharding, out_shardings=sharding)
    fun = lambda x: inner(inner(x)).sum()
    x = jax.device_put(X, sharding)
    for policy in (None, POLICIES["everything"], POLICIES["sin"]):
        np.testing.assert_allclose(jax.grad(checkpoint(fun, policy=policy))(x), jax.grad(fun)(x), rtol=1e-5)
    for policy, again in ((None, True), (POLICIES["everything"], False)):
        text = jax.jit(jax.grad(checkpoint(fun, policy=policy))).lower(x).as_text()
        assert ("optimization_barrier" in text) is again


def test_explicit_sharding() -> None:
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(X, NamedSharding(explicit, P("i", None)))

        def fun(x: Any, w: Any) -> Any:
            x, _ = lax.scan(lambda c, _: (jnp.sin(jnp.sin(c @ w)), None), x, None, length=2)
            return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).sum()

        for policy in ("nothing", "everything", "dots"):
            wrapped = checkpoint(fun, policy=POLICIES[policy])
            got, expected = (jax.jit(jax.grad(f, (0, 1)))(x, W) for f in (wrapped, fun))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
            assert got[0].sharding == expected[0].sharding


def test_pmap() -> None:
    fun = lambda x: jnp.sin(jnp.sin(lax.psum(x, "i")))
    mapped = jax.pmap(fun, axis_name="i", devices=jax.devices()[:2])
    x = X.reshape(2, 6)
    expected = jax.grad(lambda x: mapped(x).sum())(x)
    for policy in (None, POLICIES["everything"], POLICIES["sin"]):
        got = jax.grad(lambda x, p=policy: checkpoint(mapped, policy=p)(x).sum())(x)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
