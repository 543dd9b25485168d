"""A first schedule under a budget: greedy repair, and what tidies a schedule up.

**Repair.** While an event is over the budget, take one at the peak. Every value that waits there can be *dropped*:
run again before its next use, so that its copy ends with the last use before the event. Inputs that are
gone at that place live on, or run again too, whichever costs less at the current price of excess. The drop with the least time per byte of
excess removed is taken (excess summed over events: what is dropped for long counts for more).

**Prune.** A rerun that the budget does not need is undone, dearest first.

**Optimality.** None claimed. Each op runs at most once in a stage.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoremat.solve._reruns import Rerun, Reruns
from autoremat.solve._schedule import OpGraph

DEPTH = 4
"""How many ops deep a drop may run inputs again."""

SLACK = 4.0
"""Drops that score worse than the best by more than this are not looked at closely."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Reruns that belong together, inputs first; their cost, the excess that they remove, time per byte of it."""

    reruns: tuple[Rerun, ...]
    cost: int
    gain: float
    score: float


class Searcher:
    """Improves one schedule."""

    def __init__(self, graph: OpGraph, budget_bytes: int, *, seed: int = 0) -> None:
        self.graph = graph
        self.state = Reruns(graph, budget_bytes)
        self.random = random.Random(seed)
        # Time units per byte of excess; learnt from the drops that were taken.
        self._price = graph.base_cost / max(1, len(graph) * budget_bytes)
        # Breaks ties among ops that cost nothing.
        self._least = graph.base_cost * 1e-7 / len(graph) + 1e-12

    # Repair.

    def repair(self, *, patience: float = 0.9, deadline: float = math.inf) -> bool:
        """Add reruns until the schedule fits; false if no drop helps any more, or at the deadline.

        An event is left for another one when its excess falls below the share `patience` of the largest: near 1
        is better and slower.
        """
        state = self.state
        while True:
            excess = state.excess()
            pivot = int(excess.argmax())
            if excess[pivot] == 0:
                return True
            if time.monotonic() > deadline or not self._lower(state.keys[pivot], excess, patience):
                return False

    def _lower(self, key: int, excess: npt.NDArray[np.int64], patience: float) -> bool:
        """Drop values at the event `key` until it is within the budget; false if there was nothing to drop.

        Drops are scored once and taken from a heap. Taking one changes the others' scores: each is scored again before it is
        taken, and goes back if another has become better.
        """
        state = self.state
        heap: list[tuple[float, int]] = []
        least = math.inf
        for op in range(key // self.n):
            drop = self._best(op, key, excess, SLACK * least)
            if drop is not None:
                least = min(least, drop.score)
                heap.append((drop.score, op))
        heapq.heapify(heap)
        taken = False
        while heap:
            excess = state.excess()
            here = excess[state.position(key)]
            if here == 0 or (taken and here < patience * excess.max()):
                break
            _, op = heapq.heappop(heap)
            drop = self._best(op, key, excess, math.inf)
            if drop is None:
                continue
            if heap and drop.score > heap[0][0]:
                heapq.heappush(heap, (drop.score, op))
                continue
            taken = True
            for stage, rerun in drop.reruns:
                if not state.has(stage, rerun):
                    state.add(stage, rerun)
            self._price = 0.9 * self._price + 0.1 * drop.cost / max(drop.gain, 1.0)
        return taken

    def _best(self, op: int, key: int, excess: npt.NDArray[np.int64], bar: float) -> Drop | None:
        best = None
        for drop in self._drops(op, key, excess, bar):
            if best is None or drop.score < best.score:
                best = drop
        return best

    def _score(self, cost: int, gain: float) -> float:
        return (cost + self._least) / gain

    @property
    def n(self) -> int:
        """Number of ops; a key is stage * n + op."""
        return self.state.n

    def _drops(self, op: int, key: int, excess: npt.NDArray[np.int64], bar: float) -> Iterator[Drop]:
        """The ways to have `op` not waiting at the event `key`, as far as they score below `bar`."""
        state, n = self.state, self.n
        i = state.copy_at(op, key)
        if i < 0 or state.ends[op][i] <= key or op == key % n or op in self.graph.inputs[key % n]:
            return
        use = state.next_use(op, key)
        last = state.last_use(op, state.starts[op][i], key)
        # Just before the use, or as long as all inputs are there.
        for stage in dict.fromkeys((use // n, state.early(op, use // n))):
            if stage * n + op > key and stage > op:
                drop = self._drop(op, last, stage, excess, bar)
                if drop is not None:
                    yield drop

    def _drop(self, op: int, last: int, stage: int, excess: npt.NDArray[np.int64], bar: float) -> Drop | None:
        state = self.state
        key = stage * self.n + op
        a, b = state.position(last) + 1, state.position(key)
        gain = float(np.minimum(excess[a:b], self.graph.nbytes[op]).sum())
        if gain <= 0 or self._score(self.graph.cost[op], gain) >= bar:
            return None
        reruns: list[Rerun] = []
        found = self._run(op, stage, excess, DEPTH, reruns, bar * gain)
        if found is None:
            return None
        cost, loss, fresh = found
        # What waits at the new event, and what it brings along.
        there = int(state.memory[b - 1]) + fresh - state.budget
        gain -= loss + max(0, there)
        return Drop(tuple(reruns), cost, gain, self._score(cost, gain)) if gain > 0 else None

    def _run(
        self,
        op: int,
        stage: int,
        excess: npt.NDArray[np.int64],
        depth: int,
        reruns: list[Rerun],
        limit: float,
    ) -> tuple[int, float, int] | None:
        """Run `op` in `stage`: time, excess made elsewhere, bytes brought there; `None` if it costs over `limit`.

        Appends to `reruns`.
        """
        state = self.state
        key = stage * self.n + op
        b = state.position(key)
        cost, loss, fresh = self.graph.cost[op], 0.0, 0
        for p in self.graph.inputs[op]:
            if cost > limit:
                return None
            end = state.ends[p][state.copy_at(p, key)]
            if end >= key or (stage, p) in reruns:
                continue
            size = self.graph.nbytes[p]
            a = state.position(end) + 1
            made = float(np.maximum(state.memory[a:b] + size - state.budget, 0).sum() - excess[a:b].sum())
            fresh += size
            if depth and made > 0:
                mark = len(reruns)
                worth = min(limit - cost, self._price * made)
                again = self._run(p, stage, excess, depth - 1, reruns, worth)
                if again is not None and again[0] + self._price * again[1] < self._price * made:
                    cost, loss, fresh = cost + again[0], loss + again[1], max(fresh, again[2])
                    continue
                del reruns[mark:]
            loss += made
        reruns.append((stage, op))
        return (cost, loss, fresh) if cost <= limit else None

    # Prune.

    def prune(self) -> None:
        """Undo reruns that the budget does not need."""
        state = self.state
        order = sorted(state.reruns(), key=lambda r: (-self.graph.cost[r[1]] * self.random.random(), r))
        for stage, op in order:
            if not state.has(stage, op):
                continue
            state.remove(stage, op)
            if state.fits():
                continue
            state.add(stage, op)
        self.sweep()

    def sweep(self) -> None:
        """Undo reruns that nothing reads, last first: what they read may become one of them."""
        state = self.state
        for stage, op in sorted(state.reruns(), reverse=True):
            if state.useless(stage, op):
                state.remove(stage, op)
