"""The bodies of loops that are derived from another loop: that of its tangents, and one step of its reversal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import (
    Jaxpr,
    eval_jaxpr,
    has_tangent,
    new_jaxpr,
    tangent_aval,
    trace,
    without_dead_code,
)
from autoremat.transform._jaxpr import cached_by_jaxpr, live_eqns
from autoremat.transform._linearize import linearize_cached

Flags = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Derived:
    """A jaxpr `(constants, inputs) -> outs`, and the values of its constants."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]


def chosen(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The values that the flags mark."""
    return [v for v, f in zip(values, flags, strict=True) if f]


def tangent_avals(jaxpr: Jaxpr) -> list[Any]:
    """The types of the tangents of the inputs."""
    return [tangent_aval(v.aval) for v in jaxpr.invars]


def perturbed(jaxpr: Jaxpr, flags: Flags, first: int, num_carry: int) -> tuple[Flags, Flags]:
    """Which inputs and which outputs of a body have a tangent, if `flags` marks those of the loop's operands that have one.

    The carry, inputs from `first` on and the first outputs, passes tangents on from step to step.
    """
    flags = tuple(f and has_tangent(v.aval) for f, v in zip(flags, jaxpr.invars, strict=True))
    while any(flags):
        outs = linearize_cached(jaxpr, flags).nonzero_outs
        carry = [f or nz for f, nz in zip(flags[first : first + num_carry], outs, strict=False)]
        grown = (*flags[:first], *carry, *flags[first + num_carry :])
        if grown == flags:
            return flags, (*carry, *outs[num_carry:])
        flags = grown
    return flags, (False,) * len(jaxpr.outvars)


def _of_chosen(
    jaxpr: Jaxpr, primals: Sequence[Any], flags: Sequence[bool], outs: Sequence[bool]
) -> Callable[..., list[Any]]:
    """The jaxpr as a function of the inputs that `flags` marks, with the outputs that `outs` marks."""

    def fun(*values: Any) -> list[Any]:
        it = iter(values)
        args = [next(it) if f else p for p, f in zip(primals, flags, strict=True)]
        return chosen(eval_jaxpr(jaxpr, *args), outs)

    return fun


# ------------------------------------------------------------------------------------------------------- the carry alone


def _carry_alone(jaxpr: Jaxpr, num_carry: int) -> Jaxpr:
    outs = jaxpr.outvars[:num_carry]
    return without_dead_code(new_jaxpr(jaxpr.invars, outs, live_eqns(jaxpr.eqns, outs), jaxpr))


carry_alone = cached_by_jaxpr(_carry_alone)
"""`(jaxpr, num_carry)`: the body of a loop that returns its carry and nothing else."""


# --------------------------------------------------------------------------------------------------------------- tangents


def grouped(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Consecutive parts of the given sizes, and nothing left."""
    parts, start = [], 0
    for n in sizes:
        parts.append(list(values[start : start + n]))
        start += n
    if start != len(values):
        raise AssertionError(f"{len(values)} values in groups of {list(sizes)}")
    return parts


def with_tangents(
    primals: Sequence[Any], tangents: Iterator[Any] | Sequence[Any], flags: Sequence[bool]
) -> list[Any]:
    """One group of operands of a `pushed` body: its primals, then a tangent for each flag that is set."""
    it = iter(tangents)
    return [*primals, *(next(it) for f in flags if f)]


def _pushed(
    jaxpr: Jaxpr, flags: Flags, in_sizes: tuple[int, ...], out_sizes: tuple[int, ...], out_flags: Flags
) -> Derived:
    avals = [v.aval for v in jaxpr.invars]
    marks = grouped(flags, in_sizes)
    parts = zip(grouped(avals, in_sizes), grouped(tangent_avals(jaxpr), in_sizes), marks, strict=True)
    operands = [a for p, t, f in parts for a in with_tangents(p, chosen(t, f), f)]

    def fun(*args: Any) -> list[Any]:
        it = iter(args)
        primals: list[Any] = []
        tangents: list[Any] = []
        for group in marks:
            primals += [next(it) for _ in group]
            tangents += [next(it) for f in group if f]
        every = (True,) * len(jaxpr.outvars)
        pushed = _of_chosen(jaxpr, primals, flags, every)
        outs, touts = jax.jvp(pushed, tuple(chosen(primals, flags)), tuple(tangents))
        *carried, (_, last, last_flags) = zip(
            *(grouped(values, out_sizes) for values in (outs, touts, out_flags)), strict=True
        )
        return [x for o, t, f in carried for x in with_tangents(o, chosen(t, f), f)] + chosen(
            last, last_flags
        )

    traced, consts = trace(fun, operands, "tangents of a loop")
    return Derived(traced, tuple(consts))


pushed = cached_by_jaxpr(_pushed)
"""`(jaxpr, flags, in_sizes, out_sizes, out_flags)`: the body of a loop of primals and tangents.

Its inputs stand in groups, each `with_tangents` that `flags` marks. So do its outputs, by `out_flags`; of the last group there are
only the tangents.
"""


# --------------------------------------------------------------------------------------------------------------- reversal


def _reversed_step(
    jaxpr: Jaxpr, flags: Flags, num_consts: int, num_carry: int, has_cotangent: Flags
) -> Derived:
    num_in, first_x = len(jaxpr.invars), num_consts + num_carry
    num_sums = sum(flags[:num_consts])
    outs = (*flags[num_consts:first_x], *has_cotangent)
    adjoint = chosen(tangent_avals(jaxpr)[:first_x], flags[:first_x])
    of_ys = [tangent_aval(v.aval) for v in chosen(jaxpr.outvars[num_carry:], has_cotangent)]

    def fun(*args: Any) -> list[Any]:
        primals, sums, cts = args[:num_in], args[num_in : num_in + num_sums], args[num_in + num_sums :]
        _, pull = jax.vjp(_of_chosen(jaxpr, primals, flags, outs), *chosen(primals, flags))
        found = pull(list(cts))
        return [*(s + ct for s, ct in zip(sums, found, strict=False)), *found[num_sums:]]

    operands = [*(v.aval for v in jaxpr.invars), *adjoint, *of_ys]
    traced, consts = trace(fun, operands, "one step of a loop, reversed")
    return Derived(traced, tuple(consts))


reversed_step = cached_by_jaxpr(_reversed_step)
"""`(jaxpr, flags, num_consts, num_carry, has_cotangent)`: one step of a loop, reversed.

    (constants, carry, x, sums of the constants' cotangents, cotangent of the carry, those of the ys that `has_cotangent` marks)
    -> (sums, cotangent of the carry, cotangent of x)

Inputs that `flags` does not mark have no cotangent.
"""
