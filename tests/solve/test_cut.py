"""The cut at one price against enumeration and against networkx."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve import Problem, Storage, cut, evaluate
from autoremat.solve._cut import Cutter
from autoremat.solve._maxflow import libraries
from autoremat.solve._network import build
from support.graphs import every_plan, networkx_value, problem, problems, random_problem

KEEP = (Storage("keep", 8),)
PRICES = st.fractions(min_value=0, max_value=30, max_denominator=40)


@settings(max_examples=300)
@given(problems(), PRICES)
def test_cut_equals_enumeration(p: Problem, price: Fraction) -> None:
    plans = every_plan(p)
    if not plans:
        with pytest.raises(ValueError, match="no plan exists"):
            cut(p, price)
        return
    plan = cut(p, price)
    assert plan == evaluate(p, plan.keep)
    assert price * plan.nbytes + plan.cost == min(price * b + c for b, c in plans)


def test_cut_equals_enumeration_on_larger_graphs() -> None:
    feasible = 0
    for seed in range(150):
        rng = random.Random(seed)
        p = random_problem(rng, ops=9)
        plans = every_plan(p)
        if not plans:
            continue
        feasible += 1
        least, fewest = cut(p, 0), cut(p, math.inf)
        assert (least.cost, least.nbytes) == min((c, b) for b, c in plans), f"seed {seed}"
        assert (fewest.nbytes, fewest.cost) == min(plans), f"seed {seed}"
        for _ in range(4):
            price = Fraction(rng.randint(0, 60), rng.randint(1, 20))
            plan = cut(p, price)
            assert price * plan.nbytes + plan.cost == min(price * b + c for b, c in plans), f"seed {seed}"
    assert feasible > 100


@pytest.mark.parametrize("scale", [1, 2**31, 2**64, 10**40])
def test_cut_equals_networkx_at_any_size(scale: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        p = random_problem(rng, ops=14, top=10 * scale)
        for _ in range(2):
            price = Fraction(rng.randint(1, scale), rng.randint(1, scale))
            try:
                plan = cut(p, price)
            except ValueError:
                continue
            assert price * plan.nbytes + plan.cost == networkx_value(p, price), f"seed {seed}"


def test_libraries_give_the_same_plan() -> None:
    for seed in range(60):
        p = random_problem(random.Random(seed), ops=20, top=2**40)
        try:
            cutters = [Cutter(p, network=build(p, library=library)) for library in libraries()]
        except ValueError:
            continue
        for price in (0, Fraction(12345678901, 98765432109), 1, math.inf):
            assert len({str(c.cut(price)) for c in cutters}) == 1


def test_huge_integers_stay_exact() -> None:
    big = 10**30
    p = problem([((0,), (1,), big + 1)], storages={1: (Storage("keep", big),)}, outputs=(1,), demanded=(1,))
    assert cut(p, 1).keep == {1: 0}
    assert cut(p, Fraction(big + 2, big)).keep == {}
    assert cut(p, Fraction(big, big)).nbytes == big


def test_huge_prices_of_nothing() -> None:
    p = problem([((0,), (1,), 0)], storages={1: (Storage("keep", 0),)}, outputs=(1,), demanded=(1,))
    for price in (10**30, Fraction(1, 10**30), Fraction(10**30 + 1, 10**30)):
        assert (cut(p, price).nbytes, cut(p, price).cost) == (0, 0)


def test_equal_problems_give_equal_plans() -> None:
    for seed in range(30):
        plans = []
        for _ in range(2):
            p = random_problem(random.Random(seed), ops=12, top=2)
            try:
                plans.append(cut(p, 1))
            except ValueError:
                plans.append(None)
        assert plans[0] == plans[1]


def test_derivative_only_work_costs_nothing_where_it_runs_once() -> None:
    # cos x for sin x: run it in the backward pass from a free input, keep nothing.
    p = problem([((0,), (1,), 5), ((0,), (2,), 7)], storages={1: KEEP, 2: KEEP}, outputs=(1,), demanded=(2,))
    plan = cut(p, 0)
    assert (plan.nbytes, plan.cost, plan.rerun) == (0, 0, {1})


def test_storages_compete() -> None:
    rows = (Storage("keep", 80), Storage("pack", 10, 7), Storage("offload", 0, 50))
    p = problem([((0,), (1,), 1000)], storages={1: rows}, outputs=(1,), demanded=(1,))
    assert [cut(p, Fraction(n, 20)).keep[1] for n in (0, 1, 10, 100)] == [0, 0, 1, 2]
    assert cut(p, Fraction(43, 10)).keep[1] == 2  # 10 bytes at 4.3 are the 43 that it costs more: fewer bytes


@pytest.mark.parametrize("price", [0, 1, math.inf])
def test_empty_graph(price: float) -> None:
    plan = cut(problem([], storages={}), price)
    assert (plan.keep, plan.forward, plan.rerun, plan.nbytes, plan.cost) == (
        {},
        frozenset(),
        frozenset(),
        0,
        0,
    )


@pytest.mark.parametrize("price", [0, 1, math.inf])
def test_nothing_demanded(price: float) -> None:
    plan = cut(problem([((0,), (1,), 3)], storages={1: KEEP}, outputs=(1,)), price)
    assert (plan.keep, plan.forward, plan.rerun, plan.cost) == ({}, {0}, frozenset(), 0)


def test_what_costs_nothing_and_is_not_read_is_not_kept() -> None:
    p = problem(
        [((0,), (1,), 3), ((1,), (2,), 3)],
        storages={1: (Storage("keep", 0),), 2: (Storage("keep", 0),)},
        outputs=(2,),
        demanded=(2,),
    )
    assert cut(p, 1).keep == {2: 0}


@pytest.mark.parametrize("price", [-1, Fraction(-1, 3), 0.5, math.nan, -math.inf])
def test_prices_are_checked(price: float) -> None:
    with pytest.raises(ValueError, match="a price is a non-negative Fraction or int"):
        cut(problem([], storages={}), price)


def test_infeasible_names_the_value() -> None:
    p = problem([((0,), (1,), 3)], storages={}, outputs=(1,), demanded=(1,), once=(0,))
    with pytest.raises(ValueError, match=r"no plan exists.*value 1, made by op 0 \(op0\)"):
        cut(p, 1)
    q = problem([((0,), (1,), 3)], storages={}, open_inputs=(0,), outputs=(1,), demanded=(1,))
    with pytest.raises(ValueError, match=r"no plan exists.*value 0, made by an input"):
        cut(q, 1)
