"""Exact moves of the local search: the reruns of some ops decided anew, all others as they are.

**Problem.** Given a schedule that fits, a set of *free* ops and candidate reruns of them, choose among the candidates
for the least time, under the budget. Reruns of other ops stay. This is a 0-1 program: one variable for each
candidate, one for each segment of a value's life between two events that make or read it:

    segment after a (re)run  <=  segment before it + the rerun
    segment after a use      <=  segment before it
    a use that happens       <=  segment before it
    sum of bytes of the segments across an event, plus its output if it runs  <=  budget

Values that neither are free nor are read by a free op have no choice; they enter the last line as numbers.

**Method.** OR-Tools CP-SAT with the schedule at hand as a hint, so that it never ends with less than
that; large neighbourhood search (Shaw, CP 1998) when called again and again with other free ops. The event
model is that of retention intervals (Bartan et al., *Moccasin*, ICML 2023, arXiv 2304.14463) without their limit on
the number of intervals, for the candidates given.

A schedule over the budget is repaired by the same model: what is over, summed over events, is least.

**Optimality.** Exact for the candidates, if the solver ends before its limit.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from autoremat.solve._repair import Searcher
from autoremat.solve._reruns import Rerun, Reruns
from autoremat.solve._stages import cp_sat

_EXCHANGE_S = 2.0
"""Seconds for one exchange."""
_QUICK_S = 0.3
"""An exchange that took less is followed by a much larger one."""


def candidates(state: Reruns, free: Iterable[int], *, depth: int) -> set[Rerun]:
    """Where free ops may run again: just before a use, as early as their inputs last, or for one another.

    `depth` bounds the chains of free ops that run again for one another.
    """
    free = set(free)
    found: set[Rerun] = set()
    front: list[Rerun] = []
    for op in free:
        for u in state.consumers[op]:
            front += [(key // state.n, op) for key in state.starts[u]]
    for _ in range(depth):
        fresh = {r for r in front if r[0] > r[1] and r not in found}
        found |= fresh
        front = [(t, p) for t, op in sorted(fresh) for p in state.graph.inputs[op] if p in free]
        front += [(early, op) for t, op in sorted(fresh) if (early := state.early(op, t)) > op]
    return found | {r for r in state.reruns() if r[1] in free}


class Exchange:
    """One neighbourhood: the model over `choices`, candidate reruns of `free` ops."""

    def __init__(self, state: Reruns, free: Iterable[int], choices: set[Rerun]) -> None:
        self.state = state
        n = self._n = state.n
        self._free = set(free)
        self._unit = math.gcd(*state.graph.nbytes) or 1
        self._cp: Any = cp_sat()
        self._model = self._cp.CpModel()
        self._runs: dict[int, Any] = {t * n + op: self._model.new_bool_var("") for t, op in sorted(choices)}
        self._kept = [key for key in state.keys if key % (n + 1) == 0 or key % n not in self._free]
        self._events = sorted({*self._kept, *self._runs})
        self._by_op: dict[int, list[int]] = {}
        for key in self._events:
            self._by_op.setdefault(key % n, []).append(key)
        # Bytes that are not up to us, and variables, at each event.
        self._constant = self._still()
        self._segments: list[tuple[int, int, Any, int]] = []
        self._over: list[Any] = []
        for op in sorted(self._moving()):
            self._live(op)
        self._limit_memory(fits=state.fits())
        now = state.reruns()
        for key, run in self._runs.items():
            self._model.add_hint(run, divmod(key, n) in now)
        self._minimise()

    def _minimise(self) -> None:
        """Time; or while over the budget, what is over, a budget's worth of which weighs ten base times, and time."""
        graph = self.state.graph
        unit = math.gcd(*graph.cost) or 1
        runs = list(self._runs.values())
        costs = [graph.cost[key % self._n] // unit for key in self._runs]
        time, room = 10 * max(1, graph.base_cost // unit), max(1, self.state.budget // self._unit)
        terms = [*runs, *self._over]
        weights = [c * max(1, room // time) for c in costs] + [max(1, time // room)] * len(self._over)
        self._model.minimize(self._cp.LinearExpr.weighted_sum(terms, weights if self._over else costs))

    def solve(self, *, seconds: float, seed: int, workers: int = 1) -> tuple[set[Rerun], bool]:
        """The best reruns found for the whole schedule, and whether they are the best there are."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        solver.parameters.num_workers = workers
        # Measured: a full linear relaxation pays, presolve's searches for more do not.
        solver.parameters.linearization_level = 2
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        solver.parameters.random_seed = seed
        status = solver.solve(self._model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return self.state.reruns(), False
        chosen = {divmod(key, self._n) for key, run in self._runs.items() if solver.boolean_value(run)}
        others = {divmod(key, self._n) for key in self._kept if key % (self._n + 1)}
        return chosen | others, status == self._cp.OPTIMAL

    def _still(self) -> npt.NDArray[np.int64]:
        """Bytes at each event of the values without a choice."""
        state, nbytes, moving = self.state, self.state.graph.nbytes, self._moving()
        found = np.zeros(len(self._events), dtype=np.int64)
        for op in range(self._n):
            if op not in moving:
                for start, end in zip(state.starts[op], state.ends[op], strict=True):
                    found[self._at(start) : self._at(end) + 1] += nbytes[op]
        return found

    def _moving(self) -> set[int]:
        """The ops whose values may live longer or shorter than they do."""
        return self._free | {p for op in self._free for p in self.state.graph.inputs[op]}

    def _at(self, key: int) -> int:
        return bisect_left(self._events, key)

    def _live(self, op: int) -> None:
        """The life of one value: segments between the events that make or read it."""
        model, size = self._model, self.state.graph.nbytes[op]
        made = set(self._by_op[op])
        points = sorted(made.union(*(self._by_op[u] for u in self.state.consumers[op])))
        points = [key for key in points if key >= op * (self._n + 1)]
        # The first point is the first execution, which always runs: from the second on there is a segment before.
        before: Any = None
        for here, after in zip(points, [*points[1:], None], strict=True):
            run = self._runs.get(here, True)
            at = self._at(here)
            if here in made:
                # The output is there while it is made; a copy that waited until then was in vain.
                self._charge(at, at + 1, run, size)
                if before is not None:
                    self._charge(at, at + 1, before, size)
            elif run is True:
                model.add(before == 1)
            else:
                model.add_implication(run, before)
            if after is None:
                return
            segment = model.new_bool_var("")
            model.add_hint(segment, self._spans(op, here, after))
            if here in made:
                if before is not None and run is not True:
                    model.add_bool_or([~segment, run, before])
                    model.add_bool_or([~before, ~run])
            else:
                model.add_implication(segment, before)
            self._charge(at + 1, self._at(after) + (after not in made), segment, size)
            before = segment

    def _spans(self, op: int, here: int, after: int) -> bool:
        """Whether a copy of `op` lives from one event to the next in the schedule at hand."""
        copy = self.state.copy_at(op, after)
        return copy >= 0 and self.state.starts[op][copy] <= here and self.state.ends[op][copy] >= after

    def _charge(self, first: int, end: int, what: Any, size: int) -> None:
        """Count `size` bytes at the events from `first` up to `end`, if `what`."""
        if what is True:
            self._constant[first:end] += size
        elif first < end and size:
            self._segments.append((first, end, what, size))

    def _limit_memory(self, *, fits: bool) -> None:
        """The budget at each event where it can be exceeded; if it is exceeded now, what is over is counted."""
        most = self._constant.copy()
        for first, end, _, size in self._segments:
            most[first:end] += size
        tight = np.flatnonzero(most > self.state.budget)
        members: list[list[int]] = [[] for _ in tight]
        for i, (first, end, _, _) in enumerate(self._segments):
            for at in range(bisect_left(tight, first), bisect_left(tight, end)):
                members[at].append(i)
        # Of events with the same segments only the fullest matters.
        room: dict[tuple[int, ...], int] = {}
        for at, row in zip(tight.tolist(), members, strict=True):
            left = self.state.budget - int(self._constant[at])
            room[tuple(row)] = min(left, room.get(tuple(row), left))
        unit = self._unit
        for row, left in room.items():
            sizes = [self._segments[i][3] // unit for i in row]
            total = self._cp.LinearExpr.weighted_sum([self._segments[i][2] for i in row], sizes)
            if fits:
                self._model.add(total <= left // unit)
            else:
                over = self._model.new_int_var(0, sum(sizes) + max(0, -left // unit) + 1, "")
                self._model.add(total <= left // unit + over)
                self._over.append(over)


class Neighbourhoods:
    """Large neighbourhood search: exchanges of ever other free ops."""

    def __init__(self, searcher: Searcher, *, seed: int = 0, workers: int = 1) -> None:
        self.searcher = searcher
        self.state = searcher.state
        self.size = 20.0
        self._random = random.Random(seed)
        self._workers = workers
        base = Reruns(searcher.graph, searcher.state.budget)
        self._ends = [row[0] for row in base.ends]
        self._over = [key // base.n for key in np.array(base.keys)[base.excess() > 0].tolist()]

    def run(self, *, deadline: float, enough: int, fit: bool = False) -> None:
        """Improve the schedule until the deadline, it costs no more than `enough`, or with `fit` it fits."""
        state = self.state
        while (left := deadline - time.monotonic()) > 0 and not (
            state.fits() and (fit or state.cost <= enough)
        ):
            begin = time.monotonic()
            free = self._pick()
            exchange = Exchange(state, free, candidates(state, free, depth=self._random.choice((1, 2, 2, 3))))
            better, done = exchange.solve(
                seconds=min(left, _EXCHANGE_S), seed=self._random.randrange(2**31), workers=self._workers
            )
            self._take(better)
            took = time.monotonic() - begin
            growth = 1.3 if took < _QUICK_S else 1.05
            self.size = min(state.n, self.size * growth + 0.5) if done else max(5.0, self.size * 0.9)

    def _take(self, better: set[Rerun]) -> None:
        """Accept what the exchange found if it is better as it runs."""
        state = self.state
        fits, over, cost, now = state.fits(), int(state.excess().sum()), state.cost, state.reruns()
        if better == now:
            return
        state.replace(better)
        self.searcher.sweep()
        if state.fits():
            self.searcher.prune()
        if fits:
            worse = not state.fits() or state.cost > cost
        else:
            worse = int(state.excess().sum()) > over
        if worse:
            state.replace(now)

    def _pick(self) -> set[int]:
        """Free ops: random ones, or such as wait at a crowded event, some with what they read."""
        state, size = self.state, max(2, round(self.size))
        mode = self._random.random()
        if mode < 0.25 or not self._over:
            return set(self._random.sample(range(state.n), min(state.n, size)))
        stage = self._crowded()
        again = {op for _, op in state.reruns()}
        waiting = [v for v in range(stage) if self._ends[v] > stage * (state.n + 1)]
        waiting.sort(key=lambda v: (v not in again) + 2 * self._random.random())
        if mode < 0.6:
            return set(waiting[:size])
        chosen = waiting[: size // 2]
        return {*chosen, *(p for v in chosen for p in state.graph.inputs[v] if self._random.random() < 0.5)}

    def _crowded(self) -> int:
        """A random stage that is over the budget: now, if any is, or else without reruns."""
        over = np.flatnonzero(self.state.excess())
        if len(over) and self._random.random() < 0.8:
            return max(1, self.state.keys[int(over[self._random.randrange(len(over))])] // self.state.n)
        return self._random.choice(self._over)
