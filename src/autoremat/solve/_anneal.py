"""Simulated annealing over sets of reruns: many small moves, most of them undone.

**Problem.** As in `_order`: the least time under a budget. A schedule is a set of reruns (`_reruns`); one over the
budget is allowed on the way, for

    energy  =  time + price · sum over events over the budget of (bytes over it + `_LUMP` mean outputs)

The lump is there because a few bytes too many cost as much to remove as a whole value.

**Moves.** *Relieve*: a value that waits at an event over the budget runs again before its next use. *Renew*: a random
value runs again before one of its uses. Both may run inputs that are gone again too, and may take place
as early as the inputs last. *Undo* a rerun, together with reruns of its inputs that only it read. *Shift* a
rerun to another stage.

**Schedule.** A move is accepted by Metropolis' rule at a temperature that falls quadratically (Kirkpatrick,
Gelatt, Vecchi, *Science* 220, 1983). The price, in time units per byte, rises while the schedule is over the budget and falls
while it fits (strategic oscillation; Glover, *Decision Sciences* 8, 1977), so the search walks along the
border. A fresh search starts without reruns, at a low price: that ends lower than what is grown around greedy choices. A
search that has not fitted for long goes back to the best schedule; at first, if it knows one, it is given more time.

**Optimality.** None claimed. The same seed and number of moves give the same schedule; with a deadline
alone, as many moves as fit are made.

**Complexity.** A move takes O(events) vectorised, and as much Python as the ops it touches have neighbours: 10,000
to 30,000 moves a second on graphs of 1000 to 100 ops.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np

from autoremat.solve._reruns import Rerun, Reruns

_BATCH = 100
"""Moves between two looks at the clock, with one step of the price."""
_PRICE_STEP = 1.005
_PRICE_RISE = 1.01
"""The step until a schedule fits."""
_PRICE_START = 0.2
"""Price at first: this share of the base time buys all that the schedule without reruns is over."""
_PRICE_BACK = 1.0
"""The same, when the search goes on from a schedule that it was given."""
_PRICE_MOST = 100.0
"""The same, when nothing moves any more: the price falls to where it started, and may rise twice as high next time."""
_LOST = 10_000
"""Moves without a fitting schedule after which the search goes back to the best one."""
_STRAY = 3_000
"""The same for a search that is not fresh: it may never fit again by itself."""
_FIRST = 0.5
"""Share of the search in which it may find a fitting schedule by itself."""
_LUMP = 0.2
_HOT = 250
"""Up to so many ops the temperature starts at the mean time of an op; above, it falls with the root of their number."""
_DEPTH = 3
"""How many ops deep a move may run inputs again."""


class Annealer:
    """Improves one schedule."""

    def __init__(self, state: Reruns, *, seed: int = 0) -> None:
        self.state = state
        graph = state.graph
        self._random = random.Random(seed)
        self._lump = _LUMP * sum(graph.nbytes) / len(graph)
        self._read = [(v, u) for v, row in enumerate(state.consumers) for u in row]
        # The reruns in a list, to draw from, and where each is in it.
        self._reruns: list[Rerun] = []
        self._places: dict[Rerun, int] = {}
        self._log: list[tuple[bool, Rerun]] = []
        self._warmth = graph.base_cost / len(graph) * min(1.0, math.sqrt(_HOT / len(graph)))
        bare = int(Reruns(graph, state.budget).excess().sum())
        self._unit_price = graph.base_cost / max(1, bare)
        self._price = self._most_price = self._unit_price
        self._best: set[Rerun] | None = None
        self._best_cost = 0
        self._over = 0.0
        self._lost = 0
        # A schedule that takes more time would be refused.
        self._dearest = 0.0
        # Whether a schedule has fitted since a run began.
        self._fitted = False

    def run(self, *, deadline: float, enough: int, fresh: bool = True, moves: int = 0) -> None:
        """Anneal for a number of moves, or until the deadline if that is 0, and leave the state at the best schedule.

        That is the cheapest that fits, or the one with the least excess if none does. Ends early when the time is no
        more than `enough`. A search that is not `fresh` starts from the schedule at hand.
        """
        begin, done = time.monotonic(), 0
        start = self.state.reruns()
        start_over = self._begin(start, fresh)
        while (now := time.monotonic()) < deadline and (self._best is None or self._best_cost > enough):
            past = done / moves if moves else (now - begin) / (deadline - begin)
            if past >= 1:
                break
            self._batch(self._warmth * (1 - past) ** 2)
            done += _BATCH
            if self._lost > (_LOST if fresh else _STRAY) if self._fitted else past > _FIRST:
                self._go_back()
        if self._best is not None:
            self.state.replace(self._best)
        elif start_over < self._over:
            self.state.replace(start)

    def _begin(self, start: set[Rerun], fresh: bool) -> float:
        """Go on without reruns, or from a schedule that fits; returns what the start is over."""
        self._best = None
        self._enter(start)
        over = self._over
        self._price, self._most_price = _PRICE_START * self._unit_price, _PRICE_MOST * self._unit_price
        if self._best is not None and not fresh:
            self._price = _PRICE_BACK * self._unit_price
        else:
            self._fitted = False
            self._enter(set())
        return over

    def _go_back(self) -> None:
        """Go on from the best schedule, if one is known."""
        if self._best is None:
            return
        if not self._fitted:
            self._price = _PRICE_BACK * self._unit_price
        self._enter(self._best)

    def _batch(self, warmth: float) -> None:
        """Some moves at one temperature and price; then the next price."""
        self._lost += _BATCH
        for _ in range(_BATCH):
            self._step(warmth)
        if self._over:
            step = _PRICE_STEP if self._fitted else _PRICE_RISE
            self._price *= step
            if self._price > self._most_price:
                self._price, self._most_price = self._unit_price, 2 * self._most_price
        else:
            self._price /= _PRICE_STEP

    def _step(self, warmth: float) -> None:
        """One move, undone if it is refused."""
        self._log.clear()
        cost = self.state.cost
        # Metropolis' rule with the chance drawn first: what cannot be accepted need not be tried.
        allowed = warmth * self._random.expovariate(1)
        self._dearest = cost + allowed + self._price * self._over
        self._move()
        if not self._log:
            return
        over = self._excess()
        rise = self.state.cost - cost + self._price * (over - self._over)
        if rise <= allowed:
            self._over = over
            self._note()
        else:
            self._revert()

    def _note(self) -> None:
        """Keep the schedule if it is the best one that fits."""
        if self._over:
            return
        self._lost, self._fitted = 0, True
        if self._best is None or self.state.cost < self._best_cost:
            self._best, self._best_cost = set(self._reruns), self.state.cost

    # Energy.

    def _excess(self) -> float:
        """Bytes over the budget, and a lump for each event over it; summed over events."""
        over = self.state.memory - self.state.budget
        over = over[over > 0]
        return float(over.sum() + self._lump * len(over)) if len(over) else 0.0

    # Moves.

    def _move(self) -> None:
        kind = self._random.random()
        if kind < 0.45 or not self._reruns:
            self._renew(*(self._waiting() if self._over and self._random.random() < 0.7 else self._use()))
            return
        stage, op = self._random.choice(self._reruns)
        if kind < 0.8:
            self._undo(stage, op)
            return
        other = self._another(stage, op)
        if op < other < self.state.n and not self.state.has(other, op):
            self._undo(stage, op)
            self._run(other, op, 2 if self._random.random() < 0.5 else 0)

    def _waiting(self) -> Rerun:
        """The next use, by its stage, of a value that waits at an event over the budget; (0, 0) if none is met."""
        state = self.state
        crowded = np.flatnonzero(state.memory > state.budget)
        key = state.keys[int(crowded[self._random.randrange(len(crowded))])]
        for _ in range(20):
            op = self._random.randrange(max(1, key // state.n))
            copy = state.copy_at(op, key)
            if copy >= 0 and state.ends[op][copy] > key:
                return state.next_use(op, key) // state.n, op
        return 0, 0

    def _use(self) -> Rerun:
        """A random use of a random value, by its stage; (0, 0) if nothing is ever read."""
        if not self._read:
            return 0, 0
        op, user = self._random.choice(self._read)
        return self._random.choice(self.state.starts[user]) // self.state.n, op

    def _another(self, stage: int, op: int) -> int:
        """Another stage for a rerun: near, or that of a use."""
        users = self.state.consumers[op]
        if not users or self._random.random() < 0.5:
            far = self._random.randint(1, max(1, self.state.n // 20))
            return stage + self._random.choice((-1, 1)) * far
        return self._random.choice(self.state.starts[self._random.choice(users)]) // self.state.n

    def _renew(self, stage: int, op: int) -> None:
        """Run an op again for a use in `stage`, some of its inputs too."""
        if stage > op and self._random.random() < 0.3:
            stage = self.state.early(op, stage)
        self._run(stage, op, _DEPTH if self._random.random() < 0.7 else 0)

    def _run(self, stage: int, op: int, depth: int) -> None:
        """Run an op again unless it runs in that stage or is too dear; inputs that are gone too by chance, `depth` deep."""
        state, key = self.state, stage * self.state.n + op
        if stage <= op or state.has(stage, op) or state.cost + state.graph.cost[op] > self._dearest:
            return
        for p in state.graph.inputs[op] if depth else ():
            if state.ends[p][state.copy_at(p, key)] < key and self._random.random() < 0.5:
                self._run(stage, p, depth - 1)
        self._add((stage, op))
        self._log.append((True, (stage, op)))

    def _undo(self, stage: int, op: int) -> None:
        """Undo a rerun and those that only it read."""
        state, key = self.state, stage * self.state.n + op
        self._remove((stage, op))
        self._log.append((False, (stage, op)))
        for p in state.graph.inputs[op]:
            copy = state.copy_at(p, key)
            start = state.starts[p][copy]
            if start != p * (state.n + 1) and state.ends[p][copy] == start:
                self._undo(start // state.n, p)

    # The state and the list of its reruns.

    def _enter(self, reruns: set[Rerun]) -> None:
        """Go on from a schedule."""
        self.state.replace(reruns)
        self._reruns = sorted(reruns)
        self._places = {rerun: i for i, rerun in enumerate(self._reruns)}
        self._over = self._excess()
        self._note()

    def _add(self, rerun: Rerun) -> None:
        self.state.add(*rerun)
        self._places[rerun] = len(self._reruns)
        self._reruns.append(rerun)

    def _remove(self, rerun: Rerun) -> None:
        self.state.remove(*rerun)
        at, last = self._places.pop(rerun), self._reruns.pop()
        if last != rerun:
            self._reruns[at] = last
            self._places[last] = at

    def _revert(self) -> None:
        for added, rerun in reversed(self._log):
            (self._remove if added else self._add)(rerun)
