"""Split forward equations in those that run in the forward pass and those that run again in the backward pass.

    eqns:    inputs -> outs, demanded
    forward: inputs -> outs, kept
    rerun:   inputs, kept -> demanded

One backward walk: a value that the backward pass reads is either kept, and then nothing before it is needed for its
sake, or its equation runs again and its inputs are read in turn. What is kept, a *decider* says. It may send the walk
into the body of a `scan`, the branches of a `cond`, or a nested checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from autoremat._compat import (
    DropVar,
    JaxprEqn,
    Var,
    effect_may_repeat,
    is_debug_effect,
    name_p,
    new_var,
)
from autoremat.graph._trace import draws_unrepeatable_bits
from autoremat.storage import DEVICE_NAME
from autoremat.transform._jaxpr import is_var, live_eqns, traced_eqns

RECURSE = object()


class Decider(Protocol):
    """Says what to keep.

    A decider may also have the methods `repeats(eqn)`: whether an equation with an effect that JAX allows to repeat (a debug
    print) does so in the backward pass, although nothing there reads its outputs; and `keeps_name(eqn)`: whether it keeps a
    value for the name that `eqn` gives it.
    """

    def decide(self, eqn: JaxprEqn, wanted: Sequence[int], names: Sequence[frozenset[str]]) -> Any:
        """What to do with the outputs `wanted` (indices) of `eqn`, tagged with `names` (one set for each of them).

        Returns a dict from output index to the name of a codec, for the outputs that are kept (an empty one: run again),
        or `RECURSE`.
        """
        ...


@dataclass
class Split:
    """See the module's docstring. `kept` maps a variable that `forward` makes to the name of its codec."""

    forward: list[JaxprEqn] = field(default_factory=list)
    kept: dict[Var, str] = field(default_factory=dict)
    rerun: list[JaxprEqn] = field(default_factory=list)


@dataclass
class CompositeSplit:
    """How one equation with a program inside is split.

    `forward` replaces it in the forward pass (its new outputs are kept), `rerun` runs in the backward pass, or is
    `None` where everything that is wanted was kept.
    """

    forward: JaxprEqn
    kept: dict[Var, str]
    rerun: JaxprEqn | None


CompositeRule = Callable[[JaxprEqn, list[bool], Decider], "CompositeSplit | None"]

# By primitive name; a rule returns `None` where it cannot look inside, and the equation is run again whole.
composite_rules: dict[str, CompositeRule] = {}


def may_run_again(eqn: JaxprEqn) -> bool:
    """Whether a second execution of an equation, and of all that stands inside, gives the same values and is allowed.

    Effects inside that others see are effects of the equation itself; the references of a kernel are its own.
    """
    return all(effect_may_repeat(e) for e in eqn.effects) and not draws_unrepeatable_bits(eqn)


def tags_of(eqns: Sequence[JaxprEqn]) -> dict[Var, frozenset[str]]:
    """The names that each value carries. `y = name(x)` is `x`: the tag belongs to both."""
    tags: dict[Var, frozenset[str]] = {}
    for eqn in reversed(eqns):
        if eqn.primitive is name_p and is_var(eqn.invars[0]):
            own = tags.get(eqn.outvars[0], frozenset()) | {eqn.params["name"]}
            tags[eqn.outvars[0]] = own
            tags[eqn.invars[0]] = tags.get(eqn.invars[0], frozenset()) | own
    return tags


def split_eqns(eqns: Sequence[JaxprEqn], demanded: Iterable[Any], decider: Decider) -> Split:
    """Split `eqns` for a backward pass that reads `demanded`. See the module's docstring."""
    tags = tags_of(eqns)
    repeated = _repeated_effects(eqns, tags, decider)
    want = {v for v in demanded if is_var(v)}
    forward: list[JaxprEqn] = []
    rerun: list[JaxprEqn] = []
    kept: dict[Var, str] = {}
    for eqn in reversed(eqns):
        wanted = [i for i, v in enumerate(eqn.outvars) if v in want]
        if not wanted:
            forward.append(eqn)
            if id(eqn) in repeated:
                rerun.append(eqn)
                want.update(v for v in eqn.invars if is_var(v))
            continue
        decision = decider.decide(eqn, wanted, [tags.get(eqn.outvars[i], frozenset()) for i in wanted])
        composite = None
        if decision is RECURSE:
            rule = composite_rules.get(eqn.primitive.name)
            mask = [i in wanted for i in range(len(eqn.outvars))]
            composite = rule(eqn, mask, decider) if rule else None
            decision = {} if may_run_again(eqn) else dict.fromkeys(wanted, DEVICE_NAME)
        if composite is not None:
            forward.append(composite.forward)
            kept.update(composite.kept)
            again = composite.rerun
        else:
            forward.append(eqn)
            kept.update((eqn.outvars[i], codec) for i, codec in decision.items())
            again = eqn if len(decision) < len(wanted) else None
        if again is not None:
            rerun.append(again)
            want.update(v for v in again.invars if is_var(v))
    forward.reverse()
    rerun.reverse()
    return Split(forward=_round_kept(forward, kept), kept=kept, rerun=_without_kept(rerun, kept))


def _repeated_effects(
    eqns: Sequence[JaxprEqn], tags: dict[Var, frozenset[str]], decider: Decider
) -> set[int]:
    """The equations (by identity) whose effects happen in the backward pass too.

    As in JAX: those that the policy does not save, and those whose inputs all run again anyway.
    """
    repeats: Any = getattr(decider, "repeats", None)
    keeps_name: Any = getattr(decider, "keeps_name", None)
    if repeats is None or keeps_name is None:
        return set()
    effectful = [e for e in eqns if _has_repeatable_effect(e)]
    if not effectful:
        return set()
    made = {v: (e, i) for e in eqns for i, v in enumerate(e.outvars)}

    def is_kept(v: Any) -> bool:
        if not is_var(v) or v not in made:
            return False
        eqn, i = made[v]
        decision = decider.decide(eqn, [i], [tags.get(v, frozenset())])
        if eqn.primitive is name_p and not decision:
            # As in JAX: a policy that refuses the name makes the tagged value one that is computed again.
            return keeps_name(eqn) and is_kept(eqn.invars[0])
        return decision is not RECURSE and i in decision

    return {id(e) for e in effectful if repeats(e) or not any(is_kept(v) for v in e.invars)}


def _has_repeatable_effect(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in composite_rules:
        return False
    return any(is_debug_effect(e) for e in eqn.effects) and all(effect_may_repeat(e) for e in eqn.effects)


def _round_kept(eqns: list[JaxprEqn], kept: Iterable[Var]) -> list[JaxprEqn]:
    """Round low-precision values that are kept where they are made.

    The compiler may carry a bf16 value in f32 from one operation to the next; a value that is stored loses that excess,
    and then the forward and the backward pass would read different numbers. JAX guards its residuals in the same way.
    """
    narrow = {v for v in kept if _is_narrow_float(v.aval)}
    if not narrow:
        return eqns
    result: list[JaxprEqn] = []
    for eqn in eqns:
        outvars = [new_var(o.aval) if o in narrow else o for o in eqn.outvars]
        result.append(eqn if outvars == list(eqn.outvars) else eqn.replace(outvars=outvars))
        for raw, v in zip(outvars, eqn.outvars, strict=True):
            if raw is not v:
                result += _rounding(raw, v)
    return result


def _is_narrow_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def _rounding(raw: Var, v: Var) -> list[JaxprEqn]:
    info = jnp.finfo(raw.aval.dtype)
    eqns, (out,) = traced_eqns(
        lambda x: [lax.reduce_precision(x, info.nexp, info.nmant)], [raw], "round residual"
    )
    return [*eqns[:-1], eqns[-1].replace(outvars=[v if o is out else o for o in eqns[-1].outvars])]


def _without_kept(rerun: Sequence[JaxprEqn], kept: dict[Var, str]) -> list[JaxprEqn]:
    """Drop the outputs that are kept from equations that run again for the sake of their other outputs."""
    result = []
    for eqn in rerun:
        if any(v in kept for v in eqn.outvars):
            outs = [DropVar(v.aval) if v in kept else v for v in eqn.outvars]
            eqn = eqn.replace(outvars=outs)
        result.append(eqn)
    return result


def prune(eqns: Sequence[JaxprEqn], outs: Iterable[Any]) -> list[JaxprEqn]:
    """The equations of a rerun that `outs` need, and those whose effects are meant to repeat."""
    return live_eqns(eqns, outs)
