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

and takes at least the base time plus the sum of cost_v · r[k, v]. Order inside a block is forgotten. Of the
memory inside it this much is left: what waits at both its gates and does not run in between waits all along, so for
a *crowded* rerun of v in block k

    h[k, w]  >=  s[k-1, w] + s[k, w] - r[k, w] - 1      w waits through block k; s[k, w] = 1 if gate k reads w
    sum of bytes_w · h[k, w], w neither v nor read by v  <=  budget - working set of v        if r[k, v] = 1

The program is that of Checkmate (Jain et al., MLSys 2020), whose blocks are single ops, relaxed so that no schedule is
left out.

**Method.** Cutting planes: solve the program of the gates and crowded reruns so far, run what it runs again, each just
before its first use in the block, and see where that is over the budget. The highest event is the next gate,
or if it is a rerun before a gate, a crowded one; if it is that already, its block is cut down to one op. Few gates, well
chosen, give most of the bound.

**Exactness.** OR-Tools CP-SAT in integers; its bound is valid whenever it stops. Times are divided by their greatest common
divisor, or more, rounded down, if their sum would not fit a double.

**Complexity.** 2 · gates · ops variables and gates · arcs clauses: exponential in the worst case, ended by the time
limit.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from autoremat.solve._reruns import Rerun, Reruns
from autoremat.solve._schedule import OpGraph

_EXACT = 1 << 50
"""Sums of times in the program stay below this, with room for blocks: CP-SAT tells its bound as a double."""

_LIGHT = 0.3
"""What excess in the stage of a gate counts, beside excess elsewhere: another gate is easier to solve than a crowded rerun."""


@cache
def cp_sat() -> Any:
    """CP-SAT; loaded when it is needed first, because that takes a second."""
    return import_module("ortools.sat.python.cp_model")


@dataclass(frozen=True, slots=True)
class Relaxed:
    """What came of a program: a lower bound on the recompute time, the reruns that it chose, whether they are the best.

    A rerun's stage is here the gate that ends its block.
    """

    bound: int
    reruns: set[Rerun]
    finished: bool


class Stages:
    """The program of one set of gates and crowded reruns; a rerun's stage is the gate that ends its block."""

    def __init__(self, graph: OpGraph, budget_bytes: int, gates: list[int], crowded: set[Rerun]) -> None:
        self.graph = graph
        self.gates = gates
        self._ends = [*gates, len(graph) - 1]
        self._cp: Any = cp_sat()
        self._model = self._cp.CpModel()
        self._bytes_unit = math.gcd(*graph.nbytes) or 1
        self._budget = budget_bytes
        total = len(self._ends) * graph.base_cost
        self._unit = max(math.gcd(*graph.cost), -(-total // _EXACT), 1)
        self._waits: dict[tuple[int, int], Any] = {}
        self._runs: dict[tuple[int, int], Any] = {}
        self._through: dict[tuple[int, int], Any] = {}
        for k in range(len(self._ends)):
            self._block(k)
        for stage, op in sorted(crowded):
            self._crowd(bisect_left(self._ends, stage), op)
        costs = [graph.cost[v] // self._unit for _, v in self._runs]
        self._model.minimize(self._cp.LinearExpr.weighted_sum(list(self._runs.values()), costs))

    def hint(self, state: Reruns) -> None:
        """Tell the program a schedule to start from."""
        n = state.n
        ran = {(bisect_left(self._ends, stage), op) for stage, op in state.reruns()}
        for key, run in self._runs.items():
            self._model.add_hint(run, key in ran)
        for (k, v), waits in self._waits.items():
            at = self._ends[k] * (n + 1)
            copy = state.copy_at(v, at + 1)
            self._model.add_hint(waits, state.ends[v][copy] >= at)

    def solve(self, seconds: float) -> Relaxed:
        """Solve it as well as the time allows."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        solver.parameters.num_workers = 1
        # Measured: without a full linear relaxation nothing is proven.
        solver.parameters.linearization_level = 2
        status = solver.solve(self._model)
        bound = max(0, math.ceil(solver.best_objective_bound - 1e-6)) * self._unit
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return Relaxed(bound if status == self._cp.UNKNOWN else 0, set(), False)
        chosen = {(self._ends[k], v) for (k, v), run in self._runs.items() if solver.boolean_value(run)}
        return Relaxed(bound, chosen, status == self._cp.OPTIMAL)

    def _start(self, k: int) -> int:
        """The first op that runs first in block `k`; smaller ones were made before."""
        return self._ends[k - 1] + 1 if k else 0

    def _block(self, k: int) -> None:
        """Variables and rows of block `k`."""
        start, end, gate = self._start(k), self._ends[k], k < len(self.gates)
        for v in range(start):
            self._runs[k, v] = self._model.new_bool_var("")
        for v in range(end + 1 if gate else 0):
            self._waits[k, v] = self._model.new_bool_var("")
        for v in range(start):
            run = self._runs[k, v]
            for p in self.graph.inputs[v]:
                self._model.add_bool_or([self._waits[k - 1, p], self._runs[k, p], ~run])
            if gate:
                self._model.add_bool_or([self._waits[k - 1, v], run, ~self._waits[k, v]])
        for p in sorted({p for v in range(start, end + 1) for p in self.graph.inputs[v] if p < start}):
            self._model.add_bool_or([self._waits[k - 1, p], self._runs[k, p]])
        if gate:
            self._limit(self._waits, k, end)

    def _limit(self, there: dict[tuple[int, int], Any], k: int, op: int) -> Any:
        """Memory while an op runs and the values before it, or before block `k`, are `there`."""
        own = {op, *self.graph.inputs[op]}
        values = [v for v in range(self._ends[k]) if v not in own and (k, v) in there]
        sizes = [self.graph.nbytes[v] // self._bytes_unit for v in values]
        room = (self._budget - self.graph.working_set(op)) // self._bytes_unit
        held = self._cp.LinearExpr.weighted_sum([there[k, v] for v in values], sizes)
        return self._model.add(held <= room)

    def _crowd(self, k: int, op: int) -> None:
        """Memory while an op runs again in block `k`, if it was made before."""
        if (k, op) not in self._runs or k == len(self.gates):
            return
        if (k, 0) not in self._through:
            for w in range(self._start(k)):
                self._through[k, w] = self._pass(k, w)
        self._limit(self._through, k, op).only_enforce_if(self._runs[k, op])

    def _pass(self, k: int, w: int) -> Any:
        """A variable that is 1 if `w` waits all through block `k`."""
        through = self._model.new_bool_var("")
        gone = [~self._waits[k - 1, w], self._runs[k, w]]
        if w not in self.graph.inputs[self._ends[k]]:
            gone.append(~self._waits[k, w])
        self._model.add_bool_or([through, *gone])
        return through


class Bounder:
    """Raises a lower bound on the recompute time by ever more gates and crowded reruns, as long as it is given time."""

    def __init__(self, graph: OpGraph, budget_bytes: int) -> None:
        self.best = 0
        self._graph = graph
        self._budget = budget_bytes
        self._gates: list[int] = []
        self._crowded: set[Rerun] = set()
        self._exhausted = not self._separate(set())

    def run(self, *, deadline: float, known: Reruns | None = None) -> int:
        """Continue until the deadline (`time.monotonic`), or until nothing can raise the bound; returns it.

        `known` is a schedule that fits: the bound cannot pass its time, and programs start from it. What
        was stopped is tried again with the time of the next call.
        """
        enough = math.inf if known is None else known.cost - self._graph.base_cost
        while not self._exhausted and self.best < enough and (left := deadline - time.monotonic()) > 0:
            program = Stages(self._graph, self._budget, self._gates, self._crowded)
            if known is not None:
                program.hint(known)
            found = program.solve(left)
            self.best = max(self.best, found.bound)
            if not found.finished:
                break
            self._exhausted = not self._separate(found.reruns)
        return self.best

    def _separate(self, reruns: set[Rerun]) -> bool:
        """Add what forbids a relaxed choice of reruns; false if there is nothing to add."""
        state = Reruns(self._graph, self._budget)
        state.replace(self._placed(reruns, state))
        over = {
            divmod(state.keys[i], state.n): held for i, held in enumerate(state.excess().tolist()) if held
        }
        # What is near a gate counts less: gates that are apart are easier to solve, and so are gates than crowded reruns.
        near = len({stage for stage, _ in over}) // (2 * len(self._gates) + 2)
        close = {g + d for g in self._gates for d in range(-near, near + 1)}
        for event in sorted(over, key=lambda e: (-over[e] * (_LIGHT if e[0] in close else 1), e)):
            if self._forbid(*event):
                return True
        return False

    def _forbid(self, stage: int, op: int) -> bool:
        """Make an event's stage a gate, its rerun crowded, or its block as short as can be; false if all that is done."""
        if stage not in self._gates:
            self._gates = sorted([*self._gates, stage])
        elif op != stage and (stage, op) not in self._crowded:
            self._crowded.add((stage, op))
        elif stage and stage - 1 not in self._gates:
            self._gates = sorted([*self._gates, stage - 1])
        else:
            return False
        return True

    def _placed(self, reruns: set[Rerun], state: Reruns) -> set[Rerun]:
        """The reruns in the stages of their first uses in the blocks whose ends are given; the last if there is none."""
        place: dict[Rerun, int] = {}
        for end, op in sorted(reruns, key=lambda r: -r[1]):
            start = max((g for g in self._gates if g < end), default=-1)
            uses = [u for u in state.consumers[op] if start < u <= end]
            again = [place[end, u] for u in state.consumers[op] if (end, u) in place]
            place[end, op] = min([*uses, *again], default=end)
        return {(stage, op) for (_, op), stage in place.items()}
