"""The memory that the local search keeps up to date, against the judge."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import OpGraph, simulate
from autoremat.solve._exchange import Exchange, Neighbourhoods, candidates
from autoremat.solve._repair import Searcher
from autoremat.solve._reruns import Reruns
from support.opgraphs import op_graph, op_graphs


def check(state: Reruns) -> None:
    seen = simulate(state.graph, state.schedule())
    assert seen.alive == tuple(state.memory.tolist())
    assert seen.cost == state.cost
    assert state.fits() == (seen.peak_bytes <= state.budget)


@given(op_graphs(), st.integers(0, 2**32))
def test_memory_after_any_moves(graph: OpGraph, seed: int) -> None:
    rng = random.Random(seed)
    state = Reruns(graph, 10)
    check(state)
    for _ in range(40 if len(graph) > 1 else 0):
        stage = rng.randrange(1, len(graph))
        op = rng.randrange(stage)
        (state.remove if state.has(stage, op) else state.add)(stage, op)
        check(state)
    wanted = {(t, v) for t in range(len(graph)) for v in range(t) if rng.random() < 0.2}
    state.replace(wanted)
    assert state.reruns() == wanted
    check(state)


@given(op_graphs(), st.integers(0, 2**32))
def test_repair_and_prune_keep_the_budget(graph: OpGraph, seed: int) -> None:
    peak = simulate(graph, range(len(graph))).peak_bytes
    least = graph.working_set(graph.floor_op)
    searcher = Searcher(graph, (peak + least) // 2, seed=seed)
    fits = searcher.repair()
    assert fits == searcher.state.fits()
    check(searcher.state)
    if fits:
        before = searcher.state.cost
        searcher.prune()
        assert searcher.state.fits()
        assert searcher.state.cost <= before
        check(searcher.state)


@given(op_graphs(most=8), st.integers(0, 2**32))
def test_an_exchange_keeps_the_budget_and_is_no_worse(graph: OpGraph, seed: int) -> None:
    peak = simulate(graph, range(len(graph))).peak_bytes
    rng = random.Random(seed)
    searcher = Searcher(graph, peak, seed=seed)
    state = searcher.state
    state.replace({(t, v) for t in range(len(graph)) for v in range(t) if rng.random() < 0.1})
    state.budget = simulate(graph, state.schedule()).peak_bytes
    free = [v for v in range(len(graph)) if rng.random() < 0.6]
    before, fixed = state.cost, {r for r in state.reruns() if r[1] not in free}
    better, done = Exchange(state, free, candidates(state, free, depth=2)).solve(seconds=5, seed=0)
    state.replace(better)
    check(state)
    assert done
    assert state.fits()
    assert state.cost <= before
    assert fixed <= better


def test_neighbourhoods_find_a_schedule_that_fits() -> None:
    """The first value is large and cheap to make again, the others must wait."""
    graph = op_graph((9, 1, ()), (2, 9, (0,)), (2, 9, (1,)), (2, 9, (2,)), (1, 9, (0, 3)))
    searcher = Searcher(graph, graph.working_set(graph.floor_op))
    assert not searcher.state.fits()
    Neighbourhoods(searcher).run(deadline=math.inf, enough=0, fit=True)
    assert searcher.state.reruns() == {(4, 0)}
    check(searcher.state)
