"""The only file that knows JAX's private names, and what differs between its versions.

Each shim says for which versions it is, and when it can go. Supported: JAX 0.10.2 to 0.12.x.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax import ad_checkpoint as _ad_checkpoint
from jax._src import api as _api
from jax._src import api_util as _api_util
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import effects as _effects
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax._src.util import weakref_lru_cache as weakref_lru_cache
from jax.experimental.key_reuse import _core as _key_reuse
from jax.extend import core as jex
from jax.extend import linear_util as _lu
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

from autoremat._depth import one_level_deeper

try:  # JAX >= 0.12 describes the operands of a scan by flat trees; drop when the minimum is 0.12
    from jax._src import flattree as _flattree
except ImportError:
    _flattree = None

if TYPE_CHECKING:
    # JAX annotates these too widely to be of use (an equation reads "atoms" of "abstract values").
    Jaxpr: TypeAlias = Any
    JaxprEqn: TypeAlias = Any
    Var: TypeAlias = Any
else:
    Jaxpr = jex.Jaxpr
    JaxprEqn = jex.JaxprEqn
    Var = jex.Var
Literal = jex.Literal
DropVar = jex.DropVar
Primitive = jex.Primitive
Tracer = jax.core.Tracer
Zero = ad.Zero

name_p = jex.primitives.name_p
remat_p = jex.primitives.remat_p

# Lines of this package are no lines of the user's: sources in messages skip them, as they skip JAX's own.
# The model of the demo is one of the user's.
_source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)
_source_info_util.register_inclusion(os.path.join(os.path.dirname(__file__), "cli", "_demo_model.py"))

Saveable = _ad_checkpoint.Saveable
Recompute = _ad_checkpoint.Recompute
Offloadable = _ad_checkpoint.Offloadable
SaveableType = type(Saveable)
RecomputeType = type(Recompute)

UNSPECIFIED = _sharding_impls.UNSPECIFIED  # a `jit` leaves the sharding of an operand to the compiler

ConcretizationTypeError = jax.errors.ConcretizationTypeError

# JAX >= 0.11 made ClosedJaxpr an alias of Jaxpr (with `consts`); drop when the minimum is 0.11
_CLOSED_IS_OPEN = jex.ClosedJaxpr is jex.Jaxpr

# XLA for CPU up to JAX 0.10 fuses a sum into all of its readers, however large they are; drop when the minimum is 0.11
FUSES_INTO_READERS = jax.__version_info__ < (0, 11)

# What the primitive `eval_jaxpr` calls its program: since JAX 0.12 it is every call without a meaning of its own, before only that of a
# `shard_map`'s residuals; drop when the minimum is 0.12
EVALUATED = "call_jaxpr" if hasattr(_core, "eval_jaxpr_p") else "jaxpr"

# JAX >= 0.12 hands dead-code rules a list of live inputs; drop when the minimum is 0.12
_DCE_HAS_LIVE_INS = jax.__version_info__ >= (0, 12)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """Split a closed jaxpr into one with `constvars` and their values; an open one has no values."""
    if isinstance(jaxpr, jex.ClosedJaxpr) and not _CLOSED_IS_OPEN:
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, tuple(getattr(jaxpr, "consts", ()) or ())


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr))


def close_jaxpr(jaxpr: Jaxpr, consts: Mapping[Var, Any] | None = None) -> Any:
    """The closed form that the parameters of `scan`, `cond` and `jit` hold in this version.

    `consts` gives values for variables that the jaxpr reads and that are not among its inputs.
    """
    variables, values = (list(consts), list(consts.values())) if consts else ([], [])
    if _CLOSED_IS_OPEN:
        return jaxpr.replace(constvars=variables, consts=values) if consts else jaxpr
    return jex.ClosedJaxpr(jaxpr.replace(constvars=variables) if consts else jaxpr, values)


def new_var(aval: Any) -> Var:
    """A fresh variable."""
    return _core.Var(aval)


def new_jaxpr(
    invars: Sequence[Var],
    outvars: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    like: Jaxpr | None = None,
) -> Jaxpr:
    """A jaxpr without constants; `like` gives the name of the traced function for messages."""
    effects = _pe.make_jaxpr_effects((), list(invars), list(outvars), list(eqns))
    what = (like.debug_info.traced_for, like.debug_info.func_src_info) if like else ("equations", "")
    debug = _core.DebugInfo(*what, ("",) * len(invars), None)
    if not hasattr(_core.Jaxpr, "is_high") or not _CLOSED_IS_OPEN:
        return _core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug)
    is_high = any(v.aval.is_high for v in (*invars, *outvars)) or any(
        e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in eqns
    )
    return _core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug, is_high)


def new_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    primitive: Primitive,
    params: dict[str, Any],
    effects: Any,
    source_info: Any = None,
    ctx: Any = None,
) -> JaxprEqn:
    """An equation."""
    return _core.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects, source_info, ctx)


def eqn_effects(jaxpr: Jaxpr, invars: Sequence[Any]) -> Any:
    """The effects of an equation that runs `jaxpr` on `invars`."""
    if hasattr(_core, "eqn_effects"):
        return _core.eqn_effects(jaxpr, list(invars))
    return jaxpr.effects


def positional_effects(jaxpr: Jaxpr) -> Any:
    """The effects of a jaxpr as abstract evaluation returns them."""
    return _core.positional_effects(jaxpr)


def effect_may_repeat(effect: Any) -> bool:
    """Whether the effect may happen in the backward pass a second time.

    JAX allows more, but repeats only debug prints itself, and mutable references, which are then changed twice.
    """
    return isinstance(effect, _core.NamedAxisEffect) or is_debug_effect(effect)


def is_debug_effect(effect: Any) -> bool:
    """Whether the effect is that of `jax.debug.print` or `jax.debug.callback`."""
    return isinstance(effect, (_debugging.DebugEffect, _debugging.OrderedDebugEffect))


def disallowed_effects(jaxpr: Jaxpr) -> list[Any]:
    """The effects that may not run twice."""
    return list(_effects.remat_allowed_effects.filter_not_in(jaxpr.effects))


def eval_jaxpr(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate an open jaxpr without constants."""
    return _core.eval_jaxpr(jaxpr, (), *args)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of arguments or results that are traced: a view of a reference (`ref.at[i]`) is no leaf."""
    leaves, treedef = _tree_util.tracing_registry.flatten(tree)
    return list(leaves), treedef


def typeof(x: Any) -> Any:
    """The full aval of a value: shape, dtype, weak type, sharding, varying manual axes."""
    return _core.typeof(x)


def typematch(a: Any, b: Any) -> bool:
    """Whether two avals agree up to weak types."""
    return _core.typematch(a, b)


def stacked_aval(aval: Any, length: int, axis: int = 0) -> Any:
    """The aval of `length` values stacked along a new axis."""
    return _core.unmapped_aval(length, axis, aval)


def tangent_aval(aval: Any) -> Any:
    """The aval of a tangent of a value with `aval`."""
    return aval.to_tangent_aval()


def varying_axes(aval: Any) -> frozenset[Any]:
    """The manual axes of a `shard_map` along which a value differs from device to device."""
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def on_host(aval: Any) -> bool:
    """Whether a value waits in the memory of the host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def has_tangent(aval: Any) -> bool:
    """Whether a value of this aval can carry a non-zero tangent."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and _core.primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0


def instantiate(tangent: Any) -> Any:
    """A tangent or cotangent as an array, also where it is a symbolic zero."""
    return ad.instantiate_zeros(tangent)


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], what: str) -> tuple[Jaxpr, list[Any]]:
    """Trace a function of flat arguments to a jaxpr `(constants, arguments) -> outs`, from full avals.

    Returns the jaxpr and the values of its constants (among them tracers of outer traces).
    """
    debug = _api_util.debug_info(what, fun, tuple(avals), {})
    wrapped = _lu.wrap_init(fun, debug_info=debug.with_unknown_names())
    return _traced(wrapped, avals)


def _traced(wrapped: Any, avals: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    with one_level_deeper():
        jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return hoist_constants(open_jaxpr(jaxpr)[0]), list(consts)  # JAX >= 0.12 has hoisted them already


def defined_at(called: Any) -> str:
    """The name of the function that a jaxpr was traced from, and where it is defined."""
    return str(open_jaxpr(called)[0].debug_info.func_src_info)


def debug_info(what: str, fun: Callable[..., Any], args: Any, kwargs: Any, **statics: Any) -> Any:
    """JAX's record of which function and arguments a trace is for: error messages use it."""
    return _api_util.debug_info(what, fun, args, kwargs, **statics)


def trace_user(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug: Any
) -> tuple[Jaxpr, list[Any]]:
    """As `trace`, for a function that the user wrote."""
    return _traced(_lu.wrap_init(fun, debug_info=debug), avals)


def hoist_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Turn the constants of a jaxpr into leading inputs."""
    if not jaxpr.constvars:
        return jaxpr
    return new_jaxpr([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr)


def dce(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Remove dead code, inside loops and calls as well; returns the jaxpr and which inputs are left."""
    with one_level_deeper():
        return _pe.dce_jaxpr(jaxpr, tuple(used_outputs))


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the inputs and outputs that it has, and what the outputs need."""
    return _pe.dce_jaxpr(jaxpr, (True,) * len(jaxpr.outvars), True)[0]


def register_dce_rule(
    primitive: Primitive, rule: Callable[[list[bool], JaxprEqn], tuple[list[bool], JaxprEqn | None]]
) -> None:
    """Register a dead-code rule, with the signature of the version installed."""
    if _DCE_HAS_LIVE_INS:

        def with_live_ins(used: list[bool], live_ins: list[bool], eqn: JaxprEqn) -> Any:
            del live_ins
            return rule(used, eqn)

        _pe.dce_rules[primitive] = with_live_ins
    else:
        _pe.dce_rules[primitive] = rule


def eqn_is_effectful(eqn: JaxprEqn) -> bool:
    """Whether dead-code elimination must leave the equation alone."""
    return _pe.has_effects(eqn)


def register_discharge_rule(primitive: Primitive) -> None:
    """Let programs with mutable references pass through a primitive that runs its parameter `jaxpr`.

    The rule turns each reference among the operands into a value that comes in and goes out.
    """

    def rule(first: Any, *rest: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        if isinstance(
            first, (list, tuple)
        ):  # JAX < 0.12 passes (in_avals, out_avals); drop when the minimum is 0.12
            in_avals, args = first, rest[1:]
            closed = _discharge.discharge_state(close_jaxpr(jaxpr))
        else:
            in_avals, args = first.in_avals, rest
            closed = _discharge.discharge_state(jaxpr, strip_memory_space=first.strip_memory_space)
        discharged, consts = open_jaxpr(closed)
        if consts:
            raise NotImplementedError("a reference program with constants")
        results = primitive.bind(*args, jaxpr=discharged, **params)
        outs, refs = results[: len(jaxpr.outvars)], iter(results[len(jaxpr.outvars) :])
        return [next(refs) if is_ref(a) else None for a in in_avals], outs

    _discharge.register_discharge_rule(primitive)(rule)


def without_internal_refs(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the mutable references that it makes itself turned into values."""
    if _core.internal_mutable_array_effect not in jaxpr.effects:
        return jaxpr
    try:
        closed = _discharge.discharge_state(close_jaxpr(jaxpr), should_discharge=False)
    except NotImplementedError:  # some primitive cannot be looked into
        return jaxpr
    discharged, consts = open_jaxpr(closed)
    return jaxpr if consts else discharged


def _spread(params: dict[str, Any], prevent_cse: Any, new: int, widths: Sequence[int]) -> dict[str, Any]:
    """The parameters of a checkpoint or of a linear part with `new` operands in front and `widths[i]` in place of operand i.

    It is another program than that before a `vmap`.
    """
    changed = dict(params, prevent_cse=prevent_cse)
    if isinstance(prevent_cse, tuple):
        flags = [f for f, n in zip(prevent_cse, widths, strict=False) for _ in range(n)]
        changed["prevent_cse"] = (*(False for _ in range(new)), *flags)
    if "num_leaves" in params:
        changed["num_leaves"] = new + sum(widths[: params["num_leaves"]])
    if "origin" in params:
        changed["origin"] = None
    return changed


def register_checkify_rule(primitive: Primitive) -> None:
    """Let `jax.experimental.checkify` look inside a primitive: the error state goes in and comes out as values."""

    def rule(*operands: Any, jaxpr: Jaxpr, prevent_cse: Any, **params: Any) -> Any:
        # JAX >= 0.12 passes a context first, which numbers the errors; drop when the minimum is 0.12
        context = operands[:1] if hasattr(_checkify, "CheckifyContext") else ()
        error, enabled, *args = operands[len(context) :]
        state, tree = jax.tree.flatten(error)
        avals = tuple(typeof(x) for x in (*state, *args))
        closed, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(
            *context, close_jaxpr(jaxpr), enabled, tree, *avals
        )
        checked, consts = open_jaxpr(closed)
        new = [*consts, *state]
        params = _spread(params, prevent_cse, len(new), [1] * len(args))
        outs = primitive.bind(*new, *args, jaxpr=hoist_constants(checked), **params)
        return jax.tree.unflatten(out_tree, outs)

    _checkify.error_checks[primitive] = rule


def register_lojax_rule(primitive: Primitive) -> None:
    """Let a primitive that runs its parameter `jaxpr` hold JAX's high-level primitives (`jax.experimental.hijax`).

    They are lowered to ordinary ones, and a high-level argument to the arrays that it stands for.
    """

    def to_lojax(*args: Any, jaxpr: Jaxpr, prevent_cse: Any, **params: Any) -> Any:
        lowered, consts = open_jaxpr(_pe.lower_jaxpr2(close_jaxpr(jaxpr)))
        low: list[list[Any]] = []
        for aval, x in zip(jaxpr.in_avals if _CLOSED_IS_OPEN else jaxpr.in_aval_qdds, args, strict=True):
            low.append(list(aval.read_loval(x) if getattr(aval, "has_qdd", False) else aval.lower_val(x)))
        params = _spread(params, prevent_cse, len(consts), [len(vals) for vals in low])
        flat = [x for vals in low for x in vals]
        return primitive.bind(*consts, *flat, jaxpr=hoist_constants(lowered), **params)

    primitive.to_lojax = to_lojax


def is_ref(aval: Any) -> bool:
    """Whether an aval is that of a mutable reference."""
    return isinstance(aval, _discharge.AbstractRef)


def register_key_reuse_rule(primitive: Primitive, runs_again: Callable[[dict[str, Any]], bool]) -> None:
    """Let `jax_debug_key_reuse` look inside a primitive. A second run uses the same keys again, and may."""

    def signature(eqn: JaxprEqn) -> Any:
        if runs_again(eqn.params):
            return _key_reuse.KeyReuseSignature()
        return _key_reuse.jaxpr_type_signature(eqn.params["jaxpr"])

    _key_reuse.key_reuse_signatures[primitive] = _key_reuse.dynamic_key_reuse_signature(signature)


def batch_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any], forced: Sequence[bool] = ()
) -> tuple[Jaxpr, list[Any], list[bool]]:
    """`vmap` of a jaxpr: the batched jaxpr, its new constants, and which outputs are batched (at axis 0).

    The outputs that `forced` marks are batched whether they depend on a batched input or not.
    """
    destinations = [0 if f else _batching.zero_if_mapped for f in forced or [False] * len(jaxpr.outvars)]
    # A copy: JAX's cache of batched programs, keyed by this one, and ours, keyed by the batched one, would keep each other alive.
    batched, out_batched = _batching.batch_jaxpr_axes(
        close_jaxpr(jaxpr.replace()), axis_data, list(dims), destinations
    )
    opened, consts = open_jaxpr(batched)
    return hoist_constants(opened), list(consts), list(out_batched)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is on: then a scan is a loop of Python."""
    return bool(jax.config.jax_disable_jit)


custom_lin_p = _ad.custom_lin_p
_RULES_RETURN_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")  # JAX >= 0.12


def batch_custom_lin(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """`vmap` of what stands for a `custom_vjp` in a linear program: its reverse-mode rule is batched.

    JAX batches a `custom_vjp` only before it is differentiated.
    """
    rule, in_zeros, num_res = params["bwd"], params["in_zeros"], params["num_res"]
    size = axis_data.size

    def cotangents(*operands: Any) -> list[Any]:
        found = rule.call_wrapped(*operands)
        found = found[0] if _RULES_RETURN_LOGS else found
        return [_instantiated(ct) for ct, zero in zip(found, in_zeros, strict=True) if not zero]

    def batched_rule(*operands: Any) -> Any:
        res, cts = operands[:num_res], [_instantiated(ct) for ct in operands[num_res:]]
        wrapped = _lu.wrap_init(cotangents, debug_info=rule.debug_info)
        batched, out_dims = _batching.batch_subtrace(
            wrapped, _core.TraceTag(), axis_data, (*dims[:num_res], *(0 for _ in cts))
        )
        several = batched.call_wrapped(*res, *cts)
        # As in JAX: what the rule returns unbatched for an operand that all examples share is the sum already.
        found = iter(
            (ct if s is None else ct.sum(s)) if d is None else _batching.matchaxis(axis_data, s, d, ct)
            for ct, s, d in zip(several, out_dims(), dims[num_res:], strict=True)
        )
        all_cts = [None if zero else next(found) for zero in in_zeros]
        return (all_cts, None) if _RULES_RETURN_LOGS else all_cts

    outs = custom_lin_p.bind(
        *args,
        **dict(
            params,
            bwd=_lu.wrap_init(batched_rule, debug_info=rule.debug_info),
            out_avals=[
                _core.unmapped_aval(size, 0, aval, axis_data.explicit_mesh_axis)
                for aval in params["out_avals"]
            ],
        ),
    )
    return outs, [0] * len(outs)


def _instantiated(ct: Any) -> Any:
    symbolic = isinstance(ct, (Zero, jax.custom_derivatives.SymbolicZero))
    return ad.instantiate_zeros(Zero(ct.aval)) if symbolic else ct


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(params: dict[str, Any], body: Jaxpr, num_consts: int, num_carry: int) -> dict[str, Any]:
    """The parameters of a `scan` equation with another body, of which so many inputs are constants and carried."""
    opened, _ = open_jaxpr(body)
    num_xs = len(opened.invars) - num_consts - num_carry
    changed = dict(params, jaxpr=body if isinstance(body, jex.ClosedJaxpr) else close_jaxpr(body))
    if "num_consts" in params:
        return dict(changed, num_consts=num_consts, num_carry=num_carry)
    nones = _flattree.nones
    num_ys = len(opened.outvars) - num_carry
    ft_in = _flattree.pack((nones(num_consts), nones(num_carry), nones(num_xs)))
    ft_out = _flattree.pack((nones(num_carry), nones(num_ys)))
    return dict(changed, ft_in=ft_in, ft_out=ft_out)


@contextlib.contextmanager
def inside_shard_map(params: dict[str, Any]) -> Iterator[None]:
    """The context in which the body of a `shard_map` equation is traced: its mesh axes are manual."""
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    with (
        _shard_map._extend_axis_env(mesh, manual),
        _shard_map.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)),
        _shard_map.config._check_vma(params["check_vma"]),
    ):
        yield


def shard_map_residual(params: dict[str, Any], aval: Any) -> tuple[Any, Any]:
    """How a value made inside a `shard_map` is handed out: its partition spec, and its aval outside.

    Shards that may differ are put side by side along the first axis, so a scalar needs an axis first.
    """
    mesh, check_vma = params["mesh"], params["check_vma"]
    names = _shard_map._all_newly_manual_mesh_names(mesh, params["newly_manual_axes"])
    spec = aval.nospec(mesh, check_vma, names)
    return spec, _shard_map.unshard_aval(mesh, check_vma, spec, aval)


def without_axis_effects(jaxpr: Jaxpr, params: dict[str, Any]) -> Jaxpr:
    """The body of a `shard_map` without the effects that say that the axes of its mesh are used."""
    return _core.remove_named_axis_effects(jaxpr, params["mesh"].axis_names)


def lower_inline(ctx: Any, jaxpr: Jaxpr, name: str, *args: Any) -> Any:
    """Lower the equations of `jaxpr` in place, under a name of their own."""
    outs, tokens = mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr,
        ctx.name_stack.extend(name),
        ctx.tokens_in,
        (),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    ctx.set_tokens_out(tokens)
    return outs


def lower_barrier(ctx: Any, flags: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    """One `optimization_barrier` over the flagged operands of the equation that is lowered."""
    chosen = [a for a, f in zip(args, flags, strict=True) if f]
    if not chosen:
        return list(args)
    avals = [a for a, f in zip(ctx.avals_in, flags, strict=True) if f]
    flat, _ = mlir.ir_tree_registry.flatten(chosen)
    _, tree = mlir.ir_tree_registry.flatten([_mlir._aval_to_ir_types(ctx.module_context, a) for a in avals])
    op = _mlir.hlo.OptimizationBarrierOp(flat)
    results = iter(
        tree.unflatten(
            [_mlir.lower_with_sharding_in_types(ctx, r, a) for r, a in zip(op.results, avals, strict=True)]
        )
    )
    return [next(results) if f else a for a, f in zip(args, flags, strict=True)]


def kept_while_lowering(ctx: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` made for `key` and the block that is lowered into: it lives as long as the module.

    Values of the compiler's language that stand in it may be used by what is lowered later into the same block.
    """
    block = _mlir.ir.InsertionPoint.current.block
    kept = ctx.module_context.cached_primitive_lowerings.setdefault(("autoremat", key), {})
    return kept[block] if block in kept else kept.setdefault(block, make())


def in_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """The equation under a name scope, which profiles and printed programs show."""
    stack = _source_info_util.NameStack().extend(name) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def source_of(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's code that made the equation."""
    return _source_info_util.summarize(eqn.source_info)


def with_source_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """`eqn` as it is in the place of the call that it stands in: under the name scopes of the call, and with its source where
    the user's code made no line of its own.

    What a function of JAX runs inside (`jnp.where`) comes from no line of the user's.
    """
    info, outer = eqn.source_info, call.source_info
    stack = outer.name_stack
    if call.primitive.name in {"jit", "pjit"}:
        stack = stack.extend(f"jit({call.params['name']})")
    info = info.replace(name_stack=stack + info.name_stack)
    if _source_info_util.user_frame(info.traceback) is None:
        info = info.replace(traceback=outer.traceback)
    return eqn.replace(source_info=info)


def short_aval(aval: Any) -> str:
    """An aval as JAX prints it: `f32[4,4]`."""
    return aval.str_short(short_dtypes=True)


def argument_names(fun: Callable[..., Any], args: Any, kwargs: Any) -> Sequence[str]:
    """The names of the flat arguments, as JAX's reports give them: `x`, `params['w']`."""
    names = _api_util.debug_info("saved_residuals", fun, args, kwargs).arg_names
    return names or ()


def backends_are_initialized() -> bool:
    """Whether JAX has started its backends, after which the choice of platforms is fixed."""
    return _xla_bridge.backends_are_initialized()


def chosen_platforms() -> str | None:
    """The platforms that JAX was told to start, by `JAX_PLATFORMS` or its configuration."""
    return jax.config.jax_platforms


Through = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]
"""From a function that is about to be differentiated, and its primals, to the function that is differentiated instead."""

_through: contextvars.ContextVar[Through | None] = contextvars.ContextVar("autoremat_gradients", default=None)
_patching = threading.Lock()
_patched = 0
_own_vjp = _api.vjp


def _vjp_through(fun: Callable[..., Any], *primals: Any, **options: Any) -> Any:
    through = _through.get()
    return _own_vjp(fun if through is None else through(fun, primals), *primals, **options)


@contextlib.contextmanager
def gradients_through(through: Through) -> Iterator[None]:
    """While this is open, `jax.vjp`, and `jax.grad` and all that is made of it, differentiate what `through` returns.

    In this thread only; in others, JAX's own function is called. Needed because no transformation of JAX sees a gradient inside the
    function that it is applied to: what it sees is the derivative, taken already.
    """
    global _patched
    token = _through.set(through)
    with _patching:
        _patched += 1
        _api.vjp = jax.vjp = _vjp_through
    try:
        yield
    finally:
        _through.reset(token)
        with _patching:
            _patched -= 1
            if not _patched:
                _api.vjp = jax.vjp = _own_vjp


def differentiated_name(fun: Callable[..., Any]) -> str:
    """The name that the user gave to a function that is differentiated: `jax.grad` wraps it in one that takes `argnums` alone."""
    inner = inspect.unwrap(fun)
    if getattr(inner, "__module__", "") == _api_util.__name__ and getattr(inner, "__closure__", None):
        inner = inspect.unwrap(inspect.getclosurevars(inner).nonlocals.get("f", inner))
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return getattr(inner, "__name__", type(inner).__name__)
