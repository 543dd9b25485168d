"""Which values of a program become arrays in memory, and which kernels make them. No JAX here.

The rules are those of XLA's instruction fusion:

- An elementwise or indexing operation is computed inside each of its readers, if all of them are such operations themselves.
- If only some are, and it reads at most one array of its own size, those still compute it themselves; the others read it from memory.
- What is costly to compute (an exponential, a division by a root) is never computed twice.
- XLA for CPUs writes the code of an operation at most fifteen times into one kernel; a padded or concatenated array once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoremat.cost import _names
from autoremat.predict._compiler import Compiler
from autoremat.predict._library import is_library_reduction, with_library_calls
from autoremat.predict._program import RECIPROCAL, Instruction, Program, View, post_order
from autoremat.predict._rewrites import (
    with_copied_slices,
    with_copies_into_loops,
    with_counter,
    with_spread_groups,
    with_written_slices,
    without_barriers,
    without_stacks,
)

ELEMENTWISE = frozenset(
    {*_names.ARITHMETIC, *_names.COMPARISON, *_names.TRANSCENDENTAL, "integer_pow", "copy"}
)
LAYOUT_COPY = "layout_copy"
"""An operand written anew, as the kernel of a convolution or of a matrix product needs it."""

JOIN = "join_alone"
"""A concatenation for which XLA for CPUs has a kernel of its own."""

_INDEXING = frozenset(
    {
        "broadcast_in_dim",
        "slice",
        "rev",
        "pad",
        "dynamic_slice",
        "transpose",
        "concatenate",
        "gather",
        LAYOUT_COPY,
    }
    | set(_names.CONSTANT)
)
_CONSTANTS = frozenset({"broadcast_in_dim", *_names.CONSTANT})
FUSIBLE = ELEMENTWISE | _INDEXING
_ALSO_TAKE = frozenset({"dynamic_update_slice", *_names.REDUCTION})
_COSTLY = frozenset({*_names.TRANSCENDENTAL, *_names.SPECIAL, "cbrt", "rem", "rsqrt", "sqrt"})
_DIVISIONS = frozenset({"div", RECIPROCAL})
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SMALL = 8
"""An operand of less than one part in so many of the result counts as none."""


def kernels(program: Program, compiler: Compiler) -> Program:
    """A program without dead code as the kernels that a compiler makes of it: each instruction reads and writes arrays in memory."""
    program = _rewritten(program, compiler)
    program = _products_as_they_are_wanted(program)
    if compiler.library_reductions:
        program = with_library_calls(program)
    return _Fusion.of(program, compiler).run()


def _rewritten(program: Program, compiler: Compiler) -> Program:
    if not compiler.keeps_barriers:
        program = without_barriers(program)
    if not compiler.shares_stacks:
        program = without_stacks(program)
    if compiler.writes_slices:
        program = with_written_slices(program)
    if compiler.copies_slices:
        program = with_copied_slices(program)
    if compiler.copies_into_loops:
        program = with_copies_into_loops(program)
    if compiler.counts_trips and program.trips:
        program = with_counter(program)
    return with_spread_groups(program) if compiler.spreads_groups else program


def _products_as_they_are_wanted(program: Program) -> Program:
    """Matrix products of which only the transpose is read: the compiler multiplies the other way round."""
    readers, makers = program.readers(), program.makers()
    outputs = set(program.outputs)
    replaced: dict[int, Instruction] = {}
    gone: set[int] = set()
    for i, instruction in enumerate(program.instructions):
        if instruction.primitive != "transpose" or program.rank[instruction.outputs[0]] != 2:
            continue
        operand = instruction.inputs[0]
        product = makers[operand]
        alone = len(readers[operand]) == 1 and operand not in outputs
        if product >= 0 and alone and program.instructions[product].primitive == "dot_general":
            replaced[product] = replace(program.instructions[product], outputs=instruction.outputs)
            gone.add(i)
    kept = [replaced.get(i, e) for i, e in enumerate(program.instructions) if i not in gone]
    return program.with_instructions(kept)


@dataclass
class _Fusion:
    """Decides for each value: `inlined` in all its readers, `copied` into those that can, or an array in memory. `computed`: both."""

    program: Program
    compiler: Compiler
    makers: list[int]
    readers: list[list[int]]
    outputs: set[int]
    inlined: set[int] = field(default_factory=set[int])
    copied: set[int] = field(default_factory=set[int])
    computed: set[int] = field(default_factory=set[int])
    users: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, program: Program, compiler: Compiler) -> _Fusion:
        fusion = cls(program, compiler, program.makers(), program.readers(), set(program.outputs))
        fusion._decide()
        fusion.computed = fusion.inlined | fusion.copied
        fusion.users = [len(r) + (v in fusion.outputs) for v, r in enumerate(fusion.readers)]
        return fusion

    def run(self) -> Program:
        """The kernels, made from the last to the first: what they read is made by others."""
        position = self._position()
        made: list[_Kernel] = []
        for i in reversed(range(len(self.program.instructions))):
            if self._in_memory(i):
                made.append(self._kernel(i, position))
        made.reverse()
        found = self.program.with_instructions([self._instruction(kernel) for kernel in made])
        return found if self.compiler.keeps_barriers else merged(found, _Expressions(self, made))

    def _decide(self) -> None:
        """From the last instruction to the first, so that of what a value is read by all is decided."""
        widest = [0.0] * len(self.program.nbytes)
        for instruction in reversed(self.program.instructions):
            for v in instruction.outputs:
                widest[v] = max((self._width(i, widest) for i in self.readers[v]), default=0.0)
            if not self._is_fusible(instruction.primitive) or len(instruction.outputs) != 1:
                continue
            value = instruction.outputs[0]
            readers = self.readers[value]
            inside = value not in self.outputs and all(map(self._takes, readers))
            again = value not in self.outputs and all(
                self._takes(i) or self._views(i, value) for i in readers
            )
            if self._is_costly(instruction):
                if inside and len(readers) == 1 and widest[value] <= self.program.nbytes[value]:
                    self.inlined.add(value)
            elif inside:
                self.inlined.add(value)
            elif again or self._reads_one_array(instruction):
                self.copied.add(value)

    def _width(self, i: int, widest: Sequence[float]) -> float:
        """The bytes of the largest array for whose elements a reader, or what computes its result inside, wants what it reads; any number of
        elements of a broadcast."""
        reader = self.program.instructions[i]
        if reader.primitive == "broadcast_in_dim":
            return math.inf
        if not self.compiler.divides_once or len(reader.outputs) != 1 or reader.primitive not in FUSIBLE:
            return 0.0
        (out,) = reader.outputs
        return max(self.program.nbytes[out], widest[out] if out in self.inlined else 0.0)

    def _takes(self, i: int) -> bool:
        """Whether an instruction can compute an operand itself."""
        instruction = self.program.instructions[i]
        if self.compiler.library_reductions and is_library_reduction(self.program, instruction):
            return False
        if self.compiler.products_take_operands and instruction.primitive in _PRODUCTS:
            return True
        return self._is_fusible(instruction.primitive) or instruction.primitive in _ALSO_TAKE

    def _views(self, i: int, value: int) -> bool:
        """Whether an instruction reads a value as a view of it only."""
        reads = [v for v in self.program.instructions[i].inputs if v == value]
        return self.compiler.fuses_views and all(isinstance(v, View) for v in reads)

    def _is_fusible(self, primitive: str) -> bool:
        return primitive in FUSIBLE or (primitive == JOIN and not self.compiler.joins_apart)

    def _is_costly(self, instruction: Instruction) -> bool:
        return instruction.primitive in _COSTLY or (
            self.compiler.divides_once and instruction.primitive in _DIVISIONS
        )

    def _reads_one_array(self, instruction: Instruction) -> bool:
        value = instruction.outputs[0]
        rank, nbytes = self.program.rank[value], self.program.nbytes[value]
        arrays = [v for v in instruction.inputs if self.program.rank[v] >= rank]
        arrays = [v for v in arrays if _SMALL * self.program.nbytes[v] >= nbytes and not self._is_constant(v)]
        return len(arrays) <= 1

    def _is_constant(self, value: int) -> bool:
        maker = self.makers[value]
        return maker >= 0 and self.program.instructions[maker].primitive in _CONSTANTS

    def _in_memory(self, i: int) -> bool:
        """Whether an instruction is a kernel of its own, once all kernels after it are made."""
        outputs = self.program.instructions[i].outputs
        return len(outputs) != 1 or outputs[0] not in self.computed or self.users[outputs[0]] > 0

    def _position(self) -> list[int]:
        """For each value, when a depth-first walk from the outputs leaves the instruction that makes it."""
        operands = [
            [self.makers[v] for v in instruction.inputs if self.makers[v] >= 0]
            for instruction in self.program.instructions
        ]
        roots = [self.makers[v] for v in self.program.outputs if self.makers[v] >= 0]
        position = [-1] * len(self.program.nbytes)
        for n, i in enumerate(post_order([*roots, *range(len(operands))], operands)):
            for v in self.program.instructions[i].outputs:
                position[v] = n
        return position

    def _kernel(self, i: int, position: Sequence[int]) -> _Kernel:
        """An instruction with all that it computes itself. Operands come in the order in which the compiler makes them parameters:
        again and again, the operand that was made last gives way to its own operands, at the end."""
        allowed = self.computed if self._takes(i) else self.inlined
        through = self.compiler.fuses_views and self._takes(i)
        kernel = _Kernel(self.program, self.makers, i)
        refused: set[int] = set()
        while found := [
            v
            for v in kernel.reads
            if (v in allowed and v not in refused) or (through and isinstance(v, View))
        ]:
            last = max(found, key=lambda v: (position[v], isinstance(v, View)))
            if through and isinstance(last, View):
                kernel.look_through(last)
            elif self.compiler.limits_duplication and kernel.repeats_too_much(last, self.users[last]):
                refused.add(last)
            else:
                self._hand_over(last, kernel.absorb(last))
        return kernel

    def _hand_over(self, value: int, times: int) -> None:
        """Count the users of a value, and of what it is made of, once so many of its readers compute it themselves."""
        self.users[value] -= times
        if self.users[value] > 0:
            for v in set(self.program.instructions[self.makers[value]].inputs):
                self.users[v] += 1

    def _instruction(self, kernel: _Kernel) -> Instruction:
        literals = any(self.program.instructions[i].literals for i in kernel.members)
        return replace(self.program.instructions[kernel.root], inputs=tuple(kernel.reads), literals=literals)


_OFTEN = 15
"""So often at most the code of one operation stands in one kernel of XLA."""

_NEVER_TWICE = frozenset({"pad", "concatenate", "dynamic_update_slice", *_names.REDUCTION})
"""What opens a block of code of its own: where it is read at two places, it is an array."""


class _Kernel:
    """An instruction, and what it computes itself.

    How often the code of a member would stand in it is counted as XLA does: an operation is written once for each index that it is
    wanted at, and all but elementwise operations and transposes ask for their operands at another index than their own.
    """

    def __init__(self, program: Program, makers: Sequence[int], root: int) -> None:
        self.program, self.makers, self.root = program, makers, root
        self.reads: list[int] = []
        self.members: dict[int, int] = {root: 1}
        self._wanted_by: dict[int, set[int]] = {}
        self._readers: Counter[int] = Counter()
        self._read(root, {-1})

    def repeats_too_much(self, value: int, users: int) -> bool:
        """Whether the compiler would rather read a value from memory; `users` are the places that read it, in all kernels. It asks only once
        the kernel has two members."""
        primitive = self.program.instructions[self.makers[value]].primitive
        if len(self.members) == 1 or primitive == "broadcast_in_dim":
            return False
        often = self._times(value)
        return often > _OFTEN or (primitive in _NEVER_TWICE and (often > 1 or users > 1))

    def absorb(self, value: int) -> int:
        """Compute a value inside; by how many members it is read."""
        maker = self.makers[value]
        self.members[maker] = self._times(value)
        self.reads = [v for v in self.reads if v != value]
        self._read(maker, self._wanted_by[value])
        return self._readers[value]

    def look_through(self, view: View) -> None:
        """Read a value itself instead of a view of it."""
        self.reads = [v for v in self.reads if v != view or not isinstance(v, View)]
        self._add(int(view))

    def _add(self, value: int) -> None:
        kind = isinstance(value, View)
        if not any(v == value and isinstance(v, View) == kind for v in self.reads):
            self.reads.append(value)

    def _times(self, value: int) -> int:
        return sum(self.members.get(i, 1) for i in self._wanted_by[value])

    def _read(self, i: int, wanted_by: set[int]) -> None:
        instruction = self.program.instructions[i]
        same = instruction.primitive in ELEMENTWISE or instruction.primitive == "transpose"
        self._readers.update(set(instruction.inputs))
        for v in instruction.inputs:
            self._wanted_by.setdefault(v, set()).update(wanted_by if same else {i})
            self._add(v)


@dataclass
class _Expressions:
    """What each kernel computes, as a number that is equal for equal expressions of the arrays that it reads."""

    fusion: _Fusion
    made: list[_Kernel]
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    same: dict[int, int] = field(default_factory=dict[int, int])

    def of(self, kernel: int) -> int:
        """The expression of a kernel, by number among the kernels."""
        made = self.made[kernel]
        known: dict[int, int] = {}
        for i in sorted(made.members):
            number = self._number(i, known)
            known.update((v, number) for v in self.fusion.program.instructions[i].outputs if i != made.root)
        return self.numbers.setdefault((number, self._seen_only(made.root)), len(self.numbers))

    def _number(self, i: int, known: Mapping[int, int]) -> int:
        """The number of an instruction, whose operands are members with `known` numbers or arrays."""
        instruction = self.fusion.program.instructions[i]
        parts = tuple(
            ("inside", known[v]) if v in known else ("array", self.same.get(v, v)) for v in instruction.inputs
        )
        kind = ("alone", i) if instruction.kind is None else instruction.kind
        return self.numbers.setdefault((kind, parts), len(self.numbers))

    def _seen_only(self, i: int) -> bool:
        """Whether all that reads a result reads it in another shape: the kernel writes it in that one."""
        (out, *others) = self.fusion.program.instructions[i].outputs
        reads = [
            v
            for j in self.fusion.readers[out]
            for v in self.fusion.program.instructions[j].inputs
            if v == out
        ]
        return not others and bool(reads) and all(isinstance(v, View) for v in reads)


def merged(program: Program, expressions: _Expressions) -> Program:
    """Kernels that compute the same from the same arrays are one. So a compiler undoes recomputation that nothing guards."""
    first: dict[int, Instruction] = {}
    kept: list[Instruction] = []
    same = expressions.same
    for number, kernel in enumerate(program.instructions):
        earlier = first.setdefault(expressions.of(number), kernel)
        if earlier is kernel:
            kept.append(kernel.reading(same))
        else:
            same.update(zip(kernel.outputs, earlier.outputs, strict=True))
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, instructions=tuple(kept), outputs=outputs)
