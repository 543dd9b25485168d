"""Schedules under a budget against enumeration, their bounds, and what is said when there is none."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.graphs import load
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat import InfeasibleBudgetError
from autoremat.solve import (
    NoScheduleFoundError,
    OpGraph,
    ScheduleResult,
    ScheduleStatus,
    schedule,
    simulate,
)
from autoremat.solve._floor import floor
from autoremat.solve._order import Effort
from support.opgraphs import FOLDER, PUBLISHED, least_cost, op_graph, op_graphs, random_graph


def check(graph: OpGraph, budget: int, found: ScheduleResult) -> None:
    """What holds for every result."""
    seen = simulate(graph, found.schedule)
    assert seen == found.timeline
    assert found.peak_bytes <= budget
    assert graph.base_cost <= found.lower_bound <= found.cost
    assert (found.status is ScheduleStatus.OPTIMAL) == (found.gap == 0)
    first = list(dict.fromkeys(found.schedule))
    assert first == sorted(first), "first executions keep the input order"


def budgets(graph: OpGraph) -> st.SearchStrategy[int]:
    peak = simulate(graph, range(len(graph))).peak_bytes
    return st.integers(min(graph.working_set(graph.floor_op), peak - 1), peak)


@settings(max_examples=60)
@given(op_graphs(), st.data())
def test_optimal_equals_enumeration(graph: OpGraph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    least = least_cost(graph, budget)
    if least is None:
        with pytest.raises(InfeasibleBudgetError):
            schedule(graph, budget, effort="optimal", time_limit_s=30)
        return
    found = schedule(graph, budget, effort="optimal", time_limit_s=30)
    check(graph, budget, found)
    assert found.cost == least
    assert found.status is ScheduleStatus.OPTIMAL


@settings(max_examples=60)
@given(op_graphs(), st.data())
def test_no_schedule_is_below_the_floor(graph: OpGraph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    if floor(graph).nbytes > budget:
        assert least_cost(graph, budget) is None


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_other_efforts_keep_budget_and_bound(effort: Effort) -> None:
    found_some = 0
    for seed in range(12):
        rng = random.Random(seed)
        n = 12
        graph = random_graph(rng, n, most=9)
        budget = round(0.8 * simulate(graph, range(n)).peak_bytes)
        least = least_cost(graph, budget)
        if least is None:
            with pytest.raises((InfeasibleBudgetError, NoScheduleFoundError)):
                schedule(graph, budget, effort=effort, time_limit_s=0.5)
            continue
        found = schedule(graph, budget, effort=effort, time_limit_s=5)
        check(graph, budget, found)
        assert found.lower_bound <= least <= found.cost
        found_some += 1
    assert found_some >= 4


def test_fast_is_the_same_every_time() -> None:
    graph = layered(40)
    budget = round(0.9 * simulate(graph, range(40)).peak_bytes)
    one, two = (schedule(graph, budget, effort="fast", time_limit_s=60) for _ in range(2))
    assert one.schedule == two.schedule


def test_the_peak_needs_no_rerun() -> None:
    graph = layered(30)
    found = schedule(graph, simulate(graph, range(30)).peak_bytes)
    assert found.schedule == tuple(range(30))
    assert found.status is ScheduleStatus.OPTIMAL
    assert found.gap == 0


def layered(n: int, seed: int = 0) -> OpGraph:
    """Ops that read one or two of the ten before."""
    rng = random.Random(seed)
    near = [range(max(0, v - 10), v) for v in range(n)]
    return OpGraph(
        nbytes=tuple(rng.randint(1, 99) for _ in range(n)),
        cost=tuple(rng.randint(1, 99) for _ in range(n)),
        inputs=tuple(tuple(sorted(rng.sample(row, min(len(row), rng.randint(1, 2))))) for row in near),
    )


def test_a_budget_below_the_working_set_names_the_op() -> None:
    graph = OpGraph(nbytes=(4, 3, 5), cost=(1, 1, 1), inputs=((), (0,), (0, 1)), names=("a", "b", "c"))
    with pytest.raises(
        InfeasibleBudgetError, match=r"within 11 bytes.*floor is 12 bytes, set by op c"
    ) as caught:
        schedule(graph, 11)
    assert (caught.value.floor_bytes, caught.value.op) == (12, "c")


def test_the_floor_sees_what_the_last_input_needs() -> None:
    """Op 3 reads 1 and 2; while the later of them is made, the other waits and 0 is there."""
    graph = op_graph((9, 1, ()), (5, 1, (0,)), (5, 1, (0,)), (1, 1, (1, 2)))
    assert graph.working_set(graph.floor_op) == 14
    assert (floor(graph).nbytes, floor(graph).op) == (19, 3)
    with pytest.raises(InfeasibleBudgetError, match="floor is 19 bytes, set by op 3"):
        schedule(graph, 18)


def test_the_floor_is_a_peak_that_some_order_has() -> None:
    """With unlimited states it is exact: here a schedule in input order reaches it."""
    graph = op_graph((4, 1, ()), (3, 2, (0,)), (5, 3, (1,)), (1, 4, (0, 2)))
    assert floor(graph).nbytes == 10 == simulate(graph, (0, 1, 2, 0, 3)).peak_bytes


def test_out_of_time_is_not_infeasible() -> None:
    graph = layered(200, seed=3)
    least = floor(graph).nbytes
    with pytest.raises(NoScheduleFoundError, match="no proof that there is none") as caught:
        schedule(graph, least, time_limit_s=1e-6)
    assert caught.value.floor_bytes == least
    assert caught.value.lowest_bytes > least


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_bad_limits(limit: float) -> None:
    with pytest.raises(ValueError, match="time_limit_s must be positive"):
        schedule(op_graph((1, 1, ())), 1, time_limit_s=limit)


def test_bad_effort() -> None:
    with pytest.raises(ValueError, match="fast, balanced, optimal; got 'best'"):
        schedule(op_graph((1, 1, ())), 1, effort="best")  # pyright: ignore[reportArgumentType]


# Graph, share of the peak, recompute time of the best schedule in percent; `None`: infeasible.
PROVEN = [
    ("vgg16_train", 90, 1.968),
    ("vgg16_train", 80, None),
    ("vgg19_train", 80, 2.756),
    ("unet_train", 70, 2.967),
    ("fcn8_train", 80, 0.136),
    ("resnet50_train", 80, 0.279),
    ("mobilenet_train", 70, 0.626),
    ("random_layered_n100", 50, None),
]


@PUBLISHED
@pytest.mark.parametrize(("name", "share", "percent"), PROVEN)
def test_published_graphs(name: str, share: int, percent: float | None) -> None:
    graph = load(FOLDER / f"{name}.json")
    budget = -(-share * simulate(graph, range(len(graph))).peak_bytes // 100)
    if percent is None:
        with pytest.raises(InfeasibleBudgetError, match="no schedule has a peak within"):
            schedule(graph, budget)
        return
    found = schedule(graph, budget)
    check(graph, budget, found)
    assert found.status is ScheduleStatus.OPTIMAL
    assert 100 * found.timeline.recompute_cost / graph.base_cost == pytest.approx(percent, abs=5e-4)
