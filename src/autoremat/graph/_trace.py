"""A jaxpr as a `Graph`.

    Jaxpr -> Graph          equation i is op i; inputs are the constants, then the arguments
    Var   -> value id       every variable that is bound has a value, also those that nothing reads
    Literal -> nothing      literals are no values; where a cost rule needs their shape, it is in `Op.params`

The only module of this package that imports JAX, and only its public API.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from autoremat.graph._ir import Graph, Op, Value

EffectAllowed = Callable[[Any], bool]
SourceOf = Callable[[Any], str]


class Division(Protocol):
    """How a program is divided among devices: bytes of a variable on one of them, by how many an equation's work is divided, and
    what one of them has to send for it."""

    def nbytes(self, var: Any) -> int:
        """Bytes of a variable on one device."""
        ...

    def devices(self, eqn: Any) -> int:
        """Among how many devices the work of an equation is divided."""
        ...

    def sent_bytes(self, eqn: Any) -> int:
        """Bytes that one device sends to others for it."""
        ...


def allows_named_axes(effect: object) -> bool:
    """Say whether `effect` is only that of reading a named axis, which may happen any number of times."""
    return type(effect).__name__ == "NamedAxisEffect"


def source_of(eqn: Any) -> str:
    """Return where the user's program made `eqn`: `"file:line:column (function)"`."""
    return source_info_util.summarize(eqn.source_info)


def trace_graph(
    jaxpr: Any,
    *,
    demanded: Iterable[Any] = (),
    free: Iterable[Any] = (),
    effect_allowed: EffectAllowed = allows_named_axes,
    source_of: SourceOf = source_of,
    shards: Division | None = None,
) -> tuple[Graph, dict[Any, int]]:
    """Return the graph of `jaxpr`, and the value id of each of its variables.

    **Arguments:** `jaxpr` is a `Jaxpr`, or a `ClosedJaxpr`, whose constants become inputs. `demanded` are
    variables that the backward pass reads, `free` arguments that are alive anyway. `effect_allowed` says of
    an effect that an equation with it may run again. `shards` say how it is divided among devices; left out, as its types say.

    **Danger:** a variable of `demanded` or `free` that is not bound by `jaxpr` itself raises `KeyError`.
    """
    builder = _Builder(effect_allowed, source_of, frozenset(free), shards)
    graph = builder.build(_open(jaxpr), demanded)
    missing = builder.free - builder.ids.keys()
    if missing:
        raise KeyError(f"free variables that the jaxpr does not bind: {missing}")
    return graph, builder.ids


class _Builder:
    """Numbers the variables of one jaxpr and collects its ops."""

    def __init__(
        self,
        effect_allowed: EffectAllowed,
        source_of: SourceOf,
        free: frozenset[Any],
        shards: Division | None,
    ) -> None:
        self.effect_allowed = effect_allowed
        self.source_of = source_of
        self.free = free
        self.shards = shards
        self.values: list[Value] = []
        self.ids: dict[Any, int] = {}

    def build(self, jaxpr: Any, demanded: Iterable[Any]) -> Graph:
        inputs = tuple(self._new(v) for v in (*jaxpr.constvars, *jaxpr.invars))
        ops = tuple(self._op(i, eqn) for i, eqn in enumerate(jaxpr.eqns))
        return Graph(
            values=tuple(self.values),
            ops=ops,
            inputs=inputs,
            outputs=self._read(jaxpr.outvars),
            demanded=tuple(self.ids[v] for v in demanded),
        )

    def _new(self, var: Any, producer: int | None = None, name: str | None = None) -> int:
        shape, dtype, nbytes = aval_size(var.aval)
        if self.shards is not None:
            nbytes = self.shards.nbytes(var)
        i = len(self.values)
        free = producer is None and var in self.free
        self.values.append(
            Value(id=i, shape=shape, dtype=dtype, nbytes=nbytes, producer=producer, free=free, name=name)
        )
        self.ids[var] = i
        return i

    def _read(self, atoms: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.ids[a] for a in atoms if not isinstance(a, jex.Literal))

    def _op(self, i: int, eqn: Any) -> Op:
        name = tag_of(eqn)
        counted = _counted_programs(eqn)
        inner = (self._counted(counted),) if counted else tuple(map(self._inner, inner_jaxprs(eqn)))
        return Op(
            id=i,
            primitive=eqn.primitive.name if name is None else "name",
            inputs=self._read(eqn.invars),
            outputs=tuple(self._new(v, i, name) for v in eqn.outvars),
            params=_params(eqn),
            inner=inner,
            trips=_trips(eqn) if inner else 1,
            repeatable=all(map(self.effect_allowed, eqn.effects)) and not draws_unrepeatable_bits(eqn),
            source=self.source_of(eqn),
            devices=self.shards.devices(eqn) if self.shards is not None else 1,
            sent_bytes=self.shards.sent_bytes(eqn) if self.shards is not None else 0,
        )

    def _inner(self, jaxpr: Any) -> Graph:
        return _Builder(self.effect_allowed, self.source_of, frozenset(), self.shards).build(jaxpr, ())

    def _counted(self, programs: Iterable[tuple[Any, int]]) -> Graph:
        """A graph that runs each program so many times: one op for each, without operands."""
        ops = tuple(
            Op(id=i, primitive="closed_call", inputs=(), outputs=(), inner=(self._inner(jaxpr),), trips=trips)
            for i, (jaxpr, trips) in enumerate(programs)
        )
        return Graph(values=(), ops=ops, inputs=(), outputs=())


# --- sizes --------------------------------------------------------------------------------------------------

_SUB_BYTE_BITS = {
    "int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4,
    "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6,
}  # fmt: skip


def aval_size(aval: Any) -> tuple[tuple[int, ...], str, int]:
    """Return shape, dtype and bytes on one device of an array of type `aval`.

    Types narrower than a byte are packed and rounded up to whole bytes; a key counts its key data, a
    reference the array that it refers to; tokens and `float0` have no bytes. The shape is the global one; the
    bytes are those of one shard where the type itself names a sharding (explicit axes).
    """
    aval = getattr(aval, "inner_aval", aval)
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return (), type(aval).__name__, _lowered_bytes(aval)
    shape = tuple(int(d) for d in shape)
    count = math.prod(_shard_shape(aval, shape))
    name = _dtype_name(dtype)
    bits = _SUB_BYTE_BITS.get(name)
    nbytes = -(-count * bits // 8) if bits else count * dtype.itemsize
    return shape, name, nbytes


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _lowered_bytes(aval: Any) -> int:
    """Types of libraries ("hijax") name the array types that they are made of; tokens have none."""
    lower = getattr(aval, "lo_ty", None)
    parts = lower() if lower else ()
    return sum(aval_size(a)[2] for a in parts if type(a) is not type(aval))


def _shard_shape(aval: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    sharding = getattr(aval, "sharding", None)
    spec = getattr(sharding, "spec", None)
    if sharding is None or spec is None or all(axes is None for axes in spec):
        return shape
    return tuple(sharding.shard_shape(shape))


# --- inner programs -----------------------------------------------------------------------------------------

_INNER: Mapping[str, tuple[str, ...]] = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vmap_call": ("call",),
    "custom_partitioning": ("call",),
    "linear_call": ("callee",),
    "remat_opt": ("fwd_jaxpr",),
    "shard_map": ("jaxpr",),
    "autoremat_checkpoint": ("jaxpr",),
    "autoremat_linear": ("jaxpr",),
    "autoremat_scan": ("jaxpr",),
    "pallas_call": ("jaxpr",),
    "reduce": ("jaxpr",),
    "reduce_window": ("jaxpr",),
    # Combiners of single elements: what an execution of the primitive costs is in its rule.
    "scatter": (),
    "scatter-add": (),
    "scatter-sub": (),
    "scatter-mul": (),
    "scatter-min": (),
    "scatter-max": (),
    "select_and_scatter": (),
}
"""The parameters that hold the programs which one execution runs. Others are searched in all parameters."""


def inner_jaxprs(eqn: Any) -> tuple[Any, ...]:
    """Return the open jaxprs that one execution of `eqn` runs; of a `cond` all branches."""
    name = eqn.primitive.name
    if name == "custom_linear_solve":
        return tuple(_jaxprs_in([eqn.params["jaxprs"].solve]))
    if name == "call_hi_primitive":
        return () if tag_of(eqn) else _library_program(eqn.params["_prim"])
    known = _INNER.get(name)
    if known is not None and all(p in eqn.params for p in known):
        return tuple(_jaxprs_in(eqn.params[p] for p in known))
    return tuple(_jaxprs_in(eqn.params.values()))


def _counted_programs(eqn: Any) -> list[tuple[Any, int]]:
    """The programs of an equation that runs several, each another number of times, and those numbers."""
    name, params = eqn.primitive.name, eqn.params
    if name == "autoremat_sweep":
        return [(params["jaxpr"], params["steps_again"]), (params["step_back"], params["length"])]
    if name == "autoremat_linear_map":
        return list(params["linear_map"].programs())
    return []


def _library_program(prim: Any) -> tuple[Any, ...]:
    """The program behind a composite operation of a library ("hijax"), from 0.12 on of `jnp.searchsorted` too.

    It may carry the program; if not, its definition in terms of arrays is traced.
    """
    params = dict(getattr(prim, "params", {}))
    carried = [params[p].jaxpr for p in ("traced", "traced_fwd") if p in params][:1]
    found = tuple(_jaxprs_in(carried or params.values()))
    if found:
        return found
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in prim.in_avals_flat]
    return tuple(_jaxprs_in([jax.make_jaxpr(prim.expand)(*prim.in_tree.unflatten(structs))]))


def _jaxprs_in(params: Iterable[Any]) -> Iterator[Any]:
    for param in params:
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
                yield _open(item)


def _open(jaxpr: Any) -> Any:
    """The open jaxpr of either kind: `ClosedJaxpr` wraps one up to JAX 0.10, and is the same class later."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def _trips(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in ("scan", "autoremat_scan"):
        return int(eqn.params["length"])
    if name == "call_hi_primitive":
        return int(getattr(eqn.params["_prim"], "length", 1))
    if name == "pallas_call":
        return math.prod(d for d in eqn.params["grid_mapping"].grid if isinstance(d, int))
    if name == "reduce":
        return math.prod(eqn.invars[0].aval.shape)
    if name == "reduce_window":
        return math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.params["window_dimensions"])
    return 1


# --- names and parameters -----------------------------------------------------------------------------------


def tag_of(eqn: Any) -> str | None:
    """Return the name that `checkpoint_name` gave to the output of `eqn`; `None` for other equations."""
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    prim: Any = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd"):  # with the flag jax_remat3
        return str(prim.params["name"])
    return None


_WINDOW = ("window_dimensions", "window_strides", "padding")

_PARAMS: Mapping[str, tuple[str, ...]] = {
    "name": ("name",),
    "dot_general": ("dimension_numbers",),
    "scaled_dot": ("dimension_numbers",),
    "ragged_dot_general": ("ragged_dot_dimension_numbers",),
    "conv_general_dilated": (
        "dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation",
        "feature_group_count", "batch_group_count",
    ),
    "dot_product_attention_fwd_wrapper": ("layout",),
    "dot_product_attention_bwd_wrapper": ("layout",),
    "scan": ("length",),
    "integer_pow": ("y",),
    "sort": ("dimension", "num_keys"),
    "top_k": ("axis", "k"),
    "approx_top_k": ("reduction_dimension", "k"),
    "reduce_window": _WINDOW,
    "reduce_window_sum": _WINDOW,
    "reduce_window_max": _WINDOW,
    "reduce_window_min": _WINDOW,
    "select_and_scatter": _WINDOW,
    "select_and_scatter_add": _WINDOW,
    "select_and_gather_add": _WINDOW,
    "fft": ("fft_type", "fft_lengths"),
    "ffi_call": ("target_name",),
}  # fmt: skip
"""The parameters that cost rules read."""

# fmt: off
_WITH_SHAPES = frozenset({
    "dot_general", "scaled_dot", "ragged_dot_general", "conv_general_dilated", "scaled_matmul_wrapper",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "dynamic_update_slice",
    "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max",
    "select_and_scatter", "select_and_scatter_add", "sort", "top_k", "approx_top_k", "triangular_solve",
    "cholesky", "lu", "qr", "geqrf", "geqp3", "householder_product", "ormqr", "symmetric_product",
    "tridiagonal", "hessenberg", "eigh", "svd", "eig", "schur",
})
# fmt: on
"""The primitives whose rules read the shapes of their operands by position."""


def _params(eqn: Any) -> dict[str, object]:
    name = eqn.primitive.name
    params = {p: plain(eqn.params[p]) for p in _PARAMS.get(name, ()) if p in eqn.params}
    if "ragged_dot_dimension_numbers" in params:
        params["dimension_numbers"] = params.pop("ragged_dot_dimension_numbers")
    if name in _WITH_SHAPES:
        params["operand_shapes"] = tuple(aval_size(v.aval)[0] for v in eqn.invars)
    if name == "device_put":
        params["moves"] = any(d is not None for d in eqn.params["devices"])
    if name == "pallas_call" and eqn.params.get("cost_estimate") is not None:
        stated = eqn.params["cost_estimate"]
        params["cost_estimate"] = (
            int(stated.flops), int(stated.transcendentals), int(stated.bytes_accessed)
        )  # fmt: skip
    if name == "call_hi_primitive":
        tag = tag_of(eqn)
        params |= {"name": tag} if tag else {"class": type(eqn.params["_prim"]).__name__}
    return params


def plain(value: Any) -> object:
    """Return `value` as plain data: numbers, strings, tuples of them; anything else as its text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return tuple(plain(v) for v in value)
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, f.name)) for f in dataclasses.fields(value))
    if hasattr(value, "__index__"):
        return int(value)
    return float(value) if hasattr(value, "__float__") else str(value)


# --- what may run twice -------------------------------------------------------------------------------------

_INVARIANT_KEYS = frozenset({"key<fry>", "key<fry4>", "key<phx2>", "key<phx4>"})
"""Key types of counter-based generators: the same bits however they are partitioned. No other is trusted."""

_HASHED_BY_THREEFRY = frozenset({"key<rbg>"})
"""Key types that split and fold in by Threefry, though they draw bits by the backend's generator."""


def draws_unrepeatable_bits(eqn: Any) -> bool:
    """Say whether `eqn`, or what it runs inside, draws bits that another partitioning would change."""
    name = eqn.primitive.name
    if name in ("rng_bit_generator", "rng_uniform"):
        return True
    if name in ("random_bits", "random_gamma"):
        return _key_type(eqn) not in _INVARIANT_KEYS
    if name in ("random_split", "random_fold_in"):
        return _key_type(eqn) not in _INVARIANT_KEYS | _HASHED_BY_THREEFRY
    return any(draws_unrepeatable_bits(e) for j in inner_jaxprs(eqn) for e in j.eqns)


def _key_type(eqn: Any) -> str:
    return str(eqn.invars[0].aval.dtype)
