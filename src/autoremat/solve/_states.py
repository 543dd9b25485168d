"""The best schedule of a small graph, by search over sets of values.

**Problem.** As in `_order`: first executions in input order, any op again at any place, the least time under a budget.

**Method.** A state is the number of ops that have run, and the set of values that are alive. Steps: run an op whose
inputs are alive and whose output fits beside all that is alive (its cost; free for a first execution), or
forget a value (free). Dijkstra's algorithm from nothing to everything run once.

**Optimality.** Exact: every schedule is such a path, with copies forgotten after their last use.

**Complexity.** O(n · 2^n) states; the search gives up at a limit.
"""

from __future__ import annotations

import heapq

from autoremat.solve._schedule import OpGraph

State = tuple[int, int]
"""(ops that have run first, bit mask of values alive)"""


def search(graph: OpGraph, budget_bytes: int, *, limit: int, below: int | None) -> tuple[int, ...] | None:
    """A schedule with least time; with `below`, if that is less than `below` extra. `None` if there is none.

    Raises `TimeoutError` after `limit` states.
    """
    n = len(graph)
    needs = [sum(1 << p for p in row) for row in graph.inputs]
    start: State = (0, 0)
    cost: dict[State, int] = {start: 0}
    came: dict[State, tuple[State, int]] = {}
    heap: list[tuple[int, int, State]] = [(0, 0, start)]
    done: set[State] = set()
    while heap:
        spent, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        ran, alive = state
        if ran == n:
            return _path(came, state)
        if len(done) > limit:
            raise TimeoutError
        for after, op, extra in _steps(graph, needs, budget_bytes, ran, alive):
            total = spent + extra
            if (below is None or total < below) and total < cost.get(after, total + 1):
                cost[after] = total
                came[after] = state, op
                heapq.heappush(heap, (total, -after[0], after))
    return None


def _steps(
    graph: OpGraph, needs: list[int], budget: int, ran: int, alive: int
) -> list[tuple[State, int, int]]:
    """What can follow a state: the next state, the op that runs (-1: a value is forgotten), its extra cost."""
    held = sum(graph.nbytes[v] for v in range(ran) if alive >> v & 1)
    found: list[tuple[State, int, int]] = []
    for op in range(ran + 1):
        if alive >> op & 1 or needs[op] & ~alive or held + graph.nbytes[op] > budget:
            continue
        first = op == ran
        found.append(((ran + first, alive | 1 << op), op, 0 if first else graph.cost[op]))
    found += [((ran, alive & ~(1 << v)), -1, 0) for v in range(ran) if alive >> v & 1]
    return found


def _path(came: dict[State, tuple[State, int]], state: State) -> tuple[int, ...]:
    ops: list[int] = []
    while state in came:
        state, op = came[state]
        if op >= 0:
            ops.append(op)
    return tuple(reversed(ops))
