"""Simulated annealing keeps the budget, its books and the best schedule."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import OpGraph, simulate
from autoremat.solve._anneal import Annealer
from autoremat.solve._reruns import Rerun, Reruns
from support.opgraphs import least_cost, op_graph, op_graphs, random_graph


def annealed(state: Reruns, *, seed: int = 0, moves: int = 2000) -> set[Rerun]:
    Annealer(state, seed=seed).run(deadline=math.inf, enough=state.graph.base_cost, moves=moves)
    return state.reruns()


@given(op_graphs(), st.integers(0, 2**32))
def test_it_ends_with_the_best_schedule_met(graph: OpGraph, seed: int) -> None:
    rng = random.Random(seed)
    state = Reruns(graph, 10)
    state.replace({(t, v) for t in range(len(graph)) for v in range(t) if rng.random() < 0.3})
    before, fitted = state.cost, state.fits()
    annealed(state, seed=seed, moves=500)
    seen = simulate(graph, state.schedule())
    assert seen.alive == tuple(state.memory.tolist())
    assert seen.cost == state.cost
    if fitted:
        assert state.fits()
        assert state.cost <= before
    least = least_cost(graph, state.budget)
    assert not state.fits() or (least is not None and least <= state.cost)


def test_it_fits_a_schedule_that_is_over_the_budget() -> None:
    """The first value is large and cheap to make again, the others must wait."""
    graph = op_graph((9, 1, ()), (2, 9, (0,)), (2, 9, (1,)), (2, 9, (2,)), (1, 9, (0, 3)))
    assert annealed(Reruns(graph, graph.working_set(graph.floor_op))) == {(4, 0)}


def test_it_leaves_what_is_dearer() -> None:
    """Running the dear op again for its last use would do as well as the cheap one."""
    graph = op_graph((9, 50, ()), (9, 1, (0,)), (9, 5, (1,)), (1, 9, (0, 1)))
    state = Reruns(graph, 27)
    state.replace({(3, 0), (3, 1)})
    assert state.fits()
    assert annealed(state) <= {(3, 1)}


def test_the_same_seed_and_moves_give_the_same_schedule() -> None:
    rng = random.Random(1)
    n = 40
    graph = random_graph(rng, n, most=99)
    budget = round(0.8 * simulate(graph, range(n)).peak_bytes)
    one, two = (annealed(Reruns(graph, budget)) for _ in range(2))
    assert one == two
    assert one
