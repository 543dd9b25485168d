"""Checkpoints in programs that are spread over eight devices: data, tensor and fully sharded parallelism.

Automatic sharding (the compiler partitions), explicit sharding (types carry it) and `shard_map` (collectives by hand).
"""

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

import autoremat as ar

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

LAYERS, BATCH, WIDTH, HIDDEN = 3, 8, 16, 32
POLICIES = {
    "nothing": None,
    "dots": ar.checkpoint_policies.dots_saveable,
    "name": ar.checkpoint_policies.save_only_these_names("hidden"),
}
# How parameters and activations lie, by the kind of parallelism: up, down, activations.
LAYOUTS = {
    "data": (P(), P(), P("data")),
    "tensor": (P(None, None, "model"), P(None, "model", None), P("data")),
    "fully sharded": (
        P(None, ("data", "model"), None),
        P(None, None, ("data", "model")),
        P(("data", "model")),
    ),
}


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:8])


def arguments() -> tuple[Any, Any]:
    up, down, x = (
        jax.random.normal(key, shape) / 4
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            [(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (BATCH, WIDTH)],
            strict=True,
        )
    )
    return {"up": up, "down": down}, x


def block(x: Any, p: Any) -> Any:
    hidden = ar.checkpoint_name(jnp.tanh(x @ p["up"]), "hidden")
    return x + jnp.sin(hidden) @ p["down"]


def loss_of(wrap: Callable[..., Any], *, scan: bool, constrain: Callable[[Any], Any]) -> Callable[..., Any]:
    wrapped = wrap(lambda x, p: constrain(block(x, p)))

    def loss(params: Any, x: Any) -> Any:
        if scan:
            x, _ = lax.scan(lambda x, p: (wrapped(x, p), None), x, params)
        else:
            for i in range(LAYERS):
                x = wrapped(x, jax.tree.map(lambda a, i=i: a[i], params))
        return (x**2).sum()

    return loss


def assert_same(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


FORMS = pytest.mark.parametrize(("policy", "scan"), [("nothing", False), ("dots", True), ("name", True)])


@FORMS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_automatic_sharding(layout: str, policy: str, scan: bool) -> None:
    devices = mesh()
    up, down, acts = LAYOUTS[layout]
    params, x = arguments()
    put = lambda a, spec: jax.device_put(a, NamedSharding(devices, spec))
    placed = {"up": put(params["up"], up), "down": put(params["down"], down)}, put(x, acts)
    constrain = lambda x: lax.with_sharding_constraint(x, NamedSharding(devices, acts))

    def gradient(wrap: Callable[..., Any]) -> Any:
        return jax.jit(jax.value_and_grad(loss_of(wrap, scan=scan, constrain=constrain), (0, 1)))

    ours, theirs = (
        gradient(lambda f, c=c, p=p: c(f, policy=p))
        for c, p in ((ar.checkpoint, POLICIES[policy]), (jax.checkpoint, None))
    )
    got, expected = ours(*placed), theirs(*placed)
    assert_same(
        got, jax.value_and_grad(loss_of(lambda f: f, scan=scan, constrain=lambda x: x), (0, 1))(params, x)
    )
    assert jax.tree.map(lambda a: a.sharding.spec, got) == jax.tree.map(lambda a: a.sharding.spec, expected)


def test_what_is_kept_lies_as_it_was_made() -> None:
    """No residual is gathered."""
    devices = mesh()
    _, _, acts = LAYOUTS["tensor"]
    params, x = arguments()
    put = lambda a, spec: jax.device_put(a, NamedSharding(devices, spec))
    p = {"up": put(params["up"][0], P(None, "model")), "down": put(params["down"][0], P("model", None))}
    fun = ar.checkpoint(block, policy=POLICIES["name"])
    _, pull = jax.jit(lambda x, p: jax.vjp(fun, x, p))(put(x, acts), p)
    kept = [r for r in jax.tree.leaves(pull) if getattr(r, "shape", None) == (BATCH, HIDDEN)]
    assert kept
    assert all(r.addressable_shards[0].data.shape == (BATCH // 4, HIDDEN // 2) for r in kept)


@FORMS
def test_explicit_sharding(policy: str, scan: bool) -> None:
    devices = mesh(AxisType.Explicit)
    params, x = arguments()
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, P("data")))
        of = lambda wrap: jax.jit(jax.value_and_grad(loss_of(wrap, scan=scan, constrain=lambda x: x), (0, 1)))
        got = of(lambda f: ar.checkpoint(f, policy=POLICIES[policy]))(params, x)
        expected = of(lambda f: f)(params, x)
        assert_same(got, expected)
        assert got[1][1].sharding == expected[1][1].sharding


@pytest.mark.parametrize(
    ("policy", "place"),
    [("nothing", "inside"), ("gathered", "inside"), ("nothing", "outside"), ("dots", "outside")],
)
def test_shard_map(policy: str, place: str) -> None:
    """Weights are gathered for each layer and again for its backward pass, and their gradients scattered."""
    gathered = ar.checkpoint_policies.save_only_these_names("gathered")
    chosen = gathered if policy == "gathered" else POLICIES[policy]

    def layer(x: Any, p: Any) -> Any:
        whole = {k: lax.all_gather(a, ("data", "model"), tiled=True) for k, a in p.items()}
        return block(x, jax.tree.map(lambda a: ar.checkpoint_name(a, "gathered"), whole))

    def local(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def loss(params: Any, x: Any) -> Any:
            x, _ = lax.scan(lambda x, p: (wrap(layer)(x, p), None), x, params)
            return lax.psum((x**2).sum(), ("data", "model"))

        return loss

    def sharded(inside: Callable[..., Any]) -> Callable[..., Any]:
        specs: Any = (
            {"up": P(None, ("data", "model")), "down": P(None, ("data", "model"))},
            P(("data", "model")),
        )
        return jax.shard_map(local(inside), mesh=mesh(), in_specs=specs, out_specs=P())

    wrap = lambda f: ar.checkpoint(f, policy=chosen)
    ours = sharded(wrap) if place == "inside" else wrap(sharded(lambda f: f))
    params, x = arguments()
    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(params, x)
    plain = loss_of(lambda f: f, scan=True, constrain=lambda x: x)
    assert_same(got, jax.value_and_grad(plain, (0, 1))(params, x))
    if (
        place == "inside"
    ):  # two weights, in the forward loop, and again in the backward loop if they were not kept
        gathers = jax.jit(jax.grad(ours)).lower(params, x).as_text().count('stablehlo.all_gather"')
        assert gathers == (2 if policy == "gathered" else 4)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_a_plan_of_a_sharded_program(scan: bool) -> None:
    """Planned for arrays that lie on eight devices: bytes are those of one device."""
    devices = mesh()
    up, down, acts = LAYOUTS["tensor"]
    params, x = arguments()
    put = lambda a, spec: jax.device_put(a, NamedSharding(devices, spec))
    placed = {"up": put(params["up"], up), "down": put(params["down"], down)}, put(x, acts)
    loss = loss_of(lambda f: f, scan=scan, constrain=lambda x: x)
    plan = ar.plan(loss, *placed, budget="100%", effort="fast")
    assert plan.memory.argument_bytes < sum(a.nbytes for a in jax.tree.leaves((params, x)))
    assert_same(jax.jit(jax.grad(plan.apply(loss)))(*placed), jax.grad(loss)(params, x))
