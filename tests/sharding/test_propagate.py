"""How values are divided among eight devices, against what the compiler makes of the same program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoremat._compat import open_jaxpr
from autoremat.sharding import WHOLE, Shards, shards_of_arrays, spec_of
from autoremat.transform._jaxpr import all_eqns

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
WHOLE_SPEC = P()


def shape(*sizes: int, spec: P = WHOLE_SPEC, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(MESH, spec))


def divided(fun: Callable[..., Any], *args: Any) -> tuple[Any, Shards]:
    jaxpr, constants = open_jaxpr(jax.make_jaxpr(fun)(*args))
    return jaxpr, shards_of_arrays(jaxpr, (*constants, *jax.tree.leaves(args)))


ROWS = shape(8, 16, spec=P("data"))
BOTH = shape(8, 16, spec=P("data", "model"))
LAST = shape(8, 16, spec=P(None, "model"))
CUBE = shape(8, 4, 16, spec=P("data", None, "model"))
TOKENS = shape(8, 4, spec=P("data"), dtype=jnp.int32)
IMAGES = shape(8, 12, 12, 4, spec=P("data"))


@jax.jit
def double(x: Any) -> Any:
    return jnp.sin(x) * 2


EINSUM = [
    ("bi,ij->bj", ROWS, shape(16, 32)),
    ("bi,ij->bj", ROWS, shape(16, 32, spec=P(None, "model"))),
    ("bi,ij->bj", BOTH, shape(16, 32, spec=P("model"))),
    ("bi,bj->ij", ROWS, shape(8, 32, spec=P("data"))),
    ("bsi,btj->bst", CUBE, shape(8, 4, 16, spec=P("data"))),
]
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.tanh(x) * y + 1, (ROWS, shape(8, 16))),
    "of two, each divided": (lambda x, y: x + y, (ROWS, LAST)),
    "bias": (lambda x, b: x + b, (BOTH, shape(16, spec=P("model")))),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (BOTH,)),
    "sum of rows": (lambda x: x.sum(0), (BOTH,)),
    "mean": (lambda x: x.mean(), (BOTH,)),
    "argmax": (lambda x: jnp.argmax(x, 1), (BOTH,)),
    "transpose": (lambda x: x.T, (BOTH,)),
    "heads": (lambda x: x.reshape(8, 4, 4, 4).transpose(0, 2, 1, 3), (CUBE,)),
    "heads joined": (lambda x: x.reshape(8, 4, 64), (shape(8, 4, 4, 16, spec=P("data", None, "model")),)),
    "batch and sequence joined": (lambda x: x.reshape(32, 16), (CUBE,)),
    "new dimension": (lambda x: x[:, None, :], (BOTH,)),
    "dimension taken away": (lambda x: x.squeeze(1), (shape(8, 1, 16, spec=P("data", None, "model")),)),
    "halves": (lambda x: jnp.split(x, 2, axis=1)[0], (ROWS,)),
    "side by side": (lambda x, y: jnp.concatenate([x, y], 1), (ROWS, ROWS)),
    "slice": (lambda x: x[:, 2:6], (ROWS,)),
    "padded": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), (ROWS,)),
    "running sum": (lambda x: jnp.cumsum(x, 1), (ROWS,)),
    "sorted": (lambda x: jnp.sort(x, 1), (ROWS,)),
    "selected": (lambda x, y: jnp.where(x > 0, x, y), (BOTH, BOTH)),
    "embedding": (lambda t, i: t[i], (shape(32, 16), TOKENS)),
    "embedding, features divided": (lambda t, i: t[i], (shape(32, 16, spec=P(None, "model")), TOKENS)),
    "target": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (ROWS, shape(8, 1, spec=P("data"), dtype=jnp.int32)),
    ),
    "gradient of an embedding": (
        jax.grad(lambda t, i: jnp.sin(t[i]).sum()),
        (shape(32, 16, spec=P(None, "model")), TOKENS),
    ),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (IMAGES, shape(3, 3, 4, 8, spec=P(None, None, None, "model"))),
    ),
    "loop": (
        lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), c[:, 0]), x, ws),
        (ROWS, shape(3, 16, 16, spec=P(None, None, "model"))),
    ),
    "loop that is open": (lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * 2, x), (BOTH,)),
    "branches": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (BOTH,)),
    "call": (lambda x: jax.jit(lambda x: x * 2)(x), (BOTH,)),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x)), (BOTH,)),
    "own derivative": (jax.nn.relu, (BOTH,)),
    "constraint": (
        lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("model", "data"))) + 1,
        (ROWS,),
    ),
    "constraint that leaves a dimension open": (
        lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P(P.UNCONSTRAINED, "model"))),
        (ROWS,),
    ),
    "constraint under vmap": (
        jax.vmap(lambda y: lax.with_sharding_constraint(y * 2, NamedSharding(MESH, P("model")))),
        (ROWS,),
    ),
    "one function, called on arrays that are divided in two ways": (
        lambda x, y: (double(x), double(y)),
        (ROWS, LAST),
    ),
    "the same of JAX": (lambda x, y: (jax.nn.silu(x), jax.nn.silu(y)), (ROWS, LAST)),
    "one after the other": (lambda x, y: jnp.concatenate([x, y], 0), (ROWS, ROWS)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (ROWS, ROWS)),
    "first half": (lambda x: x[:4] * 2, (ROWS,)),
    "tiles": (lambda x: jnp.tile(x, (1, 3)), (ROWS,)),
    "barrier": (
        lambda x, y, w: lax.optimization_barrier((x, y, w)),
        (ROWS, LAST, shape(16, 32)),
    ),
    "loop whose condition reads": (
        lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c * 2, x),
        (ROWS,),
    ),
    "shard_map": (jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data")), (ROWS,)),
    "shard_map over one of two axes": (
        jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}),
        (BOTH,),
    ),
    "jit with shardings of its own": (
        jax.jit(
            lambda x, y: (x + 1, y * 2),
            in_shardings=(NamedSharding(MESH, P("data")), NamedSharding(MESH, P(None, "model"))),
        ),
        (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)),
    ),
    "gradient": (jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (shape(16, 32, spec=P(None, "model")), ROWS)),
}  # fmt: skip
CASES |= {f"{spec} {number}": (lambda x, y, s=spec: jnp.einsum(s, x, y), (x, y)) for number, (spec, x, y) in enumerate(EINSUM)}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_returned_is_divided_as_the_compiler_does_it(name: str) -> None:
    """By the same axes, dimension by dimension."""
    fun, args = CASES[name]
    jaxpr, shards = divided(fun, *args)
    compiled = jax.jit(fun).lower(*args).compile()
    theirs = jax.tree.leaves(compiled.output_shardings)
    assert len(theirs) == len(jaxpr.outvars)
    for v, sharding in zip(jaxpr.outvars, theirs, strict=True):
        ndim = len(v.aval.shape)
        assert shards.of(v) == spec_of(sharding, ndim), (jaxpr, sharding)


def test_bytes_are_those_of_one_device() -> None:
    jaxpr, shards = divided(lambda x, w: jnp.sin(x @ w), ROWS, shape(16, 32, spec=P(None, "model")))
    assert [shards.nbytes(v) for v in jaxpr.invars] == [8 * 16 * 4 // 4, 16 * 32 * 4 // 2]
    assert [shards.nbytes(v) for v in jaxpr.outvars] == [8 * 32 * 4 // 8]


def test_uneven_parts_are_rounded_up() -> None:
    jaxpr, shards = divided(lambda x: jnp.pad(x, ((0, 0), (0, 1)))[:, :-1] * 2, ROWS)
    assert shards.nbytes(jaxpr.outvars[0]) == 8 * 16 * 4 // 4
    mesh = Mesh(np.array(jax.devices()[:3]), ("three",))
    x = jax.ShapeDtypeStruct((6, 10), jnp.float32, sharding=NamedSharding(mesh, P("three")))
    jaxpr, shards = divided(lambda x: x.reshape(2, 3, 10), x)
    assert shards.nbytes(jaxpr.outvars[0]) in (2 * 3 * 10 * 4, 2 * 1 * 10 * 4)


def test_arrays_that_are_closed_over_are_whole() -> None:
    """To a compiler they are constants."""
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(MESH, P("data")))
    jaxpr, shards = divided(lambda y: x * y, shape(16))
    assert shards.nbytes(jaxpr.outvars[0]) == 8 * 16 * 4


def test_axes_that_the_types_leave_to_the_compiler() -> None:
    mesh = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
    jaxpr, shards = divided(jnp.sin, x)
    assert shards.nbytes(jaxpr.invars[0]) == shards.nbytes(jaxpr.outvars[0]) == 8 * 16 * 4 // 8


def test_to_be_divided_further_moves_nothing() -> None:
    jaxpr, shards = divided(
        lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("data", "model"))), ROWS
    )
    assert shards.sent_bytes(jaxpr.eqns[0]) == 0
    swapped = lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P(None, "data")))
    jaxpr, shards = divided(swapped, ROWS)
    assert shards.sent_bytes(jaxpr.eqns[0]) == 8 * 16 * 4 // 4


def test_nothing_is_divided() -> None:
    assert divided(jnp.sin, jnp.ones(4))[1] is WHOLE
    assert WHOLE.nbytes(divided(jnp.sin, jnp.ones(4))[0].invars[0]) == 16


def test_types_that_name_a_sharding_are_counted_once() -> None:
    """Explicit axes: the size of one shard is in the type."""
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
    )
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
    jaxpr, shards = divided(jnp.sin, x)
    assert shards.nbytes(jaxpr.outvars[0]) == 8 * 16 * 4 // 8
    assert shards.devices(jaxpr.eqns[0]) == 8


def test_inside_a_shard_map_types_are_those_of_a_shard() -> None:
    inside = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    jaxpr, shards = divided(inside, ROWS)
    body = next(e for e in all_eqns(jaxpr) if e.primitive.name == "sin")
    assert shards.nbytes(body.outvars[0]) == shards.nbytes(jaxpr.outvars[0]) == 8 * 16 * 4 // 4
    assert shards.devices(body) == 1


# ---------------------------------------------------------------------------------------------------- work and what is sent


def product(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Devices and sent bytes of the only product."""
    jaxpr, shards = divided(fun, *args)
    (eqn,) = (e for e in all_eqns(jaxpr) if e.primitive.name == "dot_general")
    return shards.devices(eqn), shards.sent_bytes(eqn)


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def test_weights_that_are_divided_as_the_batch_are_gathered() -> None:
    devices, sent = product(matmul, ROWS, shape(16, 32, spec=P("data")))
    assert devices == 4
    assert sent == 3 * (16 * 32 * 4 // 4)


def test_parts_of_a_sum_are_reduced_everywhere() -> None:
    devices, sent = product(matmul, LAST, shape(16, 32, spec=P("model")))
    assert devices == 2
    assert sent == 2 * (8 * 32 * 4) // 2


def test_parts_of_a_sum_are_scattered_where_the_result_is_divided() -> None:
    def of(x: Any, w: Any) -> Any:
        return lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("model")))

    devices, sent = product(of, LAST, shape(16, 32, spec=P("model")))
    assert devices == 2
    assert sent == 8 * 32 * 4 // 2


def test_nothing_is_sent_where_each_has_what_it_needs() -> None:
    assert product(matmul, ROWS, shape(16, 32, spec=P(None, "model"))) == (8, 0)


def test_a_constraint_gathers() -> None:
    jaxpr, shards = divided(lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P())), ROWS)
    (eqn,) = jaxpr.eqns
    assert shards.sent_bytes(eqn) == 3 * (8 * 16 * 4 // 4)
