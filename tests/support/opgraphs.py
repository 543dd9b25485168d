"""Small op graphs, and oracles for schedules that share nothing with the package.

`naive_alive` follows the definition of liveness copy by copy. `least_cost` walks all sets of copies that can be
alive: it enumerates every schedule whose first executions follow the input order, by what it leaves in memory.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from autoremat.solve import OpGraph

FOLDER = Path(
    os.environ.get("AUTOREMAT_GRAPHS") or Path(__file__).resolve().parents[2].parent / "shared" / "graphs"
)
PUBLISHED = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no published graphs in {FOLDER}; set AUTOREMAT_GRAPHS to their folder"
)


def op_graph(*ops: tuple[int, int, tuple[int, ...]]) -> OpGraph:
    """A graph of (bytes, cost, inputs)."""
    return OpGraph(
        nbytes=tuple(b for b, _, _ in ops),
        cost=tuple(c for _, c, _ in ops),
        inputs=tuple(i for _, _, i in ops),
    )


@st.composite
def op_graphs(draw: st.DrawFn, *, most: int = 12) -> OpGraph:
    """Graphs of 1 to `most` ops with up to three inputs each; bytes and costs may be 0."""
    n = draw(st.integers(1, most))
    sizes = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    inputs = [tuple(sorted(draw(st.sets(st.integers(0, v - 1), max_size=3)))) if v else () for v in range(n)]
    return OpGraph(nbytes=tuple(draw(sizes)), cost=tuple(draw(sizes)), inputs=tuple(inputs))


def naive_alive(graph: OpGraph, schedule: Sequence[int]) -> list[int]:
    """Bytes alive at each step, by asking of each earlier copy whether a later step reads it."""
    found: list[int] = []
    for now in range(len(schedule)):
        held = 0
        for made in range(now + 1):
            op = schedule[made]
            later = range(made + 1, len(schedule))
            again = next((step for step in later if schedule[step] == op), len(schedule))
            reads = [step for step in later if step < again and op in graph.inputs[schedule[step]]]
            if made == now or (reads and reads[-1] >= now):
                held += graph.nbytes[op]
        found.append(held)
    return found


def least_cost(graph: OpGraph, budget_bytes: int) -> int | None:
    """The least time of a schedule under the budget; `None` if there is none.

    Layer by layer: what can be in memory when op `t` has run first, as a bit mask, and the least time for it. Between
    two layers any op may run and any value may go, until nothing gets cheaper.
    """
    needs = [sum(1 << p for p in row) for row in graph.inputs]
    held = [0] * (1 << len(graph))
    for kept in range(1, len(held)):
        low = (kept & -kept).bit_length() - 1
        held[kept] = held[kept & (kept - 1)] + graph.nbytes[low]
    layer = {0: 0}
    for t in range(len(graph)):
        after: dict[int, int] = {}
        for kept, spent in _closed(graph, layer, needs, held, budget_bytes, t).items():
            more = kept | 1 << t
            if not needs[t] & ~kept and held[more] <= budget_bytes:
                after[more] = spent + graph.cost[t]
        layer = after
    return min(layer.values(), default=None)


def _closed(
    graph: OpGraph, layer: dict[int, int], needs: list[int], held: list[int], budget_bytes: int, t: int
) -> dict[int, int]:
    best: dict[int, int] = {}
    work = [(spent, kept) for kept, spent in layer.items()]
    heapq.heapify(work)
    while work:
        spent, kept = heapq.heappop(work)
        if kept in best:
            continue
        best[kept] = spent
        for op in range(t):
            other = kept ^ 1 << op
            if kept >> op & 1:
                heapq.heappush(work, (spent, other))
            elif not needs[op] & ~kept and held[other] <= budget_bytes:
                heapq.heappush(work, (spent + graph.cost[op], other))
    return best


def random_graph(rng: random.Random, n: int, *, most: int) -> OpGraph:
    """A graph of `n` ops with one or two inputs each, the first without; bytes and costs from 1 to `most`."""
    return OpGraph(
        nbytes=tuple(rng.randint(1, most) for _ in range(n)),
        cost=tuple(rng.randint(1, most) for _ in range(n)),
        inputs=tuple(tuple(sorted(rng.sample(range(v), min(v, rng.randint(1, 2))))) for v in range(n)),
    )
