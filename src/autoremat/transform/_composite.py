"""How equations with a program inside are split: `scan`, `cond`, `jit`, `shard_map`, and nested checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoremat._compat import (
    UNSPECIFIED,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    close_jaxpr,
    eqn_effects,
    inside_shard_map,
    new_eqn,
    new_jaxpr,
    new_var,
    open_jaxpr,
    scan_params,
    scan_sizes,
    shard_map_residual,
    without_axis_effects,
)
from autoremat.transform._jaxpr import free_vars, inline_calls, is_var, live_eqns, traced_eqns
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


# ------------------------------------------------------------------------------------------------- jit, checkpoint, shard_map


@dataclass(frozen=True)
class _Halves:
    """A body that is split. `new` are kept values that the forward half has as additional outputs.

    The rerun half has the inputs `reads` (positions among the body's) and then `kept`, and the outputs `again` (positions).
    """

    split: Split
    forward_eqns: list[JaxprEqn]
    new: list[Var]
    rerun_eqns: list[JaxprEqn]
    reads: list[int]
    kept: list[Var]
    again: list[int]


def _halves(body: Jaxpr, wanted: list[bool], decider: Decider, aliased: Mapping[int, Var]) -> _Halves:
    """Split a body. `aliased` are the outputs whose outer variable can stand for a kept value."""
    demanded = [v for v, w in zip(body.outvars, wanted, strict=True) if w]
    split = split_eqns(body.eqns, demanded, decider)
    there = {body.outvars[i] for i in aliased if is_var(body.outvars[i]) and body.outvars[i] in split.kept}
    again = [
        i
        for i, (v, w) in enumerate(zip(body.outvars, wanted, strict=True))
        if w and not (i in aliased and is_var(v) and v in there)
    ]
    outs = [body.outvars[i] for i in again]
    eqns = prune(split.rerun, outs)
    read = set(free_vars(eqns, outs))
    return _Halves(
        split=split,
        forward_eqns=split.forward,
        new=[v for v in split.kept if v not in there],
        rerun_eqns=eqns,
        reads=[i for i, v in enumerate(body.invars) if v in read],
        kept=[v for v in split.kept if v in read],
        again=again,
    )


def _split_call(
    eqn: JaxprEqn,
    body: Jaxpr,
    wanted: list[bool],
    decider: Decider,
    forward_params: Callable[[Any, _Halves], dict[str, Any]],
    rerun_params: Callable[[Any, _Halves], dict[str, Any]],
) -> CompositeSplit:
    """Split an equation that runs its body once on its inputs. A kept output is kept as the output that it is."""
    aliased = {i: v for i, v in enumerate(eqn.outvars) if not isinstance(v, DropVar)}
    half = _halves(body, wanted, decider, aliased)
    outer = {v: new_var(v.aval) for v in half.new}
    for i, v in reversed(aliased.items()):
        if is_var(body.outvars[i]) and body.outvars[i] in half.split.kept and body.outvars[i] not in half.new:
            outer[body.outvars[i]] = v
    forward_body = new_jaxpr(body.invars, [*body.outvars, *half.new], half.forward_eqns, body)
    forward = eqn.replace(
        outvars=[*eqn.outvars, *(outer[v] for v in half.new)],
        params=dict(eqn.params, **forward_params(forward_body, half)),
    )
    kept = {outer[v]: codec for v, codec in half.split.kept.items()}
    # Two outputs can be one value: the second is then that value, by way of the rerun.
    if not half.again:
        return CompositeSplit(forward=forward, kept=kept, rerun=None)
    rerun_body = new_jaxpr(
        [*(body.invars[i] for i in half.reads), *half.kept],
        [body.outvars[i] for i in half.again],
        half.rerun_eqns,
        body,
    )
    invars = [*(eqn.invars[i] for i in half.reads), *(outer[v] for v in half.kept)]
    rerun = new_eqn(
        invars,
        [eqn.outvars[i] for i in half.again],
        eqn.primitive,
        dict(eqn.params, **rerun_params(rerun_body, half)),
        eqn_effects(rerun_body, invars),
        eqn.source_info,
        eqn.ctx,
    )
    return CompositeSplit(forward=forward, kept=kept, rerun=rerun)


def split_checkpoint(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split a nested checkpoint: what runs again stays a checkpoint, so that two levels of recomputation survive."""
    body, hoisted = inline_calls(eqn.params["jaxpr"])
    if hoisted:
        return None
    return _split_call(
        eqn,
        body,
        wanted,
        decider,
        lambda forward_body, half: {"jaxpr": forward_body},
        lambda rerun_body, half: {"jaxpr": rerun_body, "prevent_cse": False},
    )


def split_jit(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split a `jit` that has shardings or layouts of its own; others are inlined before. What is kept has none."""
    body, consts = open_jaxpr(eqn.params["jaxpr"])
    body, hoisted = inline_calls(body)
    if consts or hoisted:
        return None
    params = eqn.params

    def of_forward(forward_body: Jaxpr, half: _Halves) -> dict[str, Any]:
        count = len(half.new)
        return {
            "jaxpr": close_jaxpr(forward_body),
            "out_shardings": (*params["out_shardings"], *(UNSPECIFIED,) * count),
            "out_layouts": (*params["out_layouts"], *(None,) * count),
        }

    def of_rerun(rerun_body: Jaxpr, half: _Halves) -> dict[str, Any]:
        count = len(half.kept)
        return {
            "jaxpr": close_jaxpr(rerun_body),
            "in_shardings": (*(params["in_shardings"][i] for i in half.reads), *(UNSPECIFIED,) * count),
            "in_layouts": (*(params["in_layouts"][i] for i in half.reads), *(None,) * count),
            "donated_invars": (False,) * (len(half.reads) + count),
            "out_shardings": tuple(params["out_shardings"][i] for i in half.again),
            "out_layouts": tuple(params["out_layouts"][i] for i in half.again),
        }

    return _split_call(eqn, body, wanted, decider, of_forward, of_rerun)


def split_shard_map(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split the body, which runs on each shard. What is kept stays where it was made, side by side with other shards'."""
    params = eqn.params
    body, consts = open_jaxpr(params["jaxpr"])
    if consts:
        return None
    with inside_shard_map(params):
        body, hoisted = inline_calls(body)
        if hoisted:
            return None
        half = _halves(body, wanted, decider, {})
        add_axis, handed, remove_axis, received = _with_an_axis(half.split.kept)
    specs, avals = zip(*(shard_map_residual(params, v.aval) for v in handed), strict=True) if handed else ((), ())
    outer = {v: new_var(a) for v, a in zip(half.split.kept, avals, strict=True)}
    spec_of = dict(zip(half.split.kept, specs, strict=True))
    received_of = dict(zip(half.split.kept, received, strict=True))
    forward_body = new_jaxpr(body.invars, [*body.outvars, *handed], [*half.forward_eqns, *add_axis], body)
    forward = eqn.replace(
        outvars=[*eqn.outvars, *outer.values()],
        params=dict(
            params, jaxpr=without_axis_effects(forward_body, params), out_specs=(*params["out_specs"], *specs)
        ),
    )
    rerun_body = without_axis_effects(
        new_jaxpr(
            [*(body.invars[i] for i in half.reads), *(received_of[v] for v in half.kept)],
            [body.outvars[i] for i in half.again],
            live_eqns([*remove_axis, *half.rerun_eqns], [body.outvars[i] for i in half.again]),
            body,
        ),
        params,
    )
    invars = [*(eqn.invars[i] for i in half.reads), *(outer[v] for v in half.kept)]
    rerun = new_eqn(
        invars,
        [eqn.outvars[i] for i in half.again],
        eqn.primitive,
        dict(
            params,
            jaxpr=rerun_body,
            in_specs=(*(params["in_specs"][i] for i in half.reads), *(spec_of[v] for v in half.kept)),
            out_specs=tuple(params["out_specs"][i] for i in half.again),
        ),
        eqn_effects(rerun_body, invars),
        eqn.source_info,
        eqn.ctx,
    )
    return CompositeSplit(
        forward=forward, kept={outer[v]: codec for v, codec in half.split.kept.items()}, rerun=rerun
    )


def _with_an_axis(kept: Iterable[Var]) -> tuple[list[JaxprEqn], list[Any], list[JaxprEqn], list[Var]]:
    """Give scalars an axis, and take it away again: equations and variables for both directions."""
    adding: list[JaxprEqn] = []
    removing: list[JaxprEqn] = []
    handed: list[Any] = []
    received: list[Var] = []
    for v in kept:
        if v.aval.shape:
            handed.append(v)
            received.append(v)
            continue
        eqns, (out,) = traced_eqns(lambda x: [x.reshape(1)], [v], "shard_map residual")
        adding += eqns
        handed.append(out)
        received.append(new_var(out.aval))
        eqns, (out,) = traced_eqns(lambda x: [x.reshape(())], [received[-1]], "shard_map residual")
        removing += [*eqns[:-1], eqns[-1].replace(outvars=[v])]
    return adding, handed, removing, received


composite_rules["scan"] = split_scan
composite_rules["cond"] = split_cond
composite_rules["jit"] = split_jit
composite_rules["pjit"] = split_jit
composite_rules["shard_map"] = split_shard_map
composite_rules["autoremat_checkpoint"] = split_checkpoint
