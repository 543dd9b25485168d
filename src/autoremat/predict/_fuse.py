"""Which values of a program become arrays in memory, and which kernels make them. No JAX here.

The rules are those of XLA's instruction fusion:

- An elementwise or indexing operation is computed inside each of its readers, if all of them are such operations themselves.
- If only some are, and it reads at most one array of its own size, those still compute it themselves; the others read it from memory.
- What is costly to compute (an exponential, a division by a root) is never computed twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autoremat.cost import _names
from autoremat.predict._compiler import Compiler
from autoremat.predict._library import is_library_reduction, with_library_calls
from autoremat.predict._program import (
    Instruction,
    Program,
    post_order,
    with_copied_slices,
    without_barriers,
)

ELEMENTWISE = frozenset(
    {*_names.ARITHMETIC, *_names.COMPARISON, *_names.TRANSCENDENTAL, "integer_pow", "copy"}
)
LAYOUT_COPY = "layout_copy"
"""An operand written anew, as the kernel of a convolution or of a matrix product needs it."""

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
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SMALL = 8
"""An operand of less than one part in so many of the result counts as none."""


def kernels(program: Program, compiler: Compiler) -> Program:
    """A program without dead code as the kernels that a compiler makes of it: each instruction reads and writes arrays in memory."""
    if not compiler.keeps_barriers:
        program = without_barriers(program)
    if compiler.copies_slices:
        program = with_copied_slices(program)
    program = _products_as_they_are_wanted(program)
    if compiler.library_reductions:
        program = with_library_calls(program)
    return _Fusion.of(program, compiler).run()


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

    @classmethod
    def of(cls, program: Program, compiler: Compiler) -> _Fusion:
        fusion = cls(program, compiler, program.makers(), program.readers(), set(program.outputs))
        fusion._decide()
        fusion.computed = fusion.inlined | fusion.copied
        return fusion

    def inside(self, i: int) -> set[int]:
        """What an instruction computes itself, if it reads it."""
        return self.computed if self._takes(i) else self.inlined

    def run(self) -> Program:
        """The kernels."""
        position = self._position()
        made = [i for i in range(len(self.program.instructions)) if self._in_memory(i)]
        found = self.program.with_instructions([self._kernel(i, position) for i in made])
        return found if self.compiler.keeps_barriers else merged(found, _Expressions(self, made))

    def _decide(self) -> None:
        for instruction in reversed(self.program.instructions):
            if instruction.primitive not in FUSIBLE or len(instruction.outputs) != 1:
                continue
            value = instruction.outputs[0]
            readers = self.readers[value]
            inside = value not in self.outputs and all(map(self._takes, readers))
            if instruction.primitive in _COSTLY:
                if inside and len(readers) == 1 and not self._repeats(readers[0]):
                    self.inlined.add(value)
            elif inside:
                self.inlined.add(value)
            elif self._reads_one_array(instruction):
                self.copied.add(value)

    def _takes(self, i: int) -> bool:
        """Whether an instruction can compute an operand itself."""
        instruction = self.program.instructions[i]
        if self.compiler.library_reductions and is_library_reduction(self.program, instruction):
            return False
        if self.compiler.products_take_operands and instruction.primitive in _PRODUCTS:
            return True
        return instruction.primitive in FUSIBLE or instruction.primitive in _ALSO_TAKE

    def _repeats(self, i: int) -> bool:
        return self.program.instructions[i].primitive == "broadcast_in_dim"

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
        """Whether an instruction is a kernel of its own."""
        outputs = self.program.instructions[i].outputs
        if len(outputs) != 1 or outputs[0] not in self.computed:
            return True
        value = outputs[0]
        if value in self.inlined:
            return False
        return value in self.outputs or not all(map(self._takes, self.readers[value]))

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

    def _kernel(self, i: int, position: Sequence[int]) -> Instruction:
        """An instruction with all that it computes itself. Operands come in the order in which the compiler makes them parameters:
        again and again, the operand that was made last gives way to its own operands, at the end."""
        instruction = self.program.instructions[i]
        inside = self.inside(i)
        reads = _unique(instruction.inputs)
        literals = instruction.literals
        while found := [v for v in reads if v in inside]:
            last = max(found, key=position.__getitem__)
            reads.remove(last)
            maker = self.program.instructions[self.makers[last]]
            literals = literals or maker.literals
            known = set(reads)
            reads += [v for v in _unique(maker.inputs) if v not in known]
        return replace(instruction, inputs=tuple(reads), literals=literals)


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))


@dataclass
class _Expressions:
    """What each kernel computes, as a number that is equal for equal expressions of the arrays that it reads."""

    fusion: _Fusion
    made: list[int]
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    same: dict[int, int] = field(default_factory=dict[int, int])

    def of(self, kernel: int) -> int:
        """The expression of a kernel, by number among the kernels."""
        i = self.made[kernel]
        return self._of(i, self.fusion.inside(i), {})

    def _of(self, i: int, inside: set[int], known: dict[int, int]) -> int:
        instruction = self.fusion.program.instructions[i]
        parts: list[tuple[str, int]] = []
        for v in instruction.inputs:
            if v not in inside:
                parts.append(("array", self.same.get(v, v)))
                continue
            if v not in known:
                known[v] = self._of(self.fusion.makers[v], inside, known)
            parts.append(("inside", known[v]))
        kind = ("alone", i) if instruction.kind is None else instruction.kind
        return self.numbers.setdefault((kind, tuple(parts)), len(self.numbers))


def merged(program: Program, expressions: _Expressions) -> Program:
    """Kernels that compute the same from the same arrays are one. So a compiler undoes recomputation that nothing guards."""
    first: dict[int, Instruction] = {}
    kept: list[Instruction] = []
    same = expressions.same
    for number, kernel in enumerate(program.instructions):
        earlier = first.setdefault(expressions.of(number), kernel)
        if earlier is kernel:
            kept.append(replace(kernel, inputs=tuple(same.get(v, v) for v in kernel.inputs)))
        else:
            same.update(zip(kernel.outputs, earlier.outputs, strict=True))
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, instructions=tuple(kept), outputs=outputs)
