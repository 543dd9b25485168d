"""A program as a compiler sees it: one flat list of instructions on values. No JAX here.

    Program = inputs, instructions in program order, outputs
    Instruction = primitive, inputs -> outputs      values are dense integers

Calls are inlined; what runs in a loop or a branch is a program inside. A view of a value is that value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

BARRIER = "optimization_barrier"
"""Its outputs are its inputs, in the same order and in the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One operation.

    `literals` says that some operands are scalars that stand in the program. `inner` are the programs that it runs: the body of a
    loop, the branches of a condition. `workspace` are bytes that it needs beside operands and results. `kind` is equal for operations
    that do the same to their inputs; `None` if it is equal to no other. `source` is where the user's program made it.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: bool = False
    inner: tuple[Program, ...] = ()
    workspace: int = 0
    kind: Hashable = None
    source: str = ""

    @property
    def is_barrier(self) -> bool:
        """Whether it only orders what comes before it and after it."""
        return self.primitive == BARRIER


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions on values of `nbytes[v]` bytes and `rank[v]` dimensions. `slices` are the inputs that an iteration of a loop reads of
    stacks."""

    nbytes: tuple[int, ...]
    rank: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slices: tuple[int, ...] = ()

    def makers(self) -> list[int]:
        """For each value the instruction that makes it; -1 for an input."""
        found = [-1] * len(self.nbytes)
        for i, instruction in enumerate(self.instructions):
            for v in instruction.outputs:
                found[v] = i
        return found

    def readers(self) -> list[list[int]]:
        """For each value the instructions that read it, in program order, each once."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for i, instruction in enumerate(self.instructions):
            for v in set(instruction.inputs):
                found[v].append(i)
        return found

    def with_instructions(self, instructions: Sequence[Instruction]) -> Program:
        """The same values under other instructions."""
        return replace(self, instructions=tuple(instructions))


def without_dead_code(program: Program) -> Program:
    """Drop what no output needs, and of barriers the pairs that nothing reads."""
    wanted = set(program.outputs)
    kept: list[Instruction] = []
    for instruction in reversed(program.instructions):
        if instruction.is_barrier:
            instruction = _trimmed(instruction, wanted)
        if any(v in wanted for v in instruction.outputs):
            kept.append(instruction)
            wanted.update(instruction.inputs)
    return program.with_instructions(kept[::-1])


def _trimmed(barrier: Instruction, wanted: set[int]) -> Instruction:
    pairs = [p for p in zip(barrier.inputs, barrier.outputs, strict=True) if p[1] in wanted]
    return replace(barrier, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))


def without_barriers(program: Program) -> Program:
    """Let readers of a barrier's outputs read its inputs."""
    same: dict[int, int] = {}
    kept: list[Instruction] = []
    for instruction in program.instructions:
        inputs = tuple(same.get(v, v) for v in instruction.inputs)
        if instruction.is_barrier:
            same.update(zip(instruction.outputs, inputs, strict=True))
        else:
            kept.append(replace(instruction, inputs=inputs))
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, instructions=tuple(kept), outputs=outputs)


def with_copied_slices(program: Program) -> Program:
    """Let what reads a slice of a stack read a copy of it."""
    nbytes, rank = list(program.nbytes), list(program.rank)
    copies: dict[int, int] = {}
    for v in program.slices:
        copies[v] = len(nbytes)
        nbytes.append(program.nbytes[v])
        rank.append(program.rank[v])
    made = [
        Instruction(primitive="dynamic_slice", inputs=(v,), outputs=(copy,)) for v, copy in copies.items()
    ]
    kept = [replace(e, inputs=tuple(copies.get(v, v) for v in e.inputs)) for e in program.instructions]
    found = replace(program, nbytes=tuple(nbytes), rank=tuple(rank), instructions=(*made, *kept))
    return without_dead_code(found)


def post_order(roots: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """Nodes in the order in which a depth-first walk leaves them; `operands[n]` in the order in which it visits them."""
    seen: set[int] = set()
    order: list[int] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(operands[root]))]
        while stack:
            node, rest = stack[-1]
            for child in rest:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(operands[child])))
                    break
            else:
                order.append(node)
                stack.pop()
    return order
