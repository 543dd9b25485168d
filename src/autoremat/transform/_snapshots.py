"""A `scan` that keeps few snapshots of its carry: the loops that run.

    forward:  init                  -> outs, snapshots           the sections of the forward sweep
    sweep:    snapshots, cotangents -> cotangents                for i = n-1 .. 0: sections that lead to x[i], then step i reversed

Both follow the tables of a binomial schedule (`solve/_binomial.py`), in loops whose program does not grow with the length. The
sections' loops have trip counts that only the tables know. All values here are flat lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoremat._compat import Jaxpr, Zero, eval_jaxpr, instantiate, stacked_aval
from autoremat.solve import Schedule, binomial

Values = list[Any]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A scan: `jaxpr: (constants, carry, x) -> (carry, y)`, run `length` times; `snapshots` is the room for its reversal."""

    jaxpr: Jaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    snapshots: int

    @property
    def schedule(self) -> Schedule:
        """How its steps are reversed."""
        return binomial(self.length, self.snapshots)

    @property
    def num_inputs(self) -> int:
        """How many operands it has."""
        return len(self.jaxpr.invars)

    def split(self, inputs: Sequence[Any]) -> tuple[Values, Values, Values]:
        """Something for each operand, as constants, carry and xs."""
        first, second = self.num_consts, self.num_consts + self.num_carry
        return list(inputs[:first]), list(inputs[first:second]), list(inputs[second : self.num_inputs])

    def in_avals(self) -> list[Any]:
        """The types of the operands."""
        consts, init, xs = self.split([v.aval for v in self.jaxpr.invars])
        return [*consts, *init, *(stacked_aval(a, self.length) for a in xs)]

    def out_avals(self) -> list[Any]:
        """The types of the final carry and of the stacked ys."""
        avals = [v.aval for v in self.jaxpr.outvars]
        ys = [stacked_aval(a, self.length) for a in avals[self.num_carry :]]
        return [*avals[: self.num_carry], *ys]

    def snapshot_avals(self) -> list[Any]:
        """The types of the stacks of snapshots, one for each array of the carry."""
        carry = [v.aval for v in self.jaxpr.outvars[: self.num_carry]]
        return [stacked_aval(a, self.schedule.slots) for a in carry]

    def time(self, i: Any) -> Any:
        """Where step i stands among the xs and ys."""
        return self.length - 1 - i if self.reverse else i


def read(stacks: Sequence[Any], i: Any) -> Values:
    """Element i of each stack."""
    return [lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False) for x in stacks]


def write(stacks: Sequence[Any], values: Sequence[Any], i: Any) -> Values:
    """The stacks with other values as element i."""
    return [
        lax.dynamic_update_index_in_dim(x, v, i, 0, allow_negative_indices=False)
        for x, v in zip(stacks, values, strict=True)
    ]


def plain_scan(loop: Loop, inputs: Sequence[Any], unroll: int) -> Values:
    """The scan as JAX runs it."""
    consts, init, xs = loop.split(inputs)

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        outs = eval_jaxpr(loop.jaxpr, *consts, *carry, *x)
        return outs[: loop.num_carry], outs[loop.num_carry :]

    carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse, unroll)
    return [*carry, *ys]


def _table(numbers: Sequence[int]) -> Any:
    return jnp.asarray(np.asarray(numbers, np.int32))


def saving_scan(loop: Loop, inputs: Sequence[Any]) -> Values:
    """The scan, and the snapshots that its forward sweep takes: `[*carry, *ys, *snapshots]`."""
    consts, init, xs = loop.split(inputs)
    schedule = loop.schedule
    slot, begin, end = map(_table, (schedule.slot, schedule.begin, schedule.end))

    def step(i: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
        carry, ys = state
        t = loop.time(i)
        outs = eval_jaxpr(loop.jaxpr, *consts, *carry, *read(xs, t))
        return outs[: loop.num_carry], write(ys, outs[loop.num_carry :], t)

    def section(j: Any, state: tuple[Values, Values, Values]) -> tuple[Values, Values, Values]:
        carry, ys, stacks = state
        stacks = write(stacks, carry, slot[j])
        return (*lax.fori_loop(begin[j], end[j], step, (carry, ys)), stacks)

    # An array of the right type, whatever it holds: every place is written before it is read.
    stacks = [jnp.broadcast_to(x[None], (schedule.slots, *x.shape)) for x in init]
    ys = [instantiate(Zero(a)) for a in loop.out_avals()[loop.num_carry :]]
    sections = schedule.first[loop.length - 1]
    carry, ys, stacks = lax.fori_loop(0, sections, section, (init, ys, stacks))
    return [*carry, *ys, *stacks]


def sweep(
    loop: Loop,
    step_back: Jaxpr,
    inputs: Sequence[Any],
    snapshots: Sequence[Any],
    back_consts: Sequence[Any],
    adjoint: Sequence[Any],
    zs: Sequence[Any],
) -> Values:
    """Run `step_back: (constants, carry, x, adjoint, z) -> (adjoint, out)` for the last step first: `[*adjoint, *outs]`.

    The body of `loop` returns the carry alone: it leads from a snapshot to the carry that a step starts from.
    """
    consts, _, xs = loop.split(inputs)
    schedule = loop.schedule
    slot, begin, end = map(_table, (schedule.slot, schedule.begin, schedule.end))

    def advance(i: Any, carry: Values) -> Values:
        return eval_jaxpr(loop.jaxpr, *consts, *carry, *read(xs, loop.time(i)))

    def section(j: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
        carry, stacks = state
        stacks = write(stacks, carry, slot[j])
        return lax.fori_loop(begin[j], end[j], advance, carry), stacks

    def reverse_step(state: tuple[Values, Values], per_step: Any) -> tuple[tuple[Values, Values], Values]:
        (stacks, adjoint), (start, first, last, x, z) = state, per_step
        carry = read(stacks, start)
        carry, stacks = lax.fori_loop(first, last, section, (carry, stacks))
        outs = eval_jaxpr(step_back, *back_consts, *carry, *x, *adjoint, *z)
        return (stacks, outs[: len(adjoint)]), outs[len(adjoint) :]

    # The tables are by step, the xs by time: both as the loop meets them.
    order = slice(None, None, -1 if loop.reverse else 1)
    tables = [_table(t[order]) for t in (schedule.start, schedule.first, schedule.last)]
    (_, adjoint), outs = lax.scan(
        reverse_step,
        (list(snapshots), list(adjoint)),
        (*tables, xs, list(zs)),
        loop.length,
        reverse=not loop.reverse,
    )
    return [*adjoint, *outs]
