"""How equations with a program inside are split: `scan`, `cond`, and nested checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    close_jaxpr,
    eqn_effects,
    new_eqn,
    new_jaxpr,
    new_var,
    open_jaxpr,
    scan_params,
    scan_sizes,
)
from autoremat.transform._jaxpr import free_vars, inline_calls, is_var, traced_eqns
from autoremat.transform._split import CompositeSplit, Decider, Split, composite_rules, prune, split_eqns

# ---------------------------------------------------------------------------------------------------------------- scan


def _stacked(aval: Any, length: int) -> Any:
    """The aval of `length` values stacked along a new leading axis."""
    stacked = jax.eval_shape(lambda x: jnp.broadcast_to(x[None], (length, *x.shape)), _shape_struct(aval))
    return aval.update(shape=stacked.shape, weak_type=False)


def _shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def split_scan(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split the body; what an iteration keeps is stacked, and read by the second run of the loop.

    The second run carries only what it needs itself: a carry that no kept value replaces is computed again.
    """
    body, consts = open_jaxpr(eqn.params["jaxpr"])
    if consts:
        return None
    body, hoisted = inline_calls(body)
    if hoisted:
        return None
    num_consts, num_carry = scan_sizes(eqn.params)
    carry_in = body.invars[num_consts : num_consts + num_carry]
    again = list(wanted)
    while True:
        demanded = [v for v, w in zip(body.outvars, again, strict=True) if w]
        split = split_eqns(body.eqns, demanded, decider)
        reads = set(free_vars(prune(split.rerun, demanded), demanded))
        grown = [w or v in reads for w, v in zip(again, carry_in, strict=False)]
        if grown == again[:num_carry]:
            break
        again[:num_carry] = grown
    return _rebuild_scan(eqn, body, split, again, wanted)


def _rebuild_scan(eqn: JaxprEqn, body: Jaxpr, split: Split, again: list[bool], wanted: list[bool]) -> CompositeSplit:
    num_consts, num_carry = scan_sizes(eqn.params)
    length = eqn.params["length"]
    kept_body = list(split.kept)
    stacks = {v: new_var(_stacked(v.aval, length)) for v in kept_body}
    forward_body = new_jaxpr(body.invars, [*body.outvars, *kept_body], split.forward, body)
    forward = eqn.replace(
        outvars=[*eqn.outvars, *stacks.values()],
        params=scan_params(eqn.params, forward_body, num_consts, num_carry),
    )
    # An output that is kept in every iteration is kept outside as it is.
    replaced = {
        i for i, v in enumerate(body.outvars) if i >= num_carry and again[i] and is_var(v) and v in split.kept
    }
    run = [a and i not in replaced for i, a in enumerate(again)]
    kept = {stacks[v]: split.kept[v] for v in kept_body}
    rerun = None
    if any(run):
        rerun = _rerun_scan(eqn, body, split, run, stacks)
    if not replaced:
        return CompositeSplit(forward=forward, kept=kept, rerun=rerun)
    return _alias_outputs(forward, eqn, body, stacks, kept, replaced, rerun)


def _alias_outputs(
    forward: JaxprEqn,
    eqn: JaxprEqn,
    body: Jaxpr,
    stacks: dict[Var, Var],
    kept: dict[Var, str],
    replaced: set[int],
    rerun: JaxprEqn | None,
) -> CompositeSplit:
    """Name the kept stack by the output of the loop that it equals, so that nothing has to be copied."""
    rename = {}
    for i in replaced:
        rename[stacks[body.outvars[i]]] = eqn.outvars[i]
    kept = {rename.get(v, v): codec for v, codec in kept.items()}
    extra = [v for v in forward.outvars[len(eqn.outvars) :]]
    keep_positions = [j for j, v in enumerate(extra) if v not in rename]
    inner, _ = open_jaxpr(forward.params["jaxpr"])
    inner_extra = inner.outvars[len(eqn.outvars) :]
    inner = new_jaxpr(
        inner.invars, [*inner.outvars[: len(eqn.outvars)], *(inner_extra[j] for j in keep_positions)], inner.eqns, inner
    )
    forward = forward.replace(
        outvars=[*eqn.outvars, *(extra[j] for j in keep_positions)],
        params=scan_params(forward.params, inner, *scan_sizes(forward.params)),
    )
    if rerun is not None:
        rerun = rerun.replace(invars=[rename.get(v, v) if is_var(v) else v for v in rerun.invars])
    return CompositeSplit(forward=forward, kept=kept, rerun=rerun)


def _rerun_scan(eqn: JaxprEqn, body: Jaxpr, split: Split, run: list[bool], stacks: dict[Var, Var]) -> JaxprEqn:
    num_consts, num_carry = scan_sizes(eqn.params)
    outs = [v for v, r in zip(body.outvars, run, strict=True) if r]
    eqns = prune(split.rerun, outs)
    reads = set(free_vars(eqns, outs))
    consts_in = list(range(num_consts))
    carry_in = list(range(num_consts, num_consts + num_carry))
    xs_in = list(range(num_consts + num_carry, len(body.invars)))
    consts_used = [i for i in consts_in if body.invars[i] in reads]
    carry_used = [i for i in carry_in if run[i - num_consts]]
    xs_used = [i for i in xs_in if body.invars[i] in reads]
    kept_used = [v for v in stacks if v in reads]
    order = [*consts_used, *carry_used, *xs_used]
    new_body = new_jaxpr([*(body.invars[i] for i in order), *kept_used], outs, eqns, body)
    invars = [*(eqn.invars[i] for i in order), *(stacks[v] for v in kept_used)]
    new_params = scan_params(eqn.params, new_body, len(consts_used), len(carry_used))
    outvars = [v for v, r in zip(eqn.outvars, run, strict=True) if r]
    return new_eqn(
        invars, outvars, eqn.primitive, new_params, eqn_effects(new_body, invars), eqn.source_info, eqn.ctx
    )


# ---------------------------------------------------------------------------------------------------------------- cond


def split_cond(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split each branch. A branch returns what it keeps, and zeros for what the other branches keep."""
    bodies = []
    for branch in eqn.params["branches"]:
        body, consts = open_jaxpr(branch)
        body, hoisted = inline_calls(body)
        if consts or hoisted:
            return None
        bodies.append(body)
    splits = []
    for body in bodies:
        demanded = [v for v, w in zip(body.outvars, wanted, strict=True) if w]
        splits.append(split_eqns(body.eqns, demanded, decider))
    kept = [(b, v) for b, split in enumerate(splits) for v in split.kept]
    if any(not jnp.issubdtype(v.aval.dtype, jnp.number) and v.aval.dtype != bool for _, v in kept):
        return None
    outer = [new_var(v.aval.update(weak_type=False)) for _, v in kept]
    forward_branches = [
        _forward_branch(b, body, splits[b], kept) for b, body in enumerate(bodies)
    ]
    rerun_branches = [_rerun_branch(b, body, splits[b], kept, wanted) for b, body in enumerate(bodies)]
    forward = eqn.replace(outvars=[*eqn.outvars, *outer], params=dict(eqn.params, branches=tuple(forward_branches)))
    invars = [*eqn.invars, *outer]
    outvars = [v for v, w in zip(eqn.outvars, wanted, strict=True) if w]
    rerun = new_eqn(
        invars,
        outvars,
        eqn.primitive,
        dict(eqn.params, branches=tuple(rerun_branches)),
        eqn.effects,
        eqn.source_info,
        eqn.ctx,
    )
    codecs = {o: splits[b].kept[v] for o, (b, v) in zip(outer, kept, strict=True)}
    return CompositeSplit(forward=forward, kept=codecs, rerun=rerun)


def _forward_branch(b: int, body: Jaxpr, split: Split, kept: Sequence[tuple[int, Var]]) -> Any:
    others = [v.aval for owner, v in kept if owner != b]
    zero_eqns, zeros = traced_eqns(lambda: [jnp.zeros(a.shape, a.dtype) for a in others], (), "cond residuals")
    filler = iter(zeros)
    extra = [v if owner == b else next(filler) for owner, v in kept]
    return close_jaxpr(new_jaxpr(body.invars, [*body.outvars, *extra], [*split.forward, *zero_eqns], body))


def _rerun_branch(b: int, body: Jaxpr, split: Split, kept: Sequence[tuple[int, Var]], wanted: list[bool]) -> Any:
    outs = [v for v, w in zip(body.outvars, wanted, strict=True) if w]
    eqns = prune(split.rerun, outs)
    extra = [v if owner == b else new_var(v.aval) for owner, v in kept]
    return close_jaxpr(new_jaxpr([*body.invars, *extra], outs, eqns, body))


# ------------------------------------------------------------------------------------------------------------ checkpoint


def split_checkpoint(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split a nested checkpoint: what runs again stays a checkpoint, so that two levels of recomputation survive."""
    body, hoisted = inline_calls(eqn.params["jaxpr"])
    if hoisted:
        return None
    demanded = [v for v, w in zip(body.outvars, wanted, strict=True) if w]
    split = split_eqns(body.eqns, demanded, decider)
    outer = {v: new_var(v.aval) for v in split.kept}
    forward_body = new_jaxpr(body.invars, [*body.outvars, *split.kept], split.forward, body)
    forward = eqn.replace(
        outvars=[*eqn.outvars, *outer.values()],
        params=dict(eqn.params, jaxpr=forward_body),
    )
    eqns = prune(split.rerun, demanded)
    reads = free_vars(eqns, demanded)
    where = {v: a for v, a in zip(body.invars, eqn.invars, strict=True)} | outer
    rerun_body = new_jaxpr(reads, demanded, eqns, body)
    invars = [where[v] for v in reads]
    outvars = [v for v, w in zip(eqn.outvars, wanted, strict=True) if w]
    rerun = new_eqn(
        invars,
        outvars,
        eqn.primitive,
        dict(eqn.params, jaxpr=rerun_body, prevent_cse=False),
        eqn_effects(rerun_body, invars),
        eqn.source_info,
        eqn.ctx,
    )
    return CompositeSplit(
        forward=forward, kept={outer[v]: codec for v, codec in split.kept.items()}, rerun=rerun
    )


composite_rules["scan"] = split_scan
composite_rules["cond"] = split_cond
composite_rules["autoremat_checkpoint"] = split_checkpoint
