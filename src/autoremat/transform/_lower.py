"""Lowering of checkpoints: in place, behind a barrier, and what siblings both compute once.

One JVP splits a checkpoint in two parts, and both run the same equations: forward mode over a backward pass lowers both, and
reverse over forward mode the backward passes of both. Such *siblings* share barriers and results. A compiler merges equal
operations, too, but it rewrites them before, and then not all are equal any more.

Value numbering: an equation is known by its primitive, its parameters and the values that it reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoremat._compat import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    kept_while_lowering,
    lower_barrier,
    lower_inline,
    new_jaxpr,
)
from autoremat._depth import one_level_deeper
from autoremat.transform._jaxpr import is_var


@dataclass(frozen=True, eq=False)
class Siblings:
    """The two parts into which one JVP splits a checkpoint; `before`: those among which the checkpoint was itself."""

    before: Siblings | None

    def __repr__(self) -> str:
        return "siblings"


@dataclass(frozen=True)
class _Shared:
    """What siblings have lowered into a block: operand -> operand behind the barrier, equation -> its results."""

    guarded: dict[Any, Any] = field(default_factory=dict)
    results: dict[Hashable, list[Any]] = field(default_factory=dict)


def lower(
    ctx: Any, jaxpr: Jaxpr, args: Sequence[Any], siblings: Siblings | None, flags: Sequence[bool] = ()
) -> Any:
    """Lower `jaxpr` in place. Operands with a flag stand behind a barrier; those that a sibling has guarded do in any case."""
    shared = kept_while_lowering(ctx, siblings, _Shared) if siblings else _Shared()
    args = [shared.guarded.get(a, a) for a in args]
    operands = list(args)
    if any(flags):
        behind = set(shared.guarded.values())
        chosen = [f and a not in behind for a, f in zip(args, flags, strict=True)]
        args = lower_barrier(ctx, chosen, args)
        shared.guarded.update((o, a) for o, a, c in zip(operands, args, chosen, strict=True) if c)
    return _lower_once(ctx, jaxpr, args, shared.results) if siblings else _lower_all(ctx, jaxpr, args)


def _lower_all(ctx: Any, jaxpr: Jaxpr, args: Sequence[Any]) -> Any:
    with one_level_deeper():
        return lower_inline(ctx, jaxpr, "checkpoint", *args)


def _lower_once(ctx: Any, jaxpr: Jaxpr, args: Sequence[Any], results: dict[Hashable, list[Any]]) -> list[Any]:
    """Lower the equations that `results` does not have, and add theirs."""
    values = dict(zip(jaxpr.invars, args, strict=True))
    known, missing = [], []
    for eqn in jaxpr.eqns:
        number = _number(eqn, values)
        if number is not None and number in results:
            values.update(zip(eqn.outvars, results[number], strict=True))
            known += eqn.outvars
        else:
            missing.append(eqn)
    wanted = [v for v in jaxpr.outvars if not is_var(v) or v not in values]
    made = [v for e in missing for v in e.outvars if not isinstance(v, DropVar)]
    rest = new_jaxpr([*jaxpr.invars, *known], [*wanted, *made], missing, jaxpr)
    outs = _lower_all(ctx, rest, [*args, *(values[v] for v in known)])
    found = dict(zip((id(v) for v in wanted), outs[: len(wanted)], strict=True))
    values.update(zip(made, outs[len(wanted) :], strict=True))
    for eqn in missing:
        number = _number(eqn, values)
        if number is not None and not any(isinstance(v, DropVar) for v in eqn.outvars):
            results[number] = [values[v] for v in eqn.outvars]
    return [found[id(v)] if id(v) in found else values[v] for v in jaxpr.outvars]


def _number(eqn: JaxprEqn, values: dict[Any, Any]) -> Hashable | None:
    """What an equation is known by; `None` if it reads a value that is not lowered yet, or cannot be known."""
    if eqn.effects:
        return None
    inputs = []
    for v in eqn.invars:
        if is_var(v) and v not in values:
            return None
        inputs.append(values[v] if is_var(v) else (str(v.aval), np.asarray(v.val).tobytes()))
    number = (
        eqn.primitive,
        tuple(inputs),
        tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
        eqn.ctx,
    )
    try:
        hash(number)
    except TypeError:  # an array among the parameters
        return None
    return number
