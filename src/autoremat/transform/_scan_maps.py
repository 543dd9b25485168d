"""The derivatives of a scan and of a sweep, as linear maps (see `_linear_map.py`).

                forward mode                                    reverse mode
    scan        a scan of primals and tangents together         the sweep
    sweep       a sweep of primals and tangents together,       the reverse derivative of `nested_sweep`
                from snapshots of both

The snapshots are a cache: the other operands determine what they hold. So they have no tangents, and derivatives of a
sweep go through the carry that the scan started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import Jaxpr, Zero, instantiate, positional_effects, stacked_aval, tangent_aval
from autoremat.transform._derived import (
    Flags,
    carry_alone,
    chosen,
    grouped,
    pushed,
    reversed_step,
    tangent_avals,
    with_tangents,
)
from autoremat.transform._nested_sweep import nested_sweep
from autoremat.transform._scan_primitives import loop_params, scan_p, sweep_p
from autoremat.transform._snapshots import Loop

Values = list[Any]


@dataclass(frozen=True)
class ScanMap:
    """The derivative of a scan at its operands and snapshots, for tangents of the operands that `flags` marks.

    `out_flags` marks the outputs that have one.
    """

    loop: Loop
    flags: Flags
    out_flags: Flags
    unroll: int

    def in_avals(self) -> tuple[Values, Values]:
        """See `LinearMap`."""
        avals = self.loop.in_avals()
        return [*avals, *self.loop.snapshot_avals()], [tangent_aval(a) for a in chosen(avals, self.flags)]

    def out_avals(self) -> Values:
        """See `LinearMap`."""
        return [tangent_aval(a) for a in chosen(self.loop.out_avals(), self.out_flags)]

    def effects(self) -> Any:
        """See `LinearMap`."""
        return positional_effects(self.loop.jaxpr)

    def programs(self) -> list[tuple[Jaxpr, int]]:
        """See `LinearMap`."""
        return [(self.loop.jaxpr, self.loop.length)]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        loop, it = self.loop, iter(tangents)
        flags = loop.split(self.flags)
        out_sizes = (loop.num_carry, len(self.out_flags) - loop.num_carry)
        derived = pushed(loop.jaxpr, self.flags, tuple(map(len, flags)), out_sizes, self.out_flags)
        consts, init, xs = (
            with_tangents(p, it, f) for p, f in zip(loop.split(residuals), flags, strict=True)
        )
        consts = [*derived.constants, *consts]
        params = loop_params(loop, jaxpr=derived.jaxpr, num_consts=len(consts), num_carry=len(init))
        return scan_p.bind(*consts, *init, *xs, unroll=self.unroll, saving=False, **params)[loop.num_carry :]

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        loop = self.loop
        consts, init, xs = loop.split(residuals)
        snapshots = residuals[loop.num_inputs :]
        of_consts, of_carry, _ = loop.split(self.flags)
        num_carry = sum(of_carry)
        of_ys = iter(cts[num_carry:])
        ct_ys = [next(of_ys) if f else None for f in self.out_flags[loop.num_carry :]]
        nonzero = tuple(ct is not None and type(ct) is not Zero for ct in ct_ys)
        derived = reversed_step(loop.jaxpr, self.flags, loop.num_consts, loop.num_carry, nonzero)
        back_consts = [*derived.constants, *consts]
        sums = [Zero(a) for a in chosen(tangent_avals(loop.jaxpr)[: loop.num_consts], of_consts)]
        adjoint = [*map(instantiate, sums), *map(instantiate, cts[:num_carry])]
        return sweep_p.bind(
            *consts,
            *init,
            *xs,
            *snapshots,
            *back_consts,
            *adjoint,
            *chosen(ct_ys, nonzero),
            step_back=derived.jaxpr,
            num_back_consts=len(back_consts),
            num_adjoint=len(adjoint),
            steps_again=loop.schedule.steps_again,
            **loop_params(loop, jaxpr=carry_alone(loop.jaxpr, loop.num_carry)),
        )


@dataclass(frozen=True)
class SweepMap:
    """The derivative of a sweep at its operands without the snapshots, for tangents of the operands that the flags mark.

    Flags for the operands of the loop, the constants of the step back, the adjoint, and the zs. Every output has a tangent.
    """

    loop: Loop
    step_back: Jaxpr
    of_inputs: Flags
    of_consts: Flags
    of_adjoint: Flags
    of_zs: Flags

    @property
    def flags(self) -> Flags:
        """A flag for each residual."""
        return (*self.of_inputs, *self.of_consts, *self.of_adjoint, *self.of_zs)

    def in_avals(self) -> tuple[Values, Values]:
        """See `LinearMap`."""
        sizes = [len(self.of_consts), self.loop.num_inputs - self.loop.num_consts]
        inner = [v.aval for v in self.step_back.invars]
        consts, _, adjoint, zs = grouped(inner, [*sizes, len(self.of_adjoint), len(self.of_zs)])
        stacked = [stacked_aval(a, self.loop.length) for a in zs]
        avals = [*self.loop.in_avals(), *consts, *adjoint, *stacked]
        return avals, [tangent_aval(a) for a in chosen(avals, self.flags)]

    def out_avals(self) -> Values:
        """See `LinearMap`."""
        outs, n = [tangent_aval(v.aval) for v in self.step_back.outvars], len(self.of_adjoint)
        return [*outs[:n], *(stacked_aval(a, self.loop.length) for a in outs[n:])]

    def effects(self) -> Any:
        """See `LinearMap`."""
        return positional_effects(self.loop.jaxpr) | positional_effects(self.step_back)

    def programs(self) -> list[tuple[Jaxpr, int]]:
        """See `LinearMap`."""
        steps = self.loop.length + self.loop.schedule.steps_again
        return [(self.loop.jaxpr, steps), (self.step_back, self.loop.length)]

    def _parts(self, values: Sequence[Any]) -> list[Values]:
        """Constants, carry, xs, constants of the step back, adjoint, zs."""
        sizes = [self.loop.num_inputs, *map(len, (self.of_consts, self.of_adjoint, self.of_zs))]
        inputs, *rest = grouped(values, sizes)
        return [*self.loop.split(inputs), *rest]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        loop, it = self.loop, iter(tangents)
        flags = self._parts(self.flags)
        parts = [with_tangents(p, it, f) for p, f in zip(self._parts(residuals), flags, strict=True)]
        consts, init, xs, back_consts, adjoint, zs = parts
        of_carry = tuple(flags[1])
        forward = pushed(
            loop.jaxpr,
            self.of_inputs,
            tuple(map(len, flags[:3])),
            (loop.num_carry, 0),
            of_carry,
        )
        back_flags = [flags[3], flags[1], flags[2], flags[4], flags[5]]
        num_outs = len(self.step_back.outvars)
        back = pushed(
            self.step_back,
            tuple(f for group in back_flags for f in group),
            tuple(map(len, back_flags)),
            (len(self.of_adjoint), num_outs - len(self.of_adjoint)),
            (True,) * num_outs,
        )
        consts, back_consts = [*forward.constants, *consts], [*back.constants, *back_consts]
        params = loop_params(loop, jaxpr=forward.jaxpr, num_consts=len(consts), num_carry=len(init))
        saved = scan_p.bind(*consts, *init, *xs, unroll=1, saving=True, **params)
        return sweep_p.bind(
            *consts,
            *init,
            *xs,
            *saved[len(init) :],
            *back_consts,
            *adjoint,
            *zs,
            step_back=back.jaxpr,
            num_back_consts=len(back_consts),
            num_adjoint=len(adjoint),
            steps_again=loop.schedule.steps_again,
            **params,
        )[len(self.of_adjoint) :]

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        flags = self.flags

        def fun(*values: Any) -> Values:
            it = iter(values)
            args = [next(it) if f else r for r, f in zip(residuals, flags, strict=True)]
            return nested_sweep(self.loop, self.step_back, *self._parts(args))

        _, pull = jax.vjp(fun, *chosen(residuals, flags))
        return list(pull(list(map(instantiate, cts))))
