"""Schedules with recomputation, and their judge.

**Problem.** A graph of ops, each with one output; a schedule is a sequence of executions, in which an op may
occur several times. Every execution makes a new copy of its output. A use reads the latest copy; a copy lives
from its execution to the last use that reads it, and no longer. While an op runs, its inputs, its output and
everything that waits are alive: the peak is the largest such sum.

`simulate` knows nothing of solvers, budgets or how a schedule was found. An execution whose input was never
made, or an op that never runs, is an error.

**Complexity.** O(executions + uses), plain Python integers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """Ops in input order: op `v` makes `nbytes[v]` bytes in `cost[v]` time units from the outputs of `inputs[v]`.

    Inputs are ops with smaller ids: the input order is a topological one. `names` are for messages; empty
    means that ops are called by their ids.
    """

    nbytes: tuple[int, ...]
    cost: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.nbytes)
        if not n:
            raise ValueError("a graph has at least one op")
        if len(self.cost) != n or len(self.inputs) != n or len(self.names) not in (0, n):
            raise ValueError("nbytes, cost, inputs and names must have one entry for each op")
        if min(self.nbytes) < 0 or min(self.cost) < 0:
            raise ValueError("bytes and costs may not be negative")
        for v, row in enumerate(self.inputs):
            if len(set(row)) != len(row):
                raise ValueError(f"op {self.name(v)} names an input twice")
            for p in row:
                if not 0 <= p < v:
                    raise ValueError(f"op {self.name(v)} reads op {p}, which does not come before it")

    def __len__(self) -> int:
        return len(self.nbytes)

    def name(self, op: int) -> str:
        """What messages call an op."""
        return self.names[op] if self.names else str(op)

    def working_set(self, op: int) -> int:
        """Bytes of the op's output and inputs: what is alive whenever it runs."""
        return self.nbytes[op] + sum(self.nbytes[p] for p in self.inputs[op])

    @property
    def floor_op(self) -> int:
        """The op with the largest working set; no schedule in any order has a peak below it."""
        return max(range(len(self)), key=self.working_set)

    @property
    def base_cost(self) -> int:
        """Time of one execution of each op."""
        return sum(self.cost)

    def consumers(self) -> list[list[int]]:
        """For each op, the ops that read its output, in input order."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for v, row in enumerate(self.inputs):
            for p in row:
                found[p].append(v)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a schedule costs. `alive[i]` are the bytes alive while `schedule[i]` runs.

    `peak_bytes` is the largest of them, first reached at `peak_step`, in op `peak_op`. `cost` is the time of
    all executions, `recompute_cost` the part beyond the first execution of each op; `executions[v]` says how
    often op `v` ran.
    """

    alive: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    peak_op: int
    cost: int
    recompute_cost: int
    executions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that runs: it reads some copies and makes others, and needs `workspace` bytes while it runs.

    What it makes it writes over copies of the same size, of those in `over`, that it is the last to read.
    """

    reads: Collection[int]
    makes: Sequence[int]
    workspace: int = 0
    over: Collection[int] = ()


def alive(nbytes: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """Bytes alive while each step runs. Copy `c` of `nbytes[c]` bytes lives from the step that makes it to the last that reads it.

    What is read but never made is somebody else's memory and not counted.
    """
    last = {copy: i for i, step in enumerate(steps) for copy in (*step.makes, *step.reads)}
    ends: list[list[int]] = [[] for _ in steps]
    for step in steps:
        for copy in step.makes:
            ends[last[copy]].append(copy)
    result: list[int] = []
    held = 0
    for step, ending in zip(steps, ends, strict=True):
        held += sum(nbytes[c] for c in step.makes)
        reused = _overwritten(nbytes, step, ending) if step.over else 0
        result.append(held + step.workspace - reused)
        held -= sum(nbytes[c] for c in ending)
    return result


def _overwritten(nbytes: Sequence[int], step: Step, ending: Sequence[int]) -> int:
    """Bytes of what a step makes over copies that end with it."""
    free = [nbytes[c] for c in ending if c in step.over]
    reused = 0
    for copy in step.makes:
        if nbytes[copy] in free:
            free.remove(nbytes[copy])
            reused += nbytes[copy]
    return reused


def simulate(graph: OpGraph, schedule: Sequence[int]) -> Timeline:
    """Run `schedule`, a sequence of ops, and return its liveness timeline.

    Raises `ValueError` if an op is not in the graph, reads what was not made before, or never runs.
    """
    # Every execution makes a copy, which is known by the number of its step.
    steps = _steps(graph, schedule)
    held = alive([graph.nbytes[op] for op in schedule], steps)
    peak = max(held)
    step = held.index(peak)
    executions = [0] * len(graph)
    for op in schedule:
        executions[op] += 1
    cost = sum(graph.cost[op] for op in schedule)
    return Timeline(
        alive=tuple(held),
        peak_bytes=peak,
        peak_step=step,
        peak_op=schedule[step],
        cost=cost,
        recompute_cost=cost - graph.base_cost,
        executions=tuple(executions),
    )


def _steps(graph: OpGraph, schedule: Sequence[int]) -> list[Step]:
    made = [-1] * len(graph)
    steps: list[Step] = []
    for i, op in enumerate(schedule):
        if not 0 <= op < len(graph):
            raise ValueError(f"step {i} runs op {op}; the graph has ops 0 to {len(graph) - 1}")
        for p in graph.inputs[op]:
            if made[p] < 0:
                raise ValueError(
                    f"step {i} runs op {graph.name(op)}, whose input {graph.name(p)} was not made before"
                )
        steps.append(Step([made[p] for p in graph.inputs[op]], [i]))
        made[op] = i
    missing = [v for v, step in enumerate(made) if step < 0]
    if missing:
        raise ValueError(f"{len(missing)} ops never run, the first is {graph.name(missing[0])}")
    return steps
