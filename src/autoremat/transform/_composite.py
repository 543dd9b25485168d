"""How equations with a program inside are split: `scan`, `cond`, `jit`, `shard_map`, and nested checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autoremat._compat import (
    UNSPECIFIED,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    Zero,
    close_jaxpr,
    eqn_effects,
    inside_shard_map,
    instantiate,
    new_eqn,
    new_jaxpr,
    new_var,
    open_jaxpr,
    scan_params,
    scan_sizes,
    shard_map_residual,
    stacked_aval,
    without_axis_effects,
)
from autoremat.storage import DEVICE_NAME
from autoremat.transform._coding import coded
from autoremat.transform._jaxpr import free_vars, inline_body, is_var, live_eqns, subjaxprs, traced_eqns
from autoremat.transform._split import CompositeSplit, Decider, Split, composite_rules, prune, split_eqns


def _opened(closed: Any) -> tuple[Jaxpr, dict[Var, Any]]:
    """The body in a parameter of an equation, calls inlined, and the constants that it reads beside its inputs."""
    opened, consts = open_jaxpr(closed)
    body = inline_body(new_jaxpr(opened.invars, opened.outvars, opened.eqns, opened))
    return body, dict(zip(opened.constvars, consts, strict=True))


def _closed(body: Jaxpr, constants: Mapping[Var, Any]) -> Any:
    """The opposite of `_opened`, with the constants that are still read."""
    read = set(free_vars(body.eqns, body.outvars))
    return close_jaxpr(body, {v: value for v, value in constants.items() if v in read})


# ---------------------------------------------------------------------------------------------------------------- scan


def split_scan(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split the body; what an iteration keeps is stacked, and read by the second run of the loop.

    The second run carries only what it needs itself: a carry that no kept value replaces is computed again. An output
    that is kept in every iteration is kept outside as the output that it is.
    """
    body, constants = _opened(eqn.params["jaxpr"])
    num_consts, num_carry = scan_sizes(eqn.params)
    split, again = _split_iteration(body, wanted, num_consts, num_carry, decider)
    split, encoded = _encoded_iteration(split)
    stacks: dict[Var, Var] = {}
    run = list(again)
    for i, v in enumerate(body.outvars):
        if i >= num_carry and again[i] and is_var(v) and v in split.kept and v not in stacks:
            stacks[v], run[i] = eqn.outvars[i], False
    new = [v for v in split.kept if v not in stacks]
    stacks.update((v, new_var(stacked_aval(v.aval, eqn.params["length"]))) for v in new)
    outs = [*body.outvars, *(encoded.get(v, v) for v in new)]
    forward_body = new_jaxpr(body.invars, outs, split.forward, body)
    forward = eqn.replace(
        outvars=[*eqn.outvars, *(stacks[v] for v in new)],
        params=scan_params(eqn.params, _closed(forward_body, constants), num_consts, num_carry),
    )
    kept = {stacks[v]: codec for v, codec in split.kept.items()}
    rerun = _rerun_scan(eqn, body, constants, split, run, stacks) if any(run) else None
    return CompositeSplit(forward=forward, kept=kept, rerun=rerun)


def _encoded_iteration(split: Split) -> tuple[Split, dict[Var, Any]]:
    """What is kept in another form is encoded and decoded inside the iteration: the plain values of all are never there at once.

    Returns the split with the variables that receive encoded values in place of those values, and what each receives.
    """
    forward, decode, kept, encoded = list(split.forward), [], {}, {}
    for v, codec in split.kept.items():
        encoding, out, received, decoding = coded(v, codec)
        forward += encoding
        decode += decoding
        kept[received] = DEVICE_NAME
        if received is not v:
            encoded[received] = out
    return Split(forward=forward, kept=kept, rerun=[*decode, *split.rerun]), encoded


def _split_iteration(
    body: Jaxpr, wanted: Sequence[bool], num_consts: int, num_carry: int, decider: Decider
) -> tuple[Split, list[bool]]:
    """Split the body for the wanted outputs and for the carry that they need; also which outputs those are."""
    carry_in = body.invars[num_consts : num_consts + num_carry]
    again = list(wanted)
    while True:
        demanded = [v for v, w in zip(body.outvars, again, strict=True) if w]
        split = split_eqns(body.eqns, demanded, decider)
        reads = set(free_vars(prune(split.rerun, demanded), demanded))
        grown = [w or v in reads for w, v in zip(again, carry_in, strict=False)]
        if grown == again[:num_carry]:
            return split, again
        again[:num_carry] = grown


def _rerun_scan(
    eqn: JaxprEqn,
    body: Jaxpr,
    constants: Mapping[Var, Any],
    split: Split,
    run: list[bool],
    stacks: dict[Var, Var],
) -> JaxprEqn:
    num_consts, num_carry = scan_sizes(eqn.params)
    outs = [v for v, r in zip(body.outvars, run, strict=True) if r]
    eqns = prune(split.rerun, outs)
    reads = set(free_vars(eqns, outs))
    read = [i for i, v in enumerate(body.invars) if v in reads]
    consts = [i for i in read if i < num_consts]
    carry = [i + num_consts for i in range(num_carry) if run[i]]
    xs = [i for i in read if i >= num_consts + num_carry]
    order = [*consts, *carry, *xs]
    kept = [v for v in stacks if v in reads]
    rerun_body = new_jaxpr([*(body.invars[i] for i in order), *kept], outs, eqns, body)
    invars = [*(eqn.invars[i] for i in order), *(stacks[v] for v in kept)]
    return new_eqn(
        invars,
        [v for v, r in zip(eqn.outvars, run, strict=True) if r],
        eqn.primitive,
        scan_params(eqn.params, _closed(rerun_body, constants), len(consts), len(carry)),
        eqn_effects(rerun_body, invars),
        eqn.source_info,
        eqn.ctx,
    )


# ---------------------------------------------------------------------------------------------------------------- cond


@dataclass
class _Slot:
    """A place for what a branch keeps. Only one branch runs, so branches share the slots of one type."""

    outer: Var
    codec: str
    of_branch: dict[int, Var]

    def takes(self, branch: int, v: Var, codec: str) -> bool:
        return branch not in self.of_branch and self.outer.aval == _strong(v.aval) and self.codec == codec


def _strong(aval: Any) -> Any:
    return aval.update(weak_type=False)


def split_cond(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split each branch. A branch returns what it keeps, and zeros where only other branches keep something."""
    bodies, constants = zip(*map(_opened, eqn.params["branches"]), strict=True)
    splits = []
    for body in bodies:
        demanded = [v for v, w in zip(body.outvars, wanted, strict=True) if w]
        splits.append(split_eqns(body.eqns, demanded, decider))
    if not all(_can_be_zero(v.aval) for split in splits for v in split.kept):
        return None
    aliases = _kept_by_all(eqn, bodies, splits, wanted)
    new = _new_slots(splits, [*aliases.values()])
    slots = [*aliases.values(), *new]
    forward = eqn.replace(
        outvars=[*eqn.outvars, *(slot.outer for slot in new)],
        params=dict(
            eqn.params,
            branches=tuple(
                _closed(_forward_branch(b, body, splits[b], new), constants[b])
                for b, body in enumerate(bodies)
            ),
        ),
    )
    kept = {slot.outer: slot.codec for slot in slots}
    again = [i for i, w in enumerate(wanted) if w and i not in aliases]
    if not again:
        return CompositeSplit(forward=forward, kept=kept, rerun=None)
    branches = [
        _closed(_rerun_branch(b, body, splits[b], slots, again), constants[b])
        for b, body in enumerate(bodies)
    ]
    rerun = new_eqn(
        [*eqn.invars, *(slot.outer for slot in slots)],
        [eqn.outvars[i] for i in again],
        eqn.primitive,
        dict(eqn.params, branches=tuple(branches)),
        eqn.effects,
        eqn.source_info,
        eqn.ctx,
    )
    return CompositeSplit(forward=forward, kept=kept, rerun=rerun)


def _can_be_zero(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


def _kept_by_all(
    eqn: JaxprEqn, bodies: Sequence[Jaxpr], splits: Sequence[Split], wanted: Sequence[bool]
) -> dict[int, _Slot]:
    """The outputs that every branch keeps: kept outside as the outputs that they are."""
    found: dict[int, _Slot] = {}
    taken: set[Var] = set()
    for i, w in enumerate(wanted):
        made = [body.outvars[i] for body in bodies]
        if not w or isinstance(eqn.outvars[i], DropVar) or not all(is_var(v) for v in made):
            continue
        codecs = {split.kept.get(v) for v, split in zip(made, splits, strict=True)}
        if len(codecs) == 1 and None not in codecs and not taken & set(made):
            found[i] = _Slot(eqn.outvars[i], str(codecs.pop()), dict(enumerate(made)))
            taken.update(made)
    return found


def _new_slots(splits: Sequence[Split], there: Sequence[_Slot]) -> list[_Slot]:
    """Places for what is kept besides; branches share them.

    A shared place has a tangent if the value of any branch has one. So where a `while` may read it, which JAX transposes only
    without tangents (behind a `stop_gradient`), each value has its own.
    """
    slots: list[_Slot] = []
    share = not any(_holds_while(e) for split in splits for e in split.rerun)
    for b, split in enumerate(splits):
        for v, codec in split.kept.items():
            if any(slot.of_branch.get(b) is v for slot in there):
                continue
            slot = next((s for s in slots if share and s.takes(b, v, codec)), None)
            if slot is None:
                slot = _Slot(new_var(_strong(v.aval)), codec, {})
                slots.append(slot)
            slot.of_branch[b] = v
    return slots


def _holds_while(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "while" or any(_holds_while(e) for j in subjaxprs(eqn) for e in j.eqns)


def _forward_branch(b: int, body: Jaxpr, split: Split, slots: Sequence[_Slot]) -> Jaxpr:
    empty = [slot.outer.aval for slot in slots if b not in slot.of_branch]
    zero_eqns, zeros = traced_eqns(lambda: [instantiate(Zero(a)) for a in empty], (), "cond residuals")
    filler = iter(zeros)
    extra = [slot.of_branch[b] if b in slot.of_branch else next(filler) for slot in slots]
    return new_jaxpr(body.invars, [*body.outvars, *extra], [*split.forward, *zero_eqns], body)


def _rerun_branch(b: int, body: Jaxpr, split: Split, slots: Sequence[_Slot], again: Sequence[int]) -> Jaxpr:
    outs = [body.outvars[i] for i in again]
    received = [slot.of_branch.get(b) or new_var(slot.outer.aval) for slot in slots]
    return new_jaxpr([*body.invars, *received], outs, prune(split.rerun, outs), body)


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
    return _split_call(
        eqn,
        inline_body(eqn.params["jaxpr"]),
        wanted,
        decider,
        lambda forward_body, half: {"jaxpr": forward_body, "origin": None},
        lambda rerun_body, half: {"jaxpr": rerun_body, "origin": None, "prevent_cse": False},
    )


def split_jit(eqn: JaxprEqn, wanted: list[bool], decider: Decider) -> CompositeSplit | None:
    """Split a `jit` that has shardings, layouts or constants of its own; others are inlined before."""
    body, constants = _opened(eqn.params["jaxpr"])
    params = eqn.params

    def of_forward(forward_body: Jaxpr, half: _Halves) -> dict[str, Any]:
        count = len(half.new)
        return {
            "jaxpr": _closed(forward_body, constants),
            "out_shardings": (*params["out_shardings"], *(UNSPECIFIED,) * count),
            "out_layouts": (*params["out_layouts"], *(None,) * count),
        }

    def of_rerun(rerun_body: Jaxpr, half: _Halves) -> dict[str, Any]:
        count = len(half.kept)
        return {
            "jaxpr": _closed(rerun_body, constants),
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
        body = inline_body(body)
        half = _halves(body, wanted, decider, {})
        add_axis, handed, remove_axis, received = _with_an_axis(half.split.kept)
    specs, avals = (
        zip(*(shard_map_residual(params, v.aval) for v in handed), strict=True) if handed else ((), ())
    )
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
