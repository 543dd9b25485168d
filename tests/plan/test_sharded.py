"""Plans for programs that are divided among eight devices: budgets, predictions and accounts are those of one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoremat as ar
from autoremat.cost import device
from autoremat.plan._candidates import build_variants
from autoremat.plan._program import LossProgram
from autoremat.plan._trace import trace

WIDTH, INSIDE, LAYERS, BATCH = 128, 512, 5, 2048
ADAM = optax.adam(1e-2)
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
BOTH = ("data", "model")


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jax.nn.softmax(jax.nn.gelu(x @ w["up"])) @ w["down"]
    return (x * x).mean()


def step(params: Any, state: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x)
    updates, state = ADAM.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


TRAIN = jax.jit(step, donate_argnums=(0, 1))
WAYS: dict[str, tuple[P, P, P]] = {
    "data": (P(), P(), P(BOTH)),
    "fsdp": (P(BOTH), P(BOTH), P(BOTH)),
    "tensor": (P(None, "model"), P("model", None), P("data")),
}
"""Of the weights up, the weights down, and the batch."""


@functools.cache
def arguments(way: str, mesh: Mesh = MESH) -> tuple[Any, ...]:
    up, down, rows = (NamedSharding(mesh, spec) for spec in WAYS[way])
    key = jax.random.key(0)
    params = [
        {
            "up": jax.device_put(jax.random.normal(k, (WIDTH, INSIDE)) * 0.05, up),
            "down": jax.device_put(jax.random.normal(k, (INSIDE, WIDTH)) * 0.05, down),
        }
        for k in jax.random.split(key, LAYERS)
    ]
    return params, ADAM.init(params), jax.device_put(jax.random.normal(key, (BATCH, WIDTH)), rows)


def copies(args: Any) -> Any:
    return jax.tree.map(jnp.array, args)


@pytest.mark.parametrize("way", WAYS)
def test_the_predicted_memory_is_the_compiled_one(way: str) -> None:
    args = arguments(way)
    compiled, predicted = ar.measure(TRAIN, *args), ar.predict(TRAIN, *args)
    assert predicted.argument_bytes == compiled.argument_bytes
    assert predicted.alias_bytes == compiled.alias_bytes > 0
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_a_divided_step_fits(way: str) -> None:
    args = arguments(way)
    whole = ar.measure(TRAIN, *args)
    memory = int(0.85 * whole.peak_bytes)
    found = ar.fit(TRAIN, *args, memory=memory, reserve=0)
    assert found.plan.peak_bytes <= memory
    assert found.plan.checkpoints > 0
    assert found.plan.compiles <= 6
    assert found.account.total == found.plan.peak_bytes
    sizes = [sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(tree)) for tree in args]
    assert [found.account.parameters, found.account.optimizer_state, found.account.batch] == sizes
    ours, theirs = found.step(*copies(args)), TRAIN(*copies(args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), ours, theirs)
    assert all(
        jax.tree.leaves(
            jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), ours, theirs)
        )
    )


def test_gradients_of_single_examples() -> None:
    """Under `vmap` the step has a dimension more than what it differentiates."""
    params, _, x = arguments("data")

    def train(params: Any, x: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, x.reshape(8, BATCH // 8, WIDTH))
        return jax.tree.map(lambda w, g: w - 0.1 * g.mean(0), params, gradients)

    train = jax.jit(train)
    memory = int(0.9 * ar.measure(train, params, x).peak_bytes)
    found = ar.fit(train, params, x, memory=memory, reserve=0, effort="fast")
    assert found.plan.peak_bytes <= memory


def test_shardings_that_the_step_asks_for() -> None:
    """Plain arrays, and a jit that says how they are divided: arguments are counted as that says."""
    params, state, x = jax.tree.map(np.asarray, arguments("data"))
    whole, rows = NamedSharding(MESH, P()), NamedSharding(MESH, P(BOTH))
    train = jax.jit(step, in_shardings=(whole, whole, rows), donate_argnums=(0, 1))
    compiled, predicted = ar.measure(train, params, state, x), ar.predict(train, params, state, x)
    assert predicted.argument_bytes == compiled.argument_bytes
    found = ar.fit(train, params, state, x, memory="1GiB")
    assert found.account.batch == x.nbytes // 8
    assert found.account.total == found.plan.peak_bytes


def whole_path(mesh: Mesh | None, way: str = "data", on: str = "cpu") -> tuple[int, int]:
    """Bytes that are kept where nothing is recomputed, and picoseconds of recomputing everything."""
    params, _, x = arguments(way, mesh or MESH)
    if mesh is None:
        params, x = jax.tree.map(np.asarray, (params, x))
    traced = trace(loss, (params, x), (0,))
    program = LossProgram(traced, (params, x), (0,), scalar_argnum=True, has_aux=False)
    path = next(build_variants(traced, device(on), ("dependence",), program.shards)).path
    return path.states[0].nbytes, path.states[path.flat - 1].cost


def test_kept_bytes_and_work_are_those_of_one_device() -> None:
    """By the shardings of arguments as by those in types."""
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)
    alone, divided, typed = map(whole_path, (None, MESH, explicit))
    assert alone[0] == 8 * divided[0] == 8 * typed[0]
    assert alone[1] == pytest.approx(8 * divided[1], rel=0.01)
    assert typed[1] == divided[1]


def test_communication_is_a_cost() -> None:
    """Weights that are divided as the batch is are gathered for every product, when it runs again too."""
    on = "tpu:v5e"
    whole, gathered = whole_path(MESH, "data", on), whole_path(MESH, "fsdp", on)
    assert gathered[0] == whole[0]
    sent = 2 * WIDTH * INSIDE * 4 * 7 // 8 / device(on).interconnect_bytes_per_s * 1e12
    assert gathered[1] - whole[1] >= LAYERS * sent / 2
