"""Policies that offload: what they choose waits in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import Offloadable

import autoremat as ar

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (3, 8, 8)) / 3
PLACES = {"offload_src": "device", "offload_dst": "pinned_host"}


def policies(space: Any) -> dict[str, Any]:
    """The same policies, of `jax.checkpoint_policies` or ours."""
    named = space.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["moved"], **PLACES
    )
    return {
        "dots": space.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "named": named,
        "both": space.save_from_both_policies(named, space.dots_saveable),
        "callable": lambda prim, *_, **__: (
            Offloadable("device", "pinned_host") if prim.name == "sin" else False
        ),
    }


def layer(x: Any, w: Any) -> Any:
    x = ar.checkpoint_name(x @ w, "moved")
    return jnp.cos(ar.checkpoint_name(jnp.sin(x) * x, "kept") @ w)


def unrolled(checkpoint: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(x: Any, ws: Any) -> Any:
        for w in ws:
            x = checkpoint(layer)(x, w)
        return (x**2).sum()

    return loss


def scanned(checkpoint: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, ws: (jax.lax.scan(lambda c, w: (checkpoint(layer)(c, w), None), x, ws)[0] ** 2).sum()


def around(checkpoint: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return checkpoint(scanned(lambda f: f))


FORMS = {"unrolled": unrolled, "scanned": scanned, "around the scan": around}


def offloaded(fun: Any, *args: Any) -> list[Any]:
    return [r for r in ar.saved_residuals(fun, *args) if r.offloaded]


@pytest.mark.parametrize("name", list(policies(ar.checkpoint_policies)))
@pytest.mark.parametrize("form", list(FORMS))
def test_gradients_are_those_of_jax(form: str, name: str):
    ours = FORMS[form](lambda f: ar.checkpoint(f, policy=policies(ar.checkpoint_policies)[name]))
    theirs = FORMS[form](lambda f: jax.checkpoint(f, policy=policies(jax.checkpoint_policies)[name]))
    plain = FORMS[form](lambda f: f)
    # JAX's own combination of two policies takes policies of bools only.
    for other in (plain,) if name == "both" else (theirs, plain):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            jax.jit(jax.grad(ours, (0, 1)))(X, W),
            jax.jit(jax.grad(other, (0, 1)))(X, W),
        )
    kept = offloaded(ours, X, W)
    assert sum(r.nbytes for r in kept) == ar.saved_residuals(ours, X, W).host_bytes > 0
    assert all("in host memory" in r.description and "<host>" in r.type for r in kept)


def test_what_is_offloaded():
    """The values named so, stacked by the scan, in the memory of the host; others are on the device."""
    found = ar.saved_residuals(
        scanned(lambda f: ar.checkpoint(f, policy=policies(ar.checkpoint_policies)["named"])), X, W
    )
    assert [(r.name, r.shape) for r in found if r.offloaded] == [("moved", (3, 4, 8))]
    assert [(r.name, r.shape) for r in found if r.name == "kept"] == [("kept", (3, 4, 8))]


def test_without_jit_and_higher_derivatives():
    fun = unrolled(lambda f: ar.checkpoint(f, policy=policies(ar.checkpoint_policies)["named"]))
    plain = unrolled(lambda f: f)
    np.testing.assert_allclose(jax.grad(fun)(X, W), jax.grad(plain)(X, W), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(jax.hessian(fun))(X, W), jax.hessian(plain)(X, W), rtol=1e-3, atol=1e-4
    )
    xs = jnp.stack([X, -X])
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda xs: jax.vmap(fun, (0, None))(xs, W).sum()))(xs),
        jax.grad(lambda xs: jax.vmap(plain, (0, None))(xs, W).sum())(xs),
        rtol=1e-5,
        atol=1e-6,
    )


def test_an_unknown_memory_is_an_error():
    policy = ar.checkpoint_policies.offload_dot_with_no_batch_dims("device", "attic")
    with pytest.raises(
        ValueError, match=r"unknown memory \['attic'\].*Cheapest fix: offload_src and offload_dst among"
    ):
        jax.grad(unrolled(lambda f: ar.checkpoint(f, policy=policy)))(X, W)


def test_packed_values_are_packed_inside_the_iteration():
    """What a loop stacks is the packed form, not the plain one that is packed when the loop is done."""

    def loss(x: Any, ws: Any) -> Any:
        return scanned(lambda f: ar.checkpoint(lambda x, w: jax.nn.relu(x @ w), budget=8))(x, ws)

    whole = ar.checkpoint(loss, budget="35%")
    np.testing.assert_allclose(jax.grad(whole)(X, W), jax.grad(loss)(X, W), rtol=1e-5)
    scans = [e for e in jax.make_jaxpr(jax.grad(loss))(X, W).jaxpr.eqns if e.primitive.name == "scan"]
    stacked = {str(v.aval.dtype) for v in scans[0].outvars}
    assert "uint8" in stacked
    assert "bool" not in stacked
