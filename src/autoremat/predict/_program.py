"""A program as a compiler sees it: one flat list of instructions on values. No JAX here.

    Program = inputs, instructions in program order, outputs
    Instruction = primitive, inputs -> outputs      values are dense integers

Calls are inlined; what runs in a loop or a branch is a program inside. A view of a value is that value, marked as a `View` where it is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

BARRIER = "optimization_barrier"
"""Its outputs are its inputs, in the same order and in the same memory."""


class View(int):
    """A value that is read in another shape than it was made in."""


RECIPROCAL = "reciprocal"
"""One over a number or a power of it. Compilers multiply by that of what is broadcast rather than to divide."""

STACK = "zeros_of_stack"
"""Zeros, which the iterations of a loop replace by their results. Loops that fill stacks of the same shape start from the same zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One operation.

    `literals` says that some operands are scalars that stand in the program. `inner` are the programs that it runs: the body of a
    loop, the branches of a condition. `workspace` are bytes that it needs beside operands and results. `spread` says of the derivative of a
    depthwise convolution in its kernel among how many channels it is one. Inputs that it reads in another shape than they are made in are
    `View`s. `initial` are the inputs that the results of a loop start as. `kind` is equal for operations that do the same to their inputs;
    `None` if it is equal to no other. `source` is where the user's program made it.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: bool = False
    inner: tuple[Program, ...] = ()
    workspace: int = 0
    spread: int = 1
    initial: tuple[int, ...] = ()
    kind: Hashable = None
    source: str = ""

    def reading(self, instead: Mapping[int, int]) -> Instruction:
        """The same on other inputs."""
        inputs = tuple(_like(v, instead.get(v, v)) for v in self.inputs)
        return replace(self, inputs=inputs, initial=tuple(instead.get(v, v) for v in self.initial))

    @property
    def is_barrier(self) -> bool:
        """Whether it only orders what comes before it and after it."""
        return self.primitive == BARRIER


def _like(read: int, value: int) -> int:
    return View(value) if isinstance(read, View) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions on values of `nbytes[v]` bytes and `rank[v]` dimensions. `slices` are the inputs that an iteration of a loop reads of
    stacks, `stacked` the outputs that it writes into them; `trips` says how often it
    runs, 0 for what is no body of such a loop. `state` are the inputs of the body of a loop that it may write over."""

    nbytes: tuple[int, ...]
    rank: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slices: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    trips: int = 0
    state: tuple[int, ...] = ()

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
