"""The frontier, its bounds and its splices against enumeration."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from benchmarks.synthetic import layered
from hypothesis import given, settings

from autoremat.solve import (
    Assignment,
    Problem,
    Storage,
    close,
    cut,
    evaluate,
    frontier,
    pareto,
    repriced,
    splices,
)
from autoremat.solve._frontier import _hull
from support.graphs import every_plan, hull, problem, problems, random_problem, staircase

KEEP = (Storage("keep", 8),)


@settings(max_examples=300)
@given(problems())
def test_frontier_is_the_enumerated_hull(p: Problem) -> None:
    plans = every_plan(p)
    if not plans:
        with pytest.raises(ValueError, match="no plan exists"):
            frontier(p)
        return
    found = frontier(p)
    assert [(q.nbytes, q.cost) for q in found.points] == hull(plans)
    assert found.exact
    assert found.cuts <= 2 * len(found.points) - 1 + 2 * len(found.between) + 1


def test_ties_abound_in_small_integers() -> None:
    for seed in range(400):
        p = random_problem(random.Random(seed), ops=8, top=2)
        if plans := every_plan(p):
            found = frontier(p)
            assert [(q.nbytes, q.cost) for q in found.points] == hull(plans), f"seed {seed}"


def test_plans_in_the_middle_of_an_edge_are_no_vertices() -> None:
    def plan(nbytes: int, cost: int) -> Assignment:
        return Assignment(keep={}, forward=frozenset(), rerun=frozenset(), nbytes=nbytes, cost=cost)

    vertices = [plan(10, 0), plan(6, 1), plan(0, 13)]
    assert _hull(vertices[::-1]) == (vertices, [])
    assert _hull([plan(4, 5), *vertices, plan(2, 9)]) == (vertices, [plan(4, 5), plan(2, 9)])


@given(problems(top=6))
def test_no_plan_is_below_the_lower_bound(p: Problem) -> None:
    plans = every_plan(p)
    if not plans:
        return
    found = frontier(p)
    for b, c in plans:
        assert found.lower_bound(b) <= c
    for q in (*found.points, *found.between):
        assert found.lower_bound(q.nbytes) == q.cost
    assert found.lower_bound(found.points[-1].nbytes - 1) == math.inf
    assert found.lower_bound(10**9) == found.points[0].cost


def test_prices_are_the_intervals_of_optimality() -> None:
    for seed in range(60):
        p = random_problem(random.Random(seed), ops=12, top=9)
        try:
            found = frontier(p)
        except ValueError:
            continue
        assert found.prices[0][0] == 0
        assert found.prices[-1][1] == math.inf
        for (_, high), (low, _) in pairwise(found.prices):
            assert high == low
        for q, (low, high) in zip(found.points, found.prices, strict=True):
            assert low < high
            price = low + 1 if high == math.inf else (low + high) / 2
            best = cut(p, Fraction(price))
            assert price * best.nbytes + best.cost == price * q.nbytes + q.cost


def test_cuts_stay_within_the_promise() -> None:
    found = frontier(layered(200, seed=1), tolerance=0)
    assert found.exact
    assert found.cuts == 2 * len(found.points) - 1
    assert len(found.points) > 50


@pytest.mark.parametrize("tolerance", [0.5, 0.05, Fraction(1, 1000)])
def test_a_tolerance_is_kept(tolerance: float) -> None:
    p = layered(300, seed=2)
    exact, rough = frontier(p, tolerance=0), frontier(p, tolerance=tolerance)
    span = exact.points[-1].cost - exact.points[0].cost
    assert rough.gap <= Fraction(tolerance) * span
    assert len(rough.points) < len(exact.points)
    assert {q.nbytes for q in rough.points} <= {q.nbytes for q in exact.points} | {
        b.nbytes for b in exact.between
    }
    for a, b in pairwise(rough.points):
        for x in range(b.nbytes, a.nbytes, max(1, (a.nbytes - b.nbytes) // 7)):
            chord = a.cost + Fraction(b.cost - a.cost, a.nbytes - b.nbytes) * (a.nbytes - x)
            assert rough.lower_bound(x) <= exact.lower_bound(x) <= math.ceil(chord)
            assert chord - rough.lower_bound(x) <= rough.gap


def test_max_points() -> None:
    p = layered(300, seed=2)
    found = frontier(p, max_points=9, tolerance=0)
    assert len(found.points) == 9
    assert not found.exact
    with pytest.raises(ValueError, match="max_points at least 2"):
        frontier(p, max_points=1)
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        frontier(p, tolerance=-1)


def test_best_is_within_the_budget() -> None:
    found = frontier(layered(100, seed=3))
    for a, b in pairwise(found.points):
        assert found.best(a.nbytes) == a
        assert found.best(a.nbytes - 1) == b
    assert found.best(found.points[-1].nbytes - 1) is None
    assert found.best(10**18) == found.points[0]


def test_single_point() -> None:
    for p in (problem([], storages={}), problem([((0,), (1,), 3)], storages={1: KEEP}, outputs=(1,))):
        found = frontier(p)
        assert [(q.nbytes, q.cost) for q in found.points] == [(0, 0)]
        assert found.prices == ((0, math.inf),)
        assert (found.gap, found.cuts) == (0, 2)
        assert found.lower_bound(0) == 0
        assert found.lower_bound(-1) == math.inf
        assert pareto(p) == found.points


def test_equal_problems_give_equal_frontiers() -> None:
    first, second = (frontier(layered(200, seed=5)) for _ in range(2))
    assert first == second
    assert pareto(layered(200, seed=5), found=first) == pareto(layered(200, seed=5), found=second)


def test_splices_are_closed_and_between() -> None:
    count = 0
    for seed in range(300):
        p = random_problem(random.Random(seed), ops=30, top=2)
        try:
            found = frontier(p)
        except ValueError:
            continue
        for a, b in pairwise(found.points):
            plans = splices(p, a, b)
            count += len(plans)
            for q in plans:
                assert b.nbytes < q.nbytes < a.nbytes
                assert found.lower_bound(q.nbytes) <= q.cost < b.cost
                assert q == evaluate(p, q.keep)
                assert close(p, q.keep) == q.keep
            assert splices(p, b, a) == []
            assert splices(p, a, a) == []
    assert count > 50


def test_identical_layers_are_spliced_one_by_one() -> None:
    # Eight equal links: on the hull all are kept or none; splices give every number between, at best cost.
    rows = [((v,), (v + 1,), 10) for v in range(8)]
    p = problem(rows, storages=dict.fromkeys(range(1, 9), KEEP), outputs=(8,), demanded=tuple(range(1, 9)))
    found = frontier(p)
    assert [(q.nbytes, q.cost) for q in found.points] == [(64, 0), (0, 80)]
    assert [(q.nbytes, q.cost) for q in pareto(p)] == [(64 - 8 * i, 10 * i) for i in range(9)]


def test_splice_positions_are_bounded() -> None:
    p = layered(600, seed=0, jitter=0)
    a, b = frontier(p).points[0], frontier(p).points[-1]
    assert len(splices(p, a, b, limit=5)) <= 10


@given(problems())
def test_pareto_holds_no_more_than_enumeration(p: Problem) -> None:
    plans = every_plan(p)
    if not plans:
        return
    found = pareto(p)
    pairs = [(q.nbytes, q.cost) for q in found]
    assert set(hull(plans)) <= set(pairs)
    for (b1, c1), (b2, c2) in pairwise(pairs):
        assert b1 > b2
        assert c1 < c2
    best = dict(staircase(plans))
    for b, c in pairs:
        assert c >= min(cost for nbytes, cost in best.items() if nbytes <= b)


@given(problems())
def test_plans_judged_at_other_prices(p: Problem) -> None:
    """What is optimal where half of the operations cost nothing: none of it is below the true frontier, and its hull is its own."""
    gratis = replace(p, op_cost=tuple(0 if i % 2 else c for i, c in enumerate(p.op_cost)))
    if not every_plan(p):
        return
    solved = pareto(gratis)
    points, prices = repriced(p, solved)
    pairs = [(q.nbytes, q.cost) for q in points]
    assert points == [evaluate(p, q.keep) for q in points]
    assert pairs == staircase([(q.nbytes, evaluate(p, q.keep).cost) for q in solved])[::-1]
    assert list(prices) == hull(pairs)
    best = staircase(every_plan(p))
    assert all(cost >= min(c for b, c in best if b <= nbytes) for nbytes, cost in pairs)
    for (nbytes, cost), (low, high) in prices.items():
        for other_bytes, other in pairs:
            for price in (low, high if high != math.inf else low + 1):
                assert cost + price * nbytes <= other + price * other_bytes
