"""The two primitives of the transformation, with their rules in the order in which JAX lists its own.

`autoremat_checkpoint` runs a jaxpr; when it is differentiated, its policy decides what is kept. It stands for a function
that was not differentiated yet, for the forward part of one that was, and for a backward pass (`differentiated`).
`autoremat_linear` runs what is left for the tangents: it is linear in them, and its transpose is the backward pass.

Design: see `docs/transformation.md`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Primitive,
    Zero,
    ad,
    batching,
    dce,
    disallowed_effects,
    eqn_effects,
    eqn_is_effectful,
    eval_jaxpr,
    is_debug_effect,
    lower_inline,
    mlir,
    new_eqn,
    new_jaxpr,
    new_var,
    positional_effects,
    register_checkify_rule,
    register_dce_rule,
    register_discharge_rule,
    register_key_reuse_rule,
    register_lojax_rule,
    tangent_aval,
    trace,
    weakref_lru_cache,
    without_dead_code,
)
from autoremat._errors import EffectError
from autoremat.transform._batch import Origin, origin_of, partition_of, without_unused
from autoremat.transform._batch_linear import batch_linear
from autoremat.transform._decide import GraphPolicy
from autoremat.transform._fence import (
    depend_on,
    fence_points,
    finish_before,
    hidden_zero,
    policy_for_linear,
    policy_without_tangents,
)
from autoremat.transform._jaxpr import cached_by_jaxpr, is_var, live_eqns, map_programs
from autoremat.transform._log import log_kept
from autoremat.transform._lower import Siblings, lower
from autoremat.transform._partition import BACKWARD_PASS, Partition
from autoremat.transform._vmap import batch_jaxpr

checkpoint_p = Primitive("autoremat_checkpoint")
checkpoint_p.multiple_results = True
# The same for a backward pass that has siblings (see `_lower`): its lowering is not cached, as it depends on what was lowered before.
sibling_p = Primitive("autoremat_checkpoint")
sibling_p.multiple_results = True
linear_p = Primitive("autoremat_linear")
linear_p.multiple_results = True

Flags = bool | tuple[bool, ...]


def _bind_checkpoint(*args: Any, differentiated: bool, siblings: Siblings | None, **params: Any) -> list[Any]:
    primitive = sibling_p if differentiated and siblings else checkpoint_p
    return primitive.bind(*args, differentiated=differentiated, siblings=siblings, **params)


def _flags(prevent_cse: Flags, n: int) -> tuple[bool, ...]:
    return (prevent_cse,) * n if isinstance(prevent_cse, bool) else prevent_cse


def _after_constants(prevent_cse: Flags, new: int) -> Flags:
    """The flags where so many operands come in front; one bool for all stays one: it also speaks for what is kept."""
    return prevent_cse if isinstance(prevent_cse, bool) else (*(False for _ in range(new)), *prevent_cse)


# ------------------------------------------------------------------------------------------ evaluation, abstract evaluation


@checkpoint_p.def_impl
@sibling_p.def_impl
def _checkpoint_impl(*args: Any, jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return eval_jaxpr(jaxpr, *args)


@checkpoint_p.def_effectful_abstract_eval
@sibling_p.def_effectful_abstract_eval
def _checkpoint_abstract_eval(*args: Any, jaxpr: Jaxpr, **_: Any) -> Any:
    del args
    return [v.aval for v in jaxpr.outvars], positional_effects(jaxpr)


def _without_repeats(jaxpr: Jaxpr) -> Jaxpr | None:
    """A linear part without the effects that repeat in the backward pass: in forward mode they happened already."""
    if not jaxpr.effects:
        return None  # a cache that held its own key would hold it forever
    silent = _without_prints(jaxpr)
    eqns = live_eqns(silent.eqns, silent.outvars, effects=False)
    return new_jaxpr(silent.invars, silent.outvars, eqns, silent)


def _without_prints(jaxpr: Jaxpr) -> Jaxpr:
    """The program without debug callbacks, those in loops and branches included."""
    if not any(map(is_debug_effect, jaxpr.effects)):
        return jaxpr
    eqns = [_without_prints_inside(e) for e in jaxpr.eqns if not _is_print(e)]
    return jaxpr.replace(eqns=eqns, effects={e for e in jaxpr.effects if not is_debug_effect(e)})


def _is_print(eqn: JaxprEqn) -> bool:
    return not eqn.outvars and bool(eqn.effects) and all(map(is_debug_effect, eqn.effects))


def _without_prints_inside(eqn: JaxprEqn) -> JaxprEqn:
    silent = map_programs(eqn, _without_prints)
    if silent is eqn:
        return eqn
    return silent.replace(effects={e for e in eqn.effects if not is_debug_effect(e)})


_without_repeats_or_none = weakref_lru_cache(_without_repeats)


def _without_repeats_cached(jaxpr: Jaxpr) -> Jaxpr:
    return _without_repeats_or_none(jaxpr) or jaxpr


@linear_p.def_impl
def _linear_impl(*args: Any, jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return eval_jaxpr(_without_repeats_cached(jaxpr), *args)


@linear_p.def_effectful_abstract_eval
def _linear_abstract_eval(*args: Any, jaxpr: Jaxpr, **_: Any) -> Any:
    del args
    return [v.aval for v in jaxpr.outvars], positional_effects(_without_repeats_cached(jaxpr))


# ------------------------------------------------------------------------------------------------------------------- jvp


def _check_effects(jaxpr: Jaxpr) -> None:
    if found := disallowed_effects(jaxpr):
        names = ", ".join(sorted({str(effect) for effect in found}))
        raise EffectError(
            f"Effects not supported in partial-eval of `checkpoint`/`remat`: [{names}], in "
            f"{jaxpr.debug_info.func_src_info}. A "
            "checkpointed function may run again in the backward pass, and these effects may not. Cheapest fix: move "
            "the call that has the effect (io_callback, an ordered print) out of the checkpointed function."
        )


def _jitted(jaxpr: Jaxpr) -> Jaxpr | None:
    """The jaxpr as one `jit` equation: outside `jit`, it is compiled as a whole, not run operation by operation."""

    def checkpointed(*args: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, *args)

    traced, consts = trace(jax.jit(checkpointed), [v.aval for v in jaxpr.invars], "checkpoint")
    return None if consts else traced


_jitted_or_none = weakref_lru_cache(_jitted)


def _jitted_cached(jaxpr: Jaxpr) -> Jaxpr:
    return _jitted_or_none(jaxpr) or jaxpr


def _is_jitted(jaxpr: Jaxpr) -> bool:
    """Whether the checkpointed function is a jitted one. What has effects is left alone: they are looked for in its equations."""
    return len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in {"jit", "pjit"} and not jaxpr.effects


def _nonzero(tangents: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(type(t) is not Zero for t in tangents)


def _partition(tangents: Sequence[Any], jaxpr: Jaxpr, policy: Any, origin: Origin | None = None) -> Partition:
    """The partition of a program that may be differentiated. Raises `EffectError` for one that may not."""
    _check_effects(jaxpr)
    return partition_of(jaxpr, _nonzero(tangents), policy, origin)


def _differentiate(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    jaxpr: Jaxpr,
    part: Partition,
    policy: Any,
    prevent_cse: Flags,
    differentiated: bool,
    before: Siblings | None,
) -> tuple[list[Any], list[Any]]:
    """`(primals, tangents) -> (outs, tangents out)`: the forward part, and the linear part on what it keeps."""
    nonzero = _nonzero(tangents)
    siblings = Siblings(before)
    # The user compiled this function: outside `jit`, its two parts are compiled as well.
    compiled = _is_jitted(jaxpr) and not isinstance(policy, GraphPolicy)
    forward, linear = (_jitted_cached(j) if compiled else j for j in (part.forward, part.linear))
    flags = (*_flags(prevent_cse, len(primals)), *(False for _ in part.constants))
    inputs = [*primals, *part.constants]
    results = _bind_checkpoint(
        *inputs,
        jaxpr=forward,
        policy=policy,
        prevent_cse=prevent_cse if isinstance(prevent_cse, bool) else flags,
        differentiated=differentiated,
        origin=None,
        siblings=siblings,
    )
    num_outs = len(jaxpr.outvars)
    outs, kept = results[:num_outs], [results[i] for i in part.kept_results]
    leaves = [*(inputs[i] for i in part.leaves), *kept]
    # Where nothing runs again there is nothing that the compiler could merge or start too early.
    # Flags for each argument say nothing of kept values: as in JAX, those are guarded even where no argument is.
    guard = part.recomputes and prevent_cse is not False
    leaf_flags = tuple(guard and f for f in (*(flags[i] for i in part.leaves), *(True for _ in kept)))
    linear_outs = iter(
        linear_p.bind(
            *leaves,
            *(t for t, nz in zip(tangents, nonzero, strict=True) if nz),
            jaxpr=linear,
            num_leaves=len(leaves),
            policy=policy_for_linear(policy, nonzero),
            prevent_cse=leaf_flags,
            siblings=siblings,
        )
        if any(part.nonzero_outs)
        else ()
    )
    tangents_out = [
        next(linear_outs) if nz else Zero(tangent_aval(v.aval))
        for v, nz in zip(jaxpr.outvars, part.nonzero_outs, strict=True)
    ]
    return list(outs), tangents_out


def _checkpoint_jvp(
    primals: Any,
    tangents: Any,
    *,
    jaxpr: Jaxpr,
    policy: Any,
    prevent_cse: Flags,
    differentiated: bool,
    origin: Any,
    siblings: Siblings | None,
) -> Any:
    part = _partition(tangents, jaxpr, policy, origin)
    log_kept(jaxpr, part)
    return _differentiate(primals, tangents, jaxpr, part, policy, prevent_cse, differentiated, siblings)


ad.primitive_jvps[checkpoint_p] = ad.primitive_jvps[sibling_p] = _checkpoint_jvp


def _linear_jvp(
    primals: Any,
    tangents: Any,
    *,
    jaxpr: Jaxpr,
    num_leaves: int,
    policy: Any,
    prevent_cse: Flags,
    siblings: Siblings | None,
) -> Any:
    """Linear in the tangents that it was made for; in the leaves it is a checkpointed function like any other.

    Without the second case, reverse mode over forward mode would keep every intermediate of the linear part.
    """
    params = dict(
        jaxpr=jaxpr, num_leaves=num_leaves, policy=policy, prevent_cse=prevent_cse, siblings=siblings
    )
    leaf_tangents, linear_tangents = tangents[:num_leaves], tangents[num_leaves:]
    if all(type(t) is Zero for t in leaf_tangents):
        outs = linear_p.bind(*primals, **params)
        leaves = primals[:num_leaves]
        tangents_out = linear_p.bind(*leaves, *map(ad.instantiate_zeros, linear_tangents), **params)
        return outs, tangents_out
    flags = (
        *_flags(prevent_cse, num_leaves),
        *(any(_flags(prevent_cse, num_leaves)) for _ in linear_tangents),
    )
    pure = _without_repeats_cached(jaxpr)
    part = _partition(tangents, pure, policy)
    guard = flags if any(flags) else False
    return _differentiate(primals, tangents, pure, part, policy, guard, False, siblings)


ad.primitive_jvps[linear_p] = _linear_jvp


# ------------------------------------------------------------------------------------------------------------- transpose


class Backward(NamedTuple):
    """A backward pass `(constants, leaves, cotangents) -> cotangents`, and which leaves and tangents it is for."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]
    leaf_used: tuple[bool, ...]
    differentiated: tuple[bool, ...]


def _trace_backward(
    jaxpr: Jaxpr,
    num_leaves: int,
    unknown: tuple[bool, ...],
    nonzero: tuple[bool, ...],
    dependence: tuple[int, ...] | None,
) -> Backward:
    """The backward pass of a linear part: `(leaves, cotangents) -> cotangents of the unknown tangents`.

    `nonzero` marks the outputs that have a cotangent. What only the others need is dropped before. `dependence`, if not
    `None`, makes the reruns depend on the cotangents by data flow, and the cotangents of these tangents, which earlier
    stages wait for, on all others (see `_fence`).
    """
    pruned, used = dce(jaxpr, nonzero)
    leaf_used, tangent_used = used[:num_leaves], used[num_leaves:]
    tangent_avals = [v.aval for v in jaxpr.invars[num_leaves:]]
    differentiated = [u and k for u, k in zip(tangent_used, unknown, strict=True)]
    leaf_avals = [v.aval for v, u in zip(jaxpr.invars[:num_leaves], leaf_used, strict=True) if u]
    ct_avals = [v.aval for v, nz in zip(jaxpr.outvars, nonzero, strict=True) if nz]
    fenced = fence_points(pruned, len(leaf_avals)) if dependence is not None else []
    program, unfenced = _with_unfenced(pruned, fenced)

    def backward(*args: Any) -> list[Any]:
        leaves, cts = list(args[: len(leaf_avals)]), args[len(leaf_avals) :]
        zero = hidden_zero(cts) if any(fenced) else None
        originals = [leaves[i] for i in unfenced]
        if zero is not None:
            leaves = [depend_on(x, zero) if f else x for x, f in zip(leaves, fenced, strict=True)]

        def linear(*chosen: Any) -> list[Any]:
            it = iter(chosen)
            tangents = [
                next(it) if d else ad.instantiate_zeros(Zero(a))
                for a, d, u in zip(tangent_avals, differentiated, tangent_used, strict=True)
                if u
            ]
            return eval_jaxpr(program, *leaves, *tangents, *originals)

        avals = [a for a, d in zip(tangent_avals, differentiated, strict=True) if d]
        in_cts = list(jax.linear_transpose(linear, *avals)(list(cts)))
        positions = [i for i, d in enumerate(differentiated) if d]
        return finish_before(in_cts, [p in (dependence or ()) for p in positions])

    traced, consts = trace(backward, [*leaf_avals, *ct_avals], BACKWARD_PASS)
    return Backward(without_dead_code(traced), tuple(consts), tuple(leaf_used), tuple(differentiated))


_trace_backward_cached = cached_by_jaxpr(_trace_backward)


def _with_unfenced(jaxpr: Jaxpr, fenced: Sequence[bool]) -> tuple[Jaxpr, list[int]]:
    """The program with more inputs: fenced leaves (their positions) as they are, for nested linear parts with fences of their own.

    The cotangents of those depend on those of the whole anyway, and zeros of several levels on one leaf would be computed together by a
    compiler that fuses them, from the cotangents of all levels, which it would have to keep.
    """
    nested = {id(e) for e in jaxpr.eqns if e.primitive is linear_p and _depends(e.params["policy"])}
    read = {v for e in jaxpr.eqns if id(e) in nested for v in e.invars if is_var(v)}
    positions = [i for i, f in enumerate(fenced) if f and jaxpr.invars[i] in read]
    if not positions:
        return jaxpr, []
    plain = {jaxpr.invars[i]: new_var(jaxpr.invars[i].aval) for i in positions}
    eqns = [
        e.replace(invars=[plain.get(v, v) if is_var(v) else v for v in e.invars]) if id(e) in nested else e
        for e in jaxpr.eqns
    ]
    return new_jaxpr([*jaxpr.invars, *plain.values()], jaxpr.outvars, eqns, jaxpr), positions


def _depends(policy: Any) -> bool:
    """Whether the fence of a planned stage is true data flow (see `_fence`)."""
    return getattr(policy, "fence", "barrier") == "dependence"


def _linear_transpose(
    cts: Any,
    *args: Any,
    jaxpr: Jaxpr,
    num_leaves: int,
    policy: Any,
    prevent_cse: Flags,
    siblings: Siblings | None,
) -> list[Any]:
    leaves, tangents = args[:num_leaves], args[num_leaves:]
    unknown = tuple(ad.is_undefined_primal(t) for t in tangents)
    nonzero = tuple(type(ct) is not Zero for ct in cts)
    if not any(nonzero):
        return [None] * num_leaves + [
            Zero(t.aval) if u else None for t, u in zip(tangents, unknown, strict=True)
        ]
    dependence = getattr(policy, "carried", ()) if _depends(policy) else None
    backward = _trace_backward_cached(jaxpr, num_leaves, unknown, nonzero, dependence)
    flags = _flags(prevent_cse, num_leaves)
    operand_flags = [f for f, u in zip(flags, backward.leaf_used, strict=True) if u]
    chosen_cts = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
    results = iter(
        _bind_checkpoint(
            *backward.constants,
            *(x for x, u in zip(leaves, backward.leaf_used, strict=True) if u),
            *chosen_cts,
            jaxpr=backward.jaxpr,
            policy=policy,
            prevent_cse=(
                *(False for _ in backward.constants),
                *operand_flags,
                *(any(operand_flags) for _ in chosen_cts),
            ),
            differentiated=True,
            origin=None,
            siblings=siblings and siblings.before,
        )
    )
    in_cts: list[Any] = [None] * num_leaves
    for t, u, d in zip(tangents, unknown, backward.differentiated, strict=True):
        in_cts.append(next(results) if d else Zero(t.aval) if u else None)
    return in_cts


ad.primitive_transposes[linear_p] = _linear_transpose


def _known_first(jaxpr: Jaxpr, unknown: tuple[bool, ...]) -> Jaxpr:
    inputs = list(zip(jaxpr.invars, unknown, strict=True))
    return new_jaxpr(
        [*(v for v, u in inputs if not u), *(v for v, u in inputs if u)], jaxpr.outvars, jaxpr.eqns, jaxpr
    )


_known_first_cached = weakref_lru_cache(_known_first)


def _checkpoint_transpose(
    cts: Any, *args: Any, jaxpr: Jaxpr, prevent_cse: Flags, policy: Any, **_: Any
) -> list[Any]:
    """A checkpointed function that is linear in some arguments is the linear part of itself."""
    unknown = tuple(ad.is_undefined_primal(x) for x in args)
    order = sorted(range(len(args)), key=lambda i: unknown[i])
    num_leaves = len(args) - sum(unknown)
    flags = _flags(prevent_cse, len(args))
    found = _linear_transpose(
        cts,
        *(args[i] for i in order),
        jaxpr=_known_first_cached(jaxpr, unknown),
        num_leaves=num_leaves,
        policy=policy,
        prevent_cse=tuple(flags[i] for i in order[:num_leaves]),
        siblings=None,
    )
    in_cts: list[Any] = [None] * len(args)
    for i, ct in zip(order, found, strict=True):
        in_cts[i] = ct
    return in_cts


ad.primitive_transposes[checkpoint_p] = ad.primitive_transposes[sibling_p] = _checkpoint_transpose


# -------------------------------------------------------------------------------------------------------------- batching


def _checkpoint_batch(
    axis_data: Any,
    args: Any,
    dims: Any,
    *,
    jaxpr: Jaxpr,
    prevent_cse: Flags,
    origin: Origin | None,
    **params: Any,
) -> Any:
    batched, consts, out_batched = batch_jaxpr(jaxpr, axis_data, dims)
    flags = _after_constants(prevent_cse, len(consts))
    before = origin_of(jaxpr, axis_data, dims, len(consts), origin)
    outs = _bind_checkpoint(*consts, *args, jaxpr=batched, prevent_cse=flags, origin=before, **params)
    return outs, [0 if b else None for b in out_batched]


batching.fancy_primitive_batchers[checkpoint_p] = _checkpoint_batch
batching.fancy_primitive_batchers[sibling_p] = _checkpoint_batch


def _linear_batch(
    axis_data: Any, args: Any, dims: Any, *, jaxpr: Jaxpr, num_leaves: int, prevent_cse: Flags, **params: Any
) -> Any:
    batched, consts, out_batched = batch_linear(jaxpr, axis_data, dims)
    flags = (*(False for _ in consts), *_flags(prevent_cse, num_leaves))
    outs = linear_p.bind(
        *consts, *args, jaxpr=batched, num_leaves=num_leaves + len(consts), prevent_cse=flags, **params
    )
    return outs, [0 if b else None for b in out_batched]


batching.fancy_primitive_batchers[linear_p] = _linear_batch


# ------------------------------------------------------------------------------------------------------------- dead code


def _dce_rule(used_outputs: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    if not any(used_outputs) and not eqn_is_effectful(eqn):
        return [False] * len(eqn.invars), None
    jaxpr = eqn.params["jaxpr"]
    pruned, used_inputs = dce(jaxpr, used_outputs)
    unchanged = len(pruned.eqns) == len(jaxpr.eqns) and all(map(operator.is_, pruned.eqns, jaxpr.eqns))
    if unchanged and all(used_inputs) and all(used_outputs):
        return used_inputs, eqn  # the same jaxpr, so that caches by jaxpr find it
    invars = [v for v, u in zip(eqn.invars, used_inputs, strict=True) if u]
    outvars = [v for v, u in zip(eqn.outvars, used_outputs, strict=True) if u]
    guarded = eqn.params.get("num_leaves", len(eqn.invars))
    flags = _flags(eqn.params["prevent_cse"], guarded)
    left: Flags = tuple(f for f, u in zip(flags, used_inputs, strict=False) if u)
    if isinstance(eqn.params["prevent_cse"], bool):
        left = eqn.params["prevent_cse"]
    params = dict(eqn.params, jaxpr=pruned, prevent_cse=left)
    if "origin" in params:
        params["origin"] = without_unused(params["origin"], used_outputs, used_inputs)
    if "num_leaves" in params:
        params["num_leaves"] = sum(used_inputs[:guarded])
        params["policy"] = policy_without_tangents(params["policy"], used_inputs[guarded:])
    runs = _without_repeats_cached(pruned) if eqn.primitive is linear_p else pruned
    effects = eqn_effects(runs, invars)
    return used_inputs, new_eqn(invars, outvars, eqn.primitive, params, effects, eqn.source_info, eqn.ctx)


for _primitive in (checkpoint_p, sibling_p, linear_p):
    register_dce_rule(_primitive, _dce_rule)


# -------------------------------------------------------------------------------------------------------------- lowering


def _checkpoint_lowering(
    ctx: Any,
    *args: Any,
    jaxpr: Jaxpr,
    prevent_cse: Flags,
    differentiated: bool,
    siblings: Siblings | None,
    **_: Any,
) -> Any:
    """Inline. A backward pass starts with one barrier over what it reads: the fence of the stage.

    Without it, common-subexpression elimination undoes the recomputation, and the scheduler may start it before the
    cotangent has arrived.
    """
    if not differentiated:
        return lower_inline(ctx, jaxpr, "checkpoint", *args)
    return lower(ctx, jaxpr, args, siblings, _flags(prevent_cse, len(args)))


mlir.register_lowering(checkpoint_p, _checkpoint_lowering)
mlir.register_lowering(sibling_p, _checkpoint_lowering, cacheable=False)


def _linear_lowering(ctx: Any, *args: Any, jaxpr: Jaxpr, siblings: Siblings | None, **_: Any) -> Any:
    """Inline."""
    return lower(ctx, _without_repeats_cached(jaxpr), args, siblings)


mlir.register_lowering(linear_p, _linear_lowering, cacheable=False)


# -------------------------------------------------------------------------------------- mutable references, key reuse

for _primitive in (checkpoint_p, sibling_p, linear_p):
    register_discharge_rule(_primitive)
    register_lojax_rule(_primitive)
    register_checkify_rule(_primitive)
register_key_reuse_rule(linear_p, lambda params: True)
for _primitive in (checkpoint_p, sibling_p):
    register_key_reuse_rule(_primitive, lambda params: params["differentiated"])
