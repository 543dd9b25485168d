"""Groups of operations that XLA for CPUs hands to a library as one call. No JAX here.

A group grows around a reduction: up through products of which nothing else needs the result, to the matrix product behind them, and
down through the arithmetic that reads it, as long as one array comes out. So a softmax is one call (maximum, difference, exponential), and
its derivative another, with the matrix product before it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autoremat.predict._program import Instruction, Program

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
LEAST_BYTES = 4096
"""Smaller operands are reduced in place."""

_ARITHMETIC = frozenset({"mul", "add", "add_any", "sub", "div", "neg", "max", "exp", "square", "integer_pow"})
_POWERS = frozenset({"square", "integer_pow"})
_PRODUCTS = frozenset({"dot_general"})
_MAX_STEPS = 10
"""Operations by which a group grows downward."""


def is_library_reduction(program: Program, instruction: Instruction) -> bool:
    """Whether a reduction becomes a call of the library."""
    return (
        instruction.primitive in REDUCTIONS and program.nbytes[instruction.inputs[0]] >= LEAST_BYTES
        if instruction.inputs
        else False
    )


def with_library_calls(program: Program) -> Program:
    """The program with each group as one instruction, called "library"."""
    grower = _Grower(program, program.makers(), program.readers(), set(program.outputs))
    calls: dict[int, Instruction] = {}
    for i, instruction in enumerate(program.instructions):
        if i in grower.taken or not is_library_reduction(program, instruction):
            continue
        group = grower.grow(i)
        if len(group) > 1:
            grower.taken |= group
            calls[max(group)] = _as_call(program, group, grower.outside(group))
    kept = [
        calls.get(i, instruction)
        for i, instruction in enumerate(program.instructions)
        if i in calls or i not in grower.taken
    ]
    return program.with_instructions(kept)


def _as_call(program: Program, group: set[int], outputs: list[int]) -> Instruction:
    members = [program.instructions[i] for i in sorted(group)]
    made = {v for m in members for v in m.outputs}
    reads = list(dict.fromkeys(v for m in members for v in m.inputs if v not in made))
    return Instruction(
        primitive="library",
        inputs=tuple(reads),
        outputs=tuple(outputs),
        kind=_kind_of_call(members, reads),
        source=members[-1].source,
    )


def _kind_of_call(members: list[Instruction], reads: list[int]) -> Hashable:
    """What the members do, and how they are wired: values are numbered as they appear."""
    if any(m.kind is None for m in members):
        return None
    number = {v: n for n, v in enumerate([*reads, *(v for m in members for v in m.outputs)])}
    return tuple((m.kind, tuple(number[v] for v in m.inputs)) for m in members)


@dataclass
class _Grower:
    """Grows groups of instructions; `taken` are those that have one."""

    program: Program
    makers: list[int]
    readers: list[list[int]]
    outputs: set[int]
    taken: set[int] = field(default_factory=set[int])

    def grow(self, seed: int) -> set[int]:
        """The largest group found around a reduction of which one array comes out."""
        least = self.program.nbytes[self.program.instructions[seed].inputs[0]]
        group = {seed}
        self._upward(group, seed, least)
        best = set(group) if len(self.outside(group)) == 1 else {seed}
        for _ in range(_MAX_STEPS):
            step = min(self._below(group), default=None)
            if step is None:
                break
            group.add(step)
            self._upward(group, seed, least)
            out = self.outside(group)
            if len(out) == 1 and self.program.nbytes[out[0]] >= least:
                best = set(group)
        return best

    def outside(self, group: set[int]) -> list[int]:
        """The values that a group makes and others read."""
        return [
            v
            for i in sorted(group)
            for v in self.program.instructions[i].outputs
            if v in self.outputs or any(r not in group for r in self.readers[v])
        ]

    def _upward(self, group: set[int], seed: int, least: int) -> None:
        """Add makers of operands that only the group reads."""
        waiting = list(group)
        while waiting:
            i = waiting.pop()
            for v in self.program.instructions[i].inputs:
                maker = self.makers[v]
                if maker in group or not self._goes_up(maker, i == seed, least):
                    continue
                if v not in self.outputs and all(r in group for r in self.readers[v]):
                    group.add(maker)
                    # Its operands, and those that waited for it to be in.
                    waiting = list(group)

    def _goes_up(self, maker: int, at_seed: bool, least: int) -> bool:
        if maker < 0 or maker in self.taken:
            return False
        made = self.program.instructions[maker]
        if made.primitive in _PRODUCTS:
            return not at_seed
        scalar = made.literals and made.primitive not in _POWERS
        return made.primitive in _ARITHMETIC and not scalar and self.program.nbytes[made.outputs[0]] >= least

    def _below(self, group: set[int]) -> list[int]:
        """Instructions that read what the group makes, or the matrix product that it reads, and may join it."""
        read = [v for i in group for v in self.program.instructions[i].outputs]
        found = [r for v in read for r in self.readers[v] if self._goes_down(r)]
        products = [
            v
            for i in group
            for v in self.program.instructions[i].inputs
            if self.makers[v] >= 0 and self.program.instructions[self.makers[v]].primitive in _PRODUCTS
        ]
        found += [r for v in products for r in self.readers[v] if self._is_arithmetic(r)]
        return [i for i in found if i not in group and i not in self.taken]

    def _goes_down(self, i: int) -> bool:
        return self.program.instructions[i].primitive == "broadcast_in_dim" or self._is_arithmetic(i)

    def _is_arithmetic(self, i: int) -> bool:
        instruction = self.program.instructions[i]
        return instruction.primitive in _ARITHMETIC and not instruction.literals
