"""The peak of a program: its kernels, in the compiler's order, before the judge. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoremat.predict._compiler import Compiler
from autoremat.predict._fuse import ELEMENTWISE, kernels
from autoremat.predict._hosts import hosted
from autoremat.predict._order import depth_first
from autoremat.predict._program import Instruction, Program
from autoremat.solve import Step, alive

_IN_PLACE = ELEMENTWISE | {"library", "dynamic_update_slice", "scatter", "scatter-add"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A kernel that runs, and the bytes of temporaries alive while it does; `source` is where the user's program made it."""

    primitive: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Temporaries of a program: `temp_bytes` at most, first at `at`; `timeline` has all kernels in order."""

    temp_bytes: int
    at: Moment
    timeline: tuple[Moment, ...]


NOTHING = Moment(primitive="", nbytes=0, source="")


def peak(program: Program, compiler: Compiler, *, lends: bool = False) -> Peak:
    """The temporaries of a program, arguments and results not counted, as `compiler` would lay them out. If the results
    are lent (`lends`), they may live in the memory of those until they are made."""
    made = kernels(program, compiler)
    order = depth_first(made)
    ran = [made.instructions[i] for i in order]
    steps = _steps(made, ran, compiler)
    elsewhere = set(made.outputs)
    if lends:
        elsewhere |= hosted(made.nbytes, steps, elsewhere)
    counted = [replace(s, makes=[v for v in s.makes if v not in elsewhere]) for s in steps]
    nbytes = alive(made.nbytes, counted)
    timeline = tuple(
        Moment(primitive=k.primitive, nbytes=n, source=k.source)
        for k, n in zip(ran, nbytes, strict=True)
        if not k.is_barrier
    )
    at = max(timeline, key=lambda moment: moment.nbytes, default=NOTHING)
    return Peak(temp_bytes=at.nbytes, at=at, timeline=timeline)


def _steps(program: Program, ran: list[Instruction], compiler: Compiler) -> list[Step]:
    """What runs, as the judge wants it: a barrier's results lie where its operands do."""
    where: dict[int, int] = {}
    steps: list[Step] = []
    for kernel in ran:
        reads = {where.get(v, v) for v in kernel.inputs}
        if kernel.is_barrier:
            where.update((o, where.get(i, i)) for i, o in zip(kernel.inputs, kernel.outputs, strict=True))
            steps.append(Step(reads, ()))
            continue
        workspace = kernel.workspace + max((_inside(p, compiler) for p in kernel.inner), default=0)
        over = reads if kernel.primitive in _IN_PLACE else {where.get(v, v) for v in kernel.initial}
        steps.append(Step(reads, kernel.outputs, workspace, over))
    return steps


def _inside(program: Program, compiler: Compiler) -> int:
    """Bytes of temporaries of a program that another one runs."""
    kept = 0 if compiler.writes_slices else sum(program.nbytes[v] for v in program.stacked)
    return peak(program, compiler).temp_bytes + kept
