"""What peak no schedule is below, and the op that sets it.

**Problem.** For an op, the least peak of any schedule in any order that runs it once.

**Method.** Backwards. Let a set of values be alive together, first the op's output alone. One of them, `q`, was made last:
while it was made, its inputs and all others of the set were alive, and before that the set without `q` and with the inputs
of `q` was. So the least peak is a path from the op's output to the empty set whose largest step is least:
Dijkstra's algorithm with a maximum in place of the sum. Its first step is the op's working set.

**Optimality.** Exact if the search reaches the empty set; stopped before, what it has got to is still a lower bound, since
it takes sets by rising peak.

**Complexity.** Exponential; `states` sets for each of the `ops` largest working sets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from autoremat.solve._schedule import OpGraph


@dataclass(frozen=True, slots=True)
class Floor:
    """No schedule has a peak below `nbytes`, because of `op`."""

    nbytes: int
    op: int


def floor(graph: OpGraph, *, ops: int = 16, states: int = 500) -> Floor:
    """Return the highest floor that the `ops` ops with the largest working sets give."""
    largest = sorted(range(len(graph)), key=lambda v: (-graph.working_set(v), v))[:ops]
    found = [Floor(_least_peak(graph, op, states), op) for op in largest]
    return max(found, key=lambda f: (f.nbytes, -f.op))


def _least_peak(graph: OpGraph, op: int, states: int) -> int:
    """A lower bound on the peak of any schedule that runs `op`."""
    start = frozenset((op,))
    done: set[frozenset[int]] = set()
    pushed = 0
    heap: list[tuple[int, int, int, frozenset[int]]] = [(0, op, 0, start)]
    while True:
        peak, _, _, alive = heapq.heappop(heap)
        if not alive or len(done) > states:
            return peak
        if alive in done:
            continue
        done.add(alive)
        for last in sorted(alive):
            there = alive.union(graph.inputs[last])
            before = there - {last}
            if before not in done:
                pushed += 1
                step = max(peak, sum(graph.nbytes[v] for v in there))
                # Of equal peaks, those that reach back furthest first.
                heapq.heappush(heap, (step, max(before, default=-1), pushed, before))
