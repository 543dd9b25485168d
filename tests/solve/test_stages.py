"""The lower bound on schedules against enumeration: for any gates, and for those that cutting planes choose."""

from __future__ import annotations

import math
import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoremat.solve import OpGraph, simulate
from autoremat.solve._reruns import Reruns
from autoremat.solve._stages import Bounder, Stages
from support.opgraphs import least_cost, op_graph, op_graphs


def tight(graph: OpGraph, share: float) -> int:
    """A budget between the largest working set and the peak."""
    peak, least = simulate(graph, range(len(graph))).peak_bytes, graph.working_set(graph.floor_op)
    return least + round(share * (peak - least))


@settings(max_examples=150)
@given(op_graphs(most=9), st.floats(0, 1), st.integers(0, 2**32), st.booleans())
def test_no_schedule_is_below_any_program(graph: OpGraph, share: float, seed: int, hinted: bool) -> None:
    budget, n, rng = tight(graph, share), len(graph), random.Random(seed)
    least = least_cost(graph, budget)
    assume(least is not None)
    assert least is not None
    gates = [v for v in range(n) if rng.random() < 0.5]
    crowded = {(t, v) for t in gates for v in range(t) if rng.random() < 0.5}
    program = Stages(graph, budget, gates, crowded)
    if hinted:
        program.hint(Reruns(graph, budget))
    found = program.solve(60)
    assert found.finished
    assert 0 <= found.bound <= least - graph.base_cost
    assert sum(graph.cost[v] for _, v in found.reruns) == found.bound


@settings(max_examples=150)
@given(op_graphs(), st.floats(0, 1))
def test_no_schedule_is_below_the_bound(graph: OpGraph, share: float) -> None:
    budget = tight(graph, share)
    least = least_cost(graph, budget)
    bound = Bounder(graph, budget).run(deadline=math.inf)
    assert least is None or graph.base_cost + bound <= least


def test_a_crowded_rerun_raises_the_bound() -> None:
    """With all gates, memory between them is what is missing."""
    graph = op_graph((3, 3, ()), (1, 5, ()), (4, 1, (0, 1)), (1, 2, (0,)), (2, 2, (1, 2)), (3, 4, (3,)))
    gates = list(range(6))
    crowded = {(t, v) for t in gates for v in range(t)}
    assert Stages(graph, 8, gates, set()).solve(60).bound == 1
    assert Stages(graph, 8, gates, crowded).solve(60).bound == 3
    assert least_cost(graph, 8) == graph.base_cost + 5


def test_a_bound_that_meets_a_schedule_ends_the_search() -> None:
    graph = op_graph((9, 1, ()), (2, 9, (0,)), (2, 9, (1,)), (2, 9, (2,)), (1, 9, (0, 3)))
    state = Reruns(graph, graph.working_set(graph.floor_op))
    state.replace({(4, 0)})
    assert state.fits()
    assert Bounder(graph, state.budget).run(deadline=math.inf, known=state) == 1


def test_large_times_are_rounded_down() -> None:
    """Times whose sum a double does not tell apart: the bound is a little lower, never higher."""
    big = (1 << 60) + 1
    graph = op_graph((9, big, ()), (2, 9, (0,)), (2, 9, (1,)), (2, 9, (2,)), (1, 9, (0, 3)))
    bound = Bounder(graph, graph.working_set(graph.floor_op)).run(deadline=math.inf)
    assert 0.999 * big <= bound <= big
