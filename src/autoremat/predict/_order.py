"""The order in which XLA for CPUs runs kernels when it minimizes memory: a depth-first walk from the results. No JAX here.

Operands are visited by the number of other readers of all that leads to them, then by the bytes of it, then by name
(`DFSMemoryScheduler` in XLA). Both are sums over paths, not over kernels, and capped: the first by the number of instructions, the second by
the bytes of all kernels walked before. In deep networks nearly all are capped, so what decides is where the caps lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.predict._program import Program, post_order

_POINTER = 8  # bytes, in a tuple


def depth_first(program: Program) -> list[int]:
    """The kernels of `program` by number, in the order in which they run."""
    return _Walk.of(program).run()


@dataclass
class _Walk:
    """`extra[v]` and `total[v]`, for each value: other readers of, and bytes of, all that leads to it."""

    program: Program
    makers: list[int]
    operands: list[list[int]]
    uses: list[int]
    extra: list[int]
    total: list[int]
    names: list[str]

    @classmethod
    def of(cls, program: Program) -> _Walk:
        operands = [list(dict.fromkeys(k.inputs)) for k in program.instructions]
        uses = [0] * len(program.nbytes)
        for reads in (*operands, program.outputs):
            for v in reads:
                uses[v] += 1
        zeros = [0] * len(program.nbytes)
        walk = cls(program, program.makers(), operands, uses, zeros, list(zeros), [])
        walk._measure()
        return walk

    def run(self) -> list[int]:
        """The kernels in order."""
        visited = [
            [self.makers[v] for v in sorted(reads, key=self._rank) if self.makers[v] >= 0]
            for reads in self.operands
        ]
        made = [v for v in dict.fromkeys(self.program.outputs) if self.makers[v] >= 0]
        roots = [self.makers[v] for v in sorted(made, key=self._rank)]
        return post_order([*roots, *range(len(visited))], visited)

    def _rank(self, value: int) -> tuple[int, int, str]:
        maker = self.makers[value]
        name = "" if maker < 0 else self.names[maker]
        return -self.extra[value], -self.total[value], name

    def _measure(self) -> None:
        instructions = self.program.instructions
        before = [[self.makers[v] for v in reads if self.makers[v] >= 0] for reads in self.operands]
        roots = [self.makers[v] for v in self.program.outputs if self.makers[v] >= 0]
        # A barrier is three kinds of instructions there: a tuple, the barrier, and one for each of its results.
        barriers = sum(1 + len(k.outputs) for k in instructions if k.is_barrier)
        count = len(instructions) + len(self.program.inputs) + 1 + barriers
        if self.program.trips:
            # What is read of the state of a loop is an instruction of its own, and fans out.
            for v in self.program.inputs:
                self.extra[v] = max(0, self.uses[v] - 1)
        walked = 0
        seen: dict[str, int] = {}
        self.names = [""] * len(instructions)
        for i in post_order([*roots, *range(len(instructions))], before):
            kernel = instructions[i]
            extra = min(count, sum(self.extra[v] for v in self.operands[i]))
            total = sum(self.total[v] for v in self.operands[i])
            if kernel.is_barrier:
                nbytes = 2 * _POINTER * len(kernel.outputs)
            else:
                nbytes = sum(self.program.nbytes[v] for v in kernel.outputs)
            walked += nbytes
            total = min(walked, total + nbytes)
            if len(kernel.outputs) != 1 or kernel.is_barrier:
                extra = min(count, extra + len(kernel.outputs) - 1)
            for v in kernel.outputs:
                self.extra[v] = min(count, extra + max(0, self.uses[v] - 1))
                self.total[v] = total
            self.names[i] = _name(kernel.primitive, len(kernel.outputs), seen)


def _name(primitive: str, outputs: int, seen: dict[str, int]) -> str:
    """Names are compared as text: the second of a kind is "dot.1", the eleventh "dot.10", which comes before "dot.2"."""
    if outputs != 1:
        return "get-tuple-element"
    number = seen.get(primitive, 0)
    seen[primitive] = number + 1
    return f"{primitive}.{number}" if number else primitive
