"""What a set of kept values costs: the judge of every solver.

**Problem.** Given which values are kept and how, find what runs in the forward pass, what runs again in the
backward pass, how many bytes wait in between, and how much time that adds.

- *Backward*: walk from the demanded values; a value that is neither kept nor a free input must be made, so
  its producer runs, and needs its inputs.
- *Forward*: what the primal outputs depend on, and what the kept values depend on. A derivative-only op that
  nothing kept depends on runs in the backward pass alone, and costs nothing extra.
- *Cost*: the ops that run in both passes, plus what the storages cost.

For a given keep-set both sets are the least possible, so the cost is the least possible too. This file
knows nothing of cuts or prices: a solver never judges its own result.

`close` turns any keep-set into one that can be evaluated: it adds what may not run again and drops what the
backward pass does not read.

**Complexity.** O(ops + arcs), plain Python; `Judge` holds the tables that only depend on the problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from autoremat.solve._problem import Assignment, Problem, cheapest


def evaluate(problem: Problem, keep: Mapping[int, int]) -> Assignment:
    """Return what follows from keeping `keep` (value id -> index into `problem.storages[id]`).

    A kept value that the backward pass never reads is charged all the same.

    Raises `ValueError` if `keep` is not closed: the backward pass needs an op that runs in the forward pass
    and may not run again, or an input that is neither free nor kept; or if it names a storage that
    does not exist.
    """
    return Judge(problem).evaluate(keep)


def close(problem: Problem, keep: Mapping[int, int], *, price: Fraction | None = None) -> dict[int, int]:
    """Return a keep-set near `keep` that can be evaluated.

    Added are values that the walk needs and nothing may make again, by the storage that is cheapest at
    `price` (time units per byte; `None`: fewest bytes). Dropped are values that the walk does not read, and
    those that come anyway because their producer runs again for another output.

    Raises `ValueError` if something needed can neither be kept nor made again.
    """
    return Judge(problem).close(keep, price=price)


class Judge:
    """Evaluates and closes keep-sets of one problem."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem = problem
        self._outputs = [op.outputs for op in graph.ops]
        self._producer = [-1 if v.producer is None else v.producer for v in graph.values]
        self._there = bytearray(v.producer is None and v.free for v in graph.values)
        # Free inputs need no attention anywhere below.
        self._inputs = [tuple(v for v in dict.fromkeys(op.inputs) if not self._there[v]) for op in graph.ops]
        self._parents = [
            tuple({self._producer[v] for v in inputs if self._producer[v] >= 0}) for inputs in self._inputs
        ]
        self._demanded = tuple(v for v in dict.fromkeys(graph.demanded) if not self._there[v])
        self._primal = self._ancestors([self._producer[v] for v in graph.outputs], bytearray(len(graph.ops)))
        self._primal_ids = [j for j, needed in enumerate(self._primal) if needed]
        backward = self._ancestors([self._producer[v] for v in self._demanded], bytearray(len(graph.ops)))
        self._order = [j for j in range(len(graph.ops) - 1, -1, -1) if backward[j]]
        self._optional = [j for j in range(len(graph.ops) - 1, -1, -1) if not self._primal[j]]
        self._open_inputs = [v.id for v in graph.values if v.producer is None and not v.free]
        self._repeatable = [op.repeatable for op in graph.ops]
        self._once = [op.id for op in graph.ops if not op.repeatable]

    def _ancestors(self, ops: list[int], marks: bytearray) -> bytearray:
        for j in ops:
            if j >= 0:
                marks[j] = 1
        for j in range(len(marks) - 1, -1, -1):
            if marks[j]:
                for p in self._parents[j]:
                    marks[p] = 1
        return marks

    def evaluate(self, keep: Mapping[int, int]) -> Assignment:
        """As the function `evaluate`."""
        nbytes, cost = self._charge(keep)
        rerun = self._walk(keep)
        extra = self._extra_forward(keep)
        again = [j for j in rerun if self._primal[j] or j in extra]
        self._check_once(again)
        op_cost = self.problem.op_cost
        return Assignment(
            keep=dict(sorted(keep.items())),
            forward=frozenset(self._primal_ids).union(extra),
            rerun=frozenset(rerun),
            nbytes=nbytes,
            cost=cost + sum([op_cost[j] for j in again]),
        )

    def _charge(self, keep: Mapping[int, int]) -> tuple[int, int]:
        """Bytes and time of the storages in `keep`."""
        storages = self.problem.storages
        nbytes = cost = 0
        for v, s in keep.items():
            if not (0 <= v < len(storages) and 0 <= s < len(storages[v])):
                raise ValueError(f"value {v} has no storage {s}")
            nbytes += storages[v][s].nbytes
            cost += storages[v][s].cost
        return nbytes, cost

    def _walk(self, keep: Mapping[int, int]) -> list[int]:
        """The ops that the backward pass runs."""
        # 1: wanted and not kept.
        missing = bytearray(len(self._producer))
        for v in self._demanded:
            missing[v] = v not in keep
        rerun: list[int] = []
        inputs, outputs = self._inputs, self._outputs
        for j in self._order:
            for v in outputs[j]:
                if missing[v]:
                    rerun.append(j)
                    for i in inputs[j]:
                        if i not in keep:
                            missing[i] = 1
                    break
        for v in self._open_inputs:
            if missing[v]:
                raise ValueError(
                    f"the keep-set is not closed: the backward pass needs value {v}, an input that is not "
                    f"free and is not kept"
                )
        return rerun

    def _extra_forward(self, keep: Mapping[int, int]) -> set[int]:
        """The ops that run in the forward pass for kept values only."""
        primal = self._primal
        extra: set[int] = set()
        stack = [p for v in keep if (p := self._producer[v]) >= 0 and not primal[p]]
        while stack:
            j = stack.pop()
            if j not in extra:
                extra.add(j)
                stack.extend([p for p in self._parents[j] if not primal[p]])
        return extra

    def _check_once(self, again: list[int]) -> None:
        """Raise if an op that may not run again is among `again`."""
        if not self._once:
            return
        twice = set(again).intersection(self._once)
        if twice:
            j = min(twice)
            raise ValueError(
                f"the keep-set is not closed: op {j} ({self.problem.graph.ops[j].primitive}) may not run again, "
                f"but runs in the forward pass and the backward pass needs its outputs {self._outputs[j]}"
            )

    def close(self, keep: Mapping[int, int], *, price: Fraction | None = None) -> dict[int, int]:
        """As the function `close`.

        One pass from the last op to the first. When an op is reached, all its readers are settled: which of
        its outputs are wanted, and whether a later op needs it in the forward pass.
        """
        wanted = bytearray(len(self._producer))
        forward = bytearray(self._primal)
        closed: dict[int, int] = {}
        primal, repeatable = self._primal, self._repeatable
        inputs, outputs, parents = self._inputs, self._outputs, self._parents
        for v in self._demanded:
            wanted[v] = 1
        # Ops that no demanded value depends on are left out: none of their outputs is ever wanted.
        for j in self._order:
            kept: list[int] = []
            missing = False
            for v in outputs[j]:
                if wanted[v]:
                    if v in keep:
                        kept.append(v)
                    else:
                        missing = True
            if missing and not repeatable[j]:
                kept, keep = self._settle(j, wanted, keep, bool(forward[j]), price)
                missing = not kept
            if missing:  # it runs again, and all its outputs come with it
                for v in inputs[j]:
                    wanted[v] = 1
            elif kept:
                forward[j] = 1
                for v in kept:
                    closed[v] = keep[v]
            if forward[j] and not primal[j]:
                for p in parents[j]:
                    forward[p] = 1
        self._close_inputs(closed, wanted, keep, price)
        return dict(sorted(closed.items()))

    def _settle(
        self, j: int, wanted: bytearray, keep: Mapping[int, int], forward: bool, price: Fraction | None
    ) -> tuple[list[int], Mapping[int, int]]:
        """What to keep of op `j`, which may not run twice, and how; nothing if the backward pass runs it."""
        problem = self.problem
        reads = [v for v in self._outputs[j] if wanted[v]]
        if not forward and not any(v in keep for v in reads):
            return [], keep
        stuck = [v for v in reads if v not in keep and not problem.storages[v]]
        if not stuck:
            return reads, {**{v: cheapest(problem, v, price) for v in reads if v not in keep}, **keep}
        if not forward:
            return [], keep  # only its own kept outputs asked for a forward run
        raise ValueError(
            f"op {j} ({problem.graph.ops[j].primitive}) may not run again, runs in the forward pass, and its "
            f"output {stuck[0]} is needed but has no storage"
        )

    def _close_inputs(
        self, closed: dict[int, int], wanted: bytearray, keep: Mapping[int, int], price: Fraction | None
    ) -> None:
        """Add to `closed` the inputs that are wanted and not free."""
        for v in self._open_inputs:
            if not wanted[v]:
                continue
            if v not in keep and not self.problem.storages[v]:
                raise ValueError(f"value {v}, an input that is not free, is needed and has no storage")
            closed[v] = keep[v] if v in keep else cheapest(self.problem, v, price)
