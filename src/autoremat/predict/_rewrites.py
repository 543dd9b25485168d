"""What compilers do to a program before they fuse it: functions of a program that return a program. No JAX here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoremat.predict._program import STACK, Instruction, Program, without_dead_code

_COUNTER_BYTES = 4
_SLICING = frozenset({"dynamic_slice", "dynamic_update_slice"})


def without_barriers(program: Program) -> Program:
    """Let readers of a barrier's outputs read its inputs."""
    same: dict[int, int] = {}
    kept: list[Instruction] = []
    for instruction in program.instructions:
        instruction = instruction.reading(same)
        if instruction.is_barrier:
            same.update(zip(instruction.outputs, instruction.inputs, strict=True))
        else:
            kept.append(instruction)
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, instructions=tuple(kept), outputs=outputs)


def with_copied_slices(program: Program) -> Program:
    """Let what reads a slice of a stack read a copy of it."""
    values = Values.of(program)
    copies = {v: values.like(v) for v in program.slices}
    made = [
        Instruction(primitive="dynamic_slice", inputs=(v,), outputs=(copy,)) for v, copy in copies.items()
    ]
    kept = [e.reading(copies) for e in program.instructions]
    return without_dead_code(values.program(program, (*made, *kept), program.outputs))


def with_copies_into_loops(program: Program) -> Program:
    """Let loops start from copies of what others read after them and of inputs that may not be written over, and read copies of what is a transposed
    part of something: a transpose alone is one already."""
    values, makers = Values.of(program), program.makers()
    last = {v: i for i, e in enumerate(program.instructions) for v in e.inputs} | {
        v: len(program.instructions) for v in program.outputs
    }
    kept: list[Instruction] = []
    for i, instruction in enumerate(program.instructions):
        shared = {v for v in instruction.initial if last[v] > i or (makers[v] < 0 and v not in program.state)}
        parts = {
            v for v in instruction.inputs if instruction.inner and _is_transposed_part(program, makers, v)
        }
        copies = {
            v: values.like(v) for v in dict.fromkeys(map(int, instruction.inputs)) if v in shared | parts
        }
        kept += [
            Instruction(primitive="copy_into_loop", inputs=(v,), outputs=(copy,), source=instruction.source)
            for v, copy in copies.items()
        ]
        kept.append(instruction.reading(copies))
    return values.program(program, kept, program.outputs)


def _is_transposed_part(program: Program, makers: Sequence[int], value: int) -> bool:
    maker = makers[value]
    if maker < 0 or program.instructions[maker].primitive != "transpose":
        return False
    made_by = [makers[v] for v in program.instructions[maker].inputs]
    return any(i >= 0 and program.instructions[i].primitive == "slice" for i in made_by)


def with_written_slices(program: Program) -> Program:
    """Let what an iteration of a loop writes into stacks be written there at once."""
    values = Values.of(program)
    written = [
        Instruction(primitive="dynamic_update_slice", inputs=(v,), outputs=(values.like(v, program.trips),))
        for v in program.stacked
    ]
    carried = program.outputs[: len(program.outputs) - len(program.stacked)]
    stacks = tuple(v for e in written for v in e.outputs)
    found = values.program(program, (*program.instructions, *written), (*carried, *stacks))
    return replace(found, stacked=())


def with_counter(program: Program) -> Program:
    """Let what the rewrites above make to read or write slices of stacks read which iteration it is. Slices of the user's have a source."""
    values = Values.of(program)
    now, then = values.new(_COUNTER_BYTES, 0), values.new(_COUNTER_BYTES, 0)
    counted = [
        replace(e, inputs=(*e.inputs, now)) if e.primitive in _SLICING and not e.source else e
        for e in program.instructions
    ]
    instructions = (
        Instruction(primitive="loop_counter", inputs=(), outputs=(now,)),
        *counted,
        Instruction(primitive="next_iteration", inputs=(now,), outputs=(then,)),
    )
    return values.program(program, instructions, (then, *program.outputs))


def with_spread_groups(program: Program) -> Program:
    """Let the derivatives of depthwise convolutions in their kernels be picked from those of full ones: between all channels and all channels."""
    values = Values.of(program)
    kept: list[Instruction] = []
    for instruction in program.instructions:
        if instruction.spread == 1:
            kept.append(instruction)
            continue
        (out,), source = instruction.outputs, instruction.source
        full, picked = (values.like(out, instruction.spread) for _ in range(2))
        kept += [
            replace(instruction, outputs=(full,), spread=1),
            Instruction(primitive="transpose", inputs=(full,), outputs=(picked,), source=source),
            Instruction(primitive="reduce_sum", inputs=(picked,), outputs=(out,), source=source),
        ]
    return values.program(program, kept, program.outputs)


def without_stacks(program: Program) -> Program:
    """Let the stacks that loops fill begin with the loops."""
    stacks = {v for e in program.instructions if e.primitive == STACK for v in e.outputs}
    kept = [
        replace(
            e,
            inputs=tuple(v for v in e.inputs if v not in stacks),
            initial=tuple(v for v in e.initial if v not in stacks),
        )
        for e in program.instructions
        if e.primitive != STACK
    ]
    return program.with_instructions(kept)


@dataclass
class Values:
    """The values of a program, and new ones."""

    nbytes: list[int]
    rank: list[int]

    @classmethod
    def of(cls, program: Program) -> Values:
        return cls(list(program.nbytes), list(program.rank))

    def new(self, nbytes: int, rank: int) -> int:
        """A value of this size."""
        self.nbytes.append(nbytes)
        self.rank.append(rank)
        return len(self.nbytes) - 1

    def like(self, value: int, times: int = 1) -> int:
        """A value so many times as large as another."""
        return self.new(self.nbytes[value] * times, self.rank[value])

    def program(
        self, program: Program, instructions: Sequence[Instruction], outputs: Sequence[int]
    ) -> Program:
        """The program with these values, instructions and outputs."""
        return replace(
            program,
            nbytes=tuple(self.nbytes),
            rank=tuple(self.rank),
            instructions=tuple(instructions),
            outputs=tuple(outputs),
        )
