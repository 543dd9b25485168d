"""The joint program of a function: what runs forward, and what is linear in the tangents.

    jaxpr:   primals -> outs
    forward: (primals, constants) -> (outs, demanded)
    linear:  (demanded, tangents) -> tangents out

`forward` holds every equation that depends on no tangent, those that only derivatives need (`cos x` for `sin x`)
among them. `linear` is what reverse mode transposes: it reads the `demanded` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    eval_jaxpr,
    has_tangent,
    is_ref,
    tangent_aval,
    trace,
    without_internal_refs,
)
from autoremat._errors import EffectError
from autoremat.transform._jaxpr import (
    _Inliner,
    cached_by_jaxpr,
    called_jaxpr,
    free_vars,
    is_var,
    live_eqns,
    subjaxprs,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Joint:
    """See the module's docstring. `inputs` are the variables of the primals and then of the constants."""

    like: Jaxpr
    inputs: tuple[Var, ...]
    constants: tuple[Any, ...]
    outs: tuple[Any, ...]
    forward_eqns: tuple[JaxprEqn, ...]
    demanded: tuple[Var, ...]
    tangents: tuple[Var, ...]
    linear_eqns: tuple[JaxprEqn, ...]
    tangent_outs: tuple[Any, ...]
    nonzero_outs: tuple[bool, ...]


def _trace_joint(jaxpr: Jaxpr, nonzero: Sequence[bool], *, split_loops: bool) -> tuple[Jaxpr, list[Any]]:
    """Trace `(primals, tangents) -> (outs, tangents out)`.

    `jax.linearize` separates the linear part of loops and branches from the rest; where there are none, `jax.jvp` gives the same
    equations in a third of the time.
    """
    n = len(jaxpr.invars)
    in_avals = [v.aval for v in jaxpr.invars]
    tangent_avals = [tangent_aval(a) for a, nz in zip(in_avals, nonzero, strict=True) if nz]
    differentiable = [has_tangent(v.aval) for v in jaxpr.outvars]

    def joint(*args: Any) -> list[Any]:
        primals, tangents = args[:n], args[n:]

        def of_differentiated(*chosen: Any) -> list[Any]:
            it = iter(chosen)
            return eval_jaxpr(jaxpr, *(next(it) if nz else p for p, nz in zip(primals, nonzero, strict=True)))

        chosen = tuple(p for p, nz in zip(primals, nonzero, strict=True) if nz)
        if split_loops:
            outs, f_lin = jax.linearize(of_differentiated, *chosen)
            tangent_outs = f_lin(*tangents)
        else:
            outs, tangent_outs = jax.jvp(of_differentiated, chosen, tangents)
        return [*outs, *(t for t, d in zip(tangent_outs, differentiable, strict=True) if d)]

    return trace(joint, [*in_avals, *tangent_avals], "checkpoint")


def linearize(jaxpr: Jaxpr, nonzero: tuple[bool, ...]) -> Joint:
    """The joint program of `jaxpr` for tangents at the inputs that `nonzero` marks.

    `jaxpr` has no constants. Tangents of integer inputs and outputs do not exist (`float0`).
    """
    pure = without_internal_refs(jaxpr)
    for split_loops in (False, True) if _is_flat(pure.eqns) else (True,):
        traced, consts = _trace_joint(pure, nonzero, split_loops=split_loops)
        inliner = _Inliner()
        out_atoms = inliner.run(traced, {}, False)
        if split_loops or not _mixes(inliner.eqns, traced.invars[len(consts) + len(jaxpr.invars) :]):
            break
    n, num_outs = len(jaxpr.invars), len(jaxpr.outvars)
    constvars, inputs = traced.invars[: len(consts)], traced.invars[len(consts) :]
    primals, tangents = inputs[:n], inputs[n:]

    depends = set(tangents)
    forward: list[JaxprEqn] = []
    linear: list[JaxprEqn] = []
    for eqn in inliner.eqns:
        if any(is_var(v) and v in depends for v in eqn.invars):
            linear.append(eqn)
            depends.update(eqn.outvars)
        else:
            forward.append(eqn)
    _check_references(linear, forward, tangents, jaxpr)
    float_outs = iter(out_atoms[num_outs:])
    candidates = [next(float_outs) if has_tangent(v.aval) else None for v in jaxpr.outvars]
    nonzero_outs = tuple(t is not None and is_var(t) and t in depends for t in candidates)
    tangent_outs = tuple(t for t, nz in zip(candidates, nonzero_outs, strict=True) if nz)
    linear = live_eqns(linear, tangent_outs, effects=False)
    tangent_set = set(tangents)
    demanded = tuple(v for v in free_vars(linear, tangent_outs) if v not in tangent_set)
    outs = tuple(out_atoms[:num_outs])
    return Joint(
        like=jaxpr.replace(),  # a copy: the cache forgets a jaxpr only if no result refers to it
        inputs=(*primals, *constvars, *inliner.constants),
        constants=(*consts, *inliner.constants.values()),
        outs=outs,
        forward_eqns=tuple(live_eqns(forward, [*outs, *demanded])),
        demanded=demanded,
        tangents=tuple(tangents),
        linear_eqns=tuple(linear),
        tangent_outs=tangent_outs,
        nonzero_outs=nonzero_outs,
    )


def _check_references(
    linear: Sequence[JaxprEqn], forward: Sequence[JaxprEqn], tangents: Sequence[Var], jaxpr: Jaxpr
) -> None:
    """Refuse derivatives that pass through a reference: they would not be where the data flow says."""
    refs = {v for v in tangents if is_ref(v.aval)} | {v for e in forward for v in e.outvars if is_ref(v.aval)}
    if refs and any(is_var(v) and v in refs for e in linear for v in e.invars):
        raise EffectError(
            f"A derivative passes through a mutable reference inside the checkpointed function "
            f"{jaxpr.debug_info.func_src_info}. Cheapest fix: give the array as an argument and return it, or leave the "
            "part that writes to the reference out of the checkpoint."
        )


def _is_flat(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether no equation has a program inside, custom derivatives of forward mode and calls that are inlined aside."""
    return all(
        e.primitive.name == "custom_jvp_call"
        or not (inner := subjaxprs(e))
        or (called_jaxpr(e) is not None and all(_is_flat(j.eqns) for j in inner))
        for e in eqns
    )


def _mixes(eqns: Sequence[JaxprEqn], tangents: Sequence[Var]) -> bool:
    """Whether an equation with a program inside (a loop in a derivative rule) reads a tangent."""
    depends = set(tangents)
    for eqn in eqns:
        if any(is_var(v) and v in depends for v in eqn.invars):
            if subjaxprs(eqn):
                return True
            depends.update(eqn.outvars)
    return False


linearize_cached = cached_by_jaxpr(linearize)
