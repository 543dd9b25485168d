"""Groups of operations that XLA for CPUs hands to a library as one call. No JAX here.

A group grows around a reduction: up through products of which nothing else needs the result, to the matrix product behind them, and
down through the arithmetic that reads it, as long as one array comes out. So a softmax is one call (maximum, difference, exponential), and
its derivative another, with the matrix product before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autoremat.predict._program import RECIPROCAL, Instruction, Program, View
from autoremat.predict._rewrites import Values

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
LEAST_BYTES = 4096
"""Smaller operands are reduced in place."""

_ARITHMETIC = frozenset(
    {"mul", "add", "add_any", "sub", "div", "neg", "max", "exp", "square", "integer_pow", RECIPROCAL}
)
_POWERS = frozenset({"square", "integer_pow", RECIPROCAL})
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
    reciprocals = Counter(
        program.nbytes[e.outputs[0]] for e in program.instructions if e.primitive == RECIPROCAL
    )
    grower = _Grower(program, program.makers(), program.readers(), set(program.outputs), reciprocals)
    calls: dict[int, list[Instruction]] = {}
    values = Values.of(program)
    for i, instruction in enumerate(program.instructions):
        if i in grower.taken or not is_library_reduction(program, instruction):
            continue
        group = grower.grow(i)
        if len(group) > 1:
            grower.taken |= group.keys()
            spread = _spread(program, grower.readers, group)
            arrays = {v: values.new(nbytes, program.rank[v]) for v, nbytes in spread.items()}
            made = [
                Instruction(primitive="broadcast_in_dim", inputs=(View(v),), outputs=(array,))
                for v, array in arrays.items()
            ]
            call = _as_call(program, group, grower.outside(group))
            calls[max(group)] = [*made, call.reading(arrays)]
    kept: list[Instruction] = []
    for i, instruction in enumerate(program.instructions):
        if i in calls or i not in grower.taken:
            kept += calls.get(i, [instruction])
    return values.program(program, kept, program.outputs)


Group = dict[int, None]
"""Instructions, in the order in which they joined."""


def _as_call(program: Program, group: Group, outputs: list[int]) -> Instruction:
    members = [program.instructions[i] for i in sorted(group)]
    reads = _reads(program, group)
    return Instruction(
        primitive="library",
        inputs=tuple(reads),
        outputs=tuple(outputs),
        kind=_kind_of_call(members, reads),
        source=members[-1].source,
    )


def _spread(program: Program, readers: list[list[int]], group: Group) -> dict[int, int]:
    """What a group reads broadcast and others do too, and the bytes of the array: it has to be in memory."""
    found: dict[int, int] = {}
    for i in group:
        (nbytes,) = (program.nbytes[v] for v in program.instructions[i].outputs)
        for v in program.instructions[i].inputs:
            if not isinstance(v, View) or program.nbytes[v] >= nbytes:
                continue
            others = [j for j in readers[v] if j not in group and v in _broadcast(program, j, nbytes)]
            if others:
                found[int(v)] = nbytes
    return found


def _broadcast(program: Program, i: int, nbytes: int) -> set[int]:
    """What an instruction reads broadcast to so many bytes."""
    reader = program.instructions[i]
    if program.nbytes[reader.outputs[0]] != nbytes:
        return set()
    return {v for v in reader.inputs if isinstance(v, View) and program.nbytes[v] < nbytes}


def _reads(program: Program, group: Group) -> list[int]:
    """What a group reads: an operand gives way to its own operands, at the end, as its maker joins. A product at the end takes all others in."""
    reads: list[int] = []
    made: set[int] = set()
    order = list(group)
    if len(order) > 1 and program.instructions[order[-1]].primitive in _PRODUCTS and order[-1] == max(order):
        order.sort(reverse=True)
    for i in order:
        member = program.instructions[i]
        made.update(member.outputs)
        reads = [v for v in reads if v not in made]
        reads += [v for v in dict.fromkeys(map(int, member.inputs)) if v not in made and v not in reads]
    return reads


def _kind_of_call(members: list[Instruction], reads: list[int]) -> Hashable:
    """What the members do, and how they are wired: values are numbered as they appear."""
    if any(m.kind is None for m in members):
        return None
    number = {v: n for n, v in enumerate([*reads, *(v for m in members for v in m.outputs)])}
    return tuple((m.kind, tuple(number[v] for v in m.inputs)) for m in members)


@dataclass
class _Grower:
    """Grows groups of instructions; `taken` are those that have one, `reciprocals` how many there are of each size."""

    program: Program
    makers: list[int]
    readers: list[list[int]]
    outputs: set[int]
    reciprocals: Mapping[int, int]
    taken: set[int] = field(default_factory=set[int])

    def grow(self, seed: int) -> Group:
        """The largest group found around a reduction of which one array comes out."""
        least = self.program.nbytes[self.program.instructions[seed].inputs[0]]
        group: Group = {seed: None}
        self._upward(group, seed, least)
        best = dict(group) if len(self.outside(group)) == 1 else {seed: None}
        for _ in range(_MAX_STEPS):
            step = min(self._below(group), default=None)
            if step is None:
                break
            group[step] = None
            self._upward(group, seed, least)
            out = self.outside(group)
            last = self.program.instructions[self.makers[out[0]]].primitive
            if len(out) == 1 and (self.program.nbytes[out[0]] >= least or last in _PRODUCTS):
                best = dict(group)
        return best

    def outside(self, group: Group) -> list[int]:
        """The values that a group makes and others read."""
        return [
            v
            for i in sorted(group)
            for v in self.program.instructions[i].outputs
            if v in self.outputs or any(r not in group for r in self.readers[v])
        ]

    def _upward(self, group: Group, seed: int, least: int) -> None:
        """Add makers of operands that only the group reads."""
        waiting = list(group)
        while waiting:
            i = waiting.pop()
            for v in self.program.instructions[i].inputs:
                maker = self.makers[v]
                if maker in group or not self._goes_up(maker, i == seed, least):
                    continue
                if v not in self.outputs and all(r in group for r in self.readers[v]):
                    group[maker] = None
                    # Its operands, and those that waited for it to be in.
                    waiting = list(group)

    def _goes_up(self, maker: int, at_seed: bool, least: int) -> bool:
        if maker < 0 or maker in self.taken:
            return False
        made = self.program.instructions[maker]
        if made.primitive in _PRODUCTS:
            return not at_seed
        scalar = made.literals and made.primitive not in _POWERS
        large = made.primitive in _POWERS or self.program.nbytes[made.outputs[0]] >= least
        return made.primitive in _ARITHMETIC and not scalar and large and self._has_ones(made)

    def _below(self, group: Group) -> list[int]:
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
        primitive = self.program.instructions[i].primitive
        joins = primitive == "broadcast_in_dim" or primitive in _PRODUCTS or primitive in REDUCTIONS
        return joins or self._is_arithmetic(i)

    def _is_arithmetic(self, i: int) -> bool:
        instruction = self.program.instructions[i]
        arithmetic = instruction.primitive in _ARITHMETIC and not instruction.literals
        return arithmetic and self._has_ones(instruction)

    def _has_ones(self, instruction: Instruction) -> bool:
        """Whether what a reciprocal divides is an array: ones, where several want them. A constant for one reader is no operand of a call."""
        if instruction.primitive != RECIPROCAL:
            return True
        return self.reciprocals[self.program.nbytes[instruction.outputs[0]]] > 1
