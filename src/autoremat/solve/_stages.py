"""A lower bound on the time of schedules under a budget.

**Problem.** Any schedule whose first executions follow the input order, with any number of executions at any place.
Take some ops, the *gates*, and cut the schedule at their first executions into blocks. Then, with

    s[k, v] = 1   a copy of v waits while gate k runs for the first time
    r[k, v] = 1   v, made before block k, runs again in block k

each such schedule satisfies

    s[k, v]  <=  s[k-1, v] + r[k, v]             what waits was there before, or was made
    r[k, v]  <=  s[k-1, p] + r[k, p]             for each input p of v made before block k
    1        <=  s[k-1, p] + r[k, p]             for each input p, made before block k, of an op first run in it
    sum of bytes_v · s[k, v], v not read by gate k  <=  budget - working set of gate k

and takes at least the base time plus the sum of cost_v · r[k, v]. Order inside a block is forgotten, and so is the
memory of all other events. The least such sum is the bound; gates are few, so the program is far smaller than one with a
stage for each op (Jain et al., *Checkmate*, MLSys 2020).

**Few gates are often better than many.** The fractional program smears a value's reruns over the blocks; long blocks
leave it less to smear. So `Bounder` solves integer programs with ever more gates, as long as its time lasts.

**Method and exactness.** SciPy's HiGHS; its dual bound is valid whenever it stops. It computes in floating point: the bound is
lowered by `TOLERANCE` of the recompute time, then rounded up to a multiple of the costs' common divisor.

**Complexity.** An integer program with 2 · gates · ops variables and gates · arcs rows: exponential in the worst
case, ended by the time limit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from autoremat.solve._schedule import OpGraph, simulate

# SciPy has no types.
_optimize: Any = import_module("scipy.optimize")
_sparse: Any = import_module("scipy.sparse")

TOLERANCE = 1e-6
"""What floating point may be wrong by, relative to the recompute time."""

_GROWTH = 1.6
_PATIENCE = 0.6
"""The share of the time left that one number of gates may take."""


@dataclass(slots=True)
class _Rows:
    """Sparse rows with lower and upper limits."""

    rows: list[int] = field(default_factory=list[int])
    columns: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)


class Stages:
    """The program of one set of gates."""

    def __init__(self, graph: OpGraph, budget_bytes: int, gates: list[int]) -> None:
        self.graph = graph
        self.budget = budget_bytes
        self.gates = gates
        self._unit = math.gcd(*graph.cost) or 1
        self._costs: list[float] = []
        self._rows = _Rows()
        self._waits: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[int, int], int] = {}
        start = 0
        for k, end in enumerate([*gates, len(graph) - 1]):
            self._block(k, start, end)
            start = end + 1

    def solve(self, seconds: float) -> tuple[int, bool]:
        """A lower bound on the recompute time, 0 if none was found in time; and whether more time cannot raise it."""
        matrix = _sparse.csr_array(
            (self._rows.values, (self._rows.rows, self._rows.columns)),
            shape=(len(self._rows.low), len(self._costs)),
        )
        top = max(self._costs, default=0) or 1.0
        found: Any = _optimize.milp(
            np.array(self._costs) / top,
            constraints=_optimize.LinearConstraint(matrix, self._rows.low, self._rows.high),
            bounds=_optimize.Bounds(0, 1),
            integrality=np.ones(len(self._costs)),
            options={"time_limit": max(seconds, 0.05), "mip_rel_gap": 0.0},
        )
        value = getattr(found, "mip_dual_bound", None)
        if value is None or not math.isfinite(value):
            return 0, False
        least = math.ceil(max(0.0, value * top * (1 - TOLERANCE) - TOLERANCE))
        return least * self._unit, found.status == 0

    def _block(self, k: int, start: int, end: int) -> None:
        """Variables and rows of block `k`, in which ops `start` to `end` run first."""
        gate = k < len(self.gates)
        for v in range(start):
            self._runs[k, v] = self._variable(self.graph.cost[v] // self._unit)
        if gate:
            for v in range(end + 1):
                self._waits[k, v] = self._variable(0)
        for v in range(end + 1):
            for p in self.graph.inputs[v]:
                if p >= start:
                    continue
                there = [(self._waits[k - 1, p], 1.0), (self._runs[k, p], 1.0)]
                if v < start:
                    self._rows.add([*there, (self._runs[k, v], -1.0)], 0, math.inf)
                else:
                    self._rows.add(there, 1, math.inf)
        if gate:
            for v in range(start):
                terms = [(self._waits[k - 1, v], 1.0), (self._runs[k, v], 1.0), (self._waits[k, v], -1.0)]
                self._rows.add(terms, 0, math.inf)
            self._limit(k, end)

    def _limit(self, k: int, gate: int) -> None:
        """Memory while a gate runs for the first time, in units of the budget."""
        own = {gate, *self.graph.inputs[gate]}
        terms = [
            (self._waits[k, v], self.graph.nbytes[v] / self.budget)
            for v in range(gate)
            if v not in own and self.graph.nbytes[v]
        ]
        self._rows.add(terms, -math.inf, (self.budget - self.graph.working_set(gate)) / self.budget)

    def _variable(self, cost: float) -> int:
        self._costs.append(float(cost))
        return len(self._costs) - 1


def gates(graph: OpGraph, budget_bytes: int, count: int) -> list[int]:
    """Up to `count` ops over the budget in the schedule without reruns: the highest, but not side by side."""
    alive = simulate(graph, range(len(graph))).alive
    over = [v for v, held in enumerate(alive) if held > budget_bytes]
    if len(over) <= count:
        return over
    apart = len(over) // (3 * count)
    chosen: list[int] = []
    for v in sorted(over, key=lambda v: (-alive[v], v)):
        if all(abs(v - u) > apart for u in chosen):
            chosen.append(v)
        if len(chosen) == count:
            break
    return sorted(chosen)


class Bounder:
    """Raises a lower bound on the recompute time by ever more gates, as long as it is given time.

    What was solved to its end is not solved again; what was stopped is tried again with the time of the next
    call.
    """

    def __init__(self, graph: OpGraph, budget_bytes: int) -> None:
        self.best = 0
        self._graph = graph
        self._budget = budget_bytes
        all_over = len(gates(graph, budget_bytes, len(graph)))
        counts = [1]
        while counts[-1] < all_over:
            counts.append(min(all_over, math.ceil(counts[-1] * _GROWTH)))
        self._counts = counts if all_over else []

    def run(self, *, deadline: float, enough: int | None = None) -> int:
        """Continue until the deadline (`time.monotonic`), or until the bound reaches `enough`; returns the bound."""
        for count in list(self._counts):
            left = deadline - time.monotonic()
            if left <= 0 or (enough is not None and self.best >= enough):
                break
            chosen = gates(self._graph, self._budget, count)
            share = _PATIENCE if len(self._counts) > 1 else 1.0
            found, finished = Stages(self._graph, self._budget, chosen).solve(share * left)
            self.best = max(self.best, found)
            if finished:
                self._counts.remove(count)
        return self.best
