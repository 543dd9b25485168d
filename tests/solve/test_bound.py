"""The lower bound of several problems together, against enumeration of all plans of all copies."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import LowerBound, Part, Storage, frontier
from support.graphs import Pair, every_plan, hull, problem, random_problem, staircase


def every_choice(plans: list[set[Pair]]) -> list[Pair]:
    """(bytes, cost) of each way to give every copy a plan, dominated ones left out."""
    found: list[Pair] = [(0, 0)]
    for one in plans:
        found = staircase((b + p, c + q) for (b, c), (p, q) in itertools.product(found, staircase(one)))
    return found


def at_least(choices: list[Pair], nbytes: int) -> float:
    """The cost of the cheapest choice with at most so many bytes."""
    return min((c for b, c in choices if b <= nbytes), default=math.inf)


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    rng = draw(st.randoms(use_true_random=False))
    found = [Part(random_problem(rng, ops=5, top=9), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    return [p for p in found if every_plan(p.problem)]


@given(parts())
def test_no_choice_is_below_the_bound(given_parts: list[Part]) -> None:
    choices = every_choice([every_plan(p.problem) for p in given_parts for _ in range(p.copies)])
    bound = LowerBound(given_parts)
    least = choices[0][0]
    assert bound.least_bytes == least
    assert bound.at(least - 1) == math.inf
    previous = math.inf
    for nbytes in range(least, choices[-1][0] + 2):
        value = bound.at(nbytes)
        assert value <= at_least(choices, nbytes)
        assert value <= previous, "more bytes, and a higher bound"
        previous = value


@given(parts())
def test_the_bound_is_the_hull(given_parts: list[Part]) -> None:
    choices = every_choice([every_plan(p.problem) for p in given_parts for _ in range(p.copies)])
    vertices = hull(choices)
    bound = LowerBound(given_parts)
    for (b1, c1), (b2, c2) in itertools.pairwise(vertices):
        assert bound.at(b1, tolerance=Fraction(0)) == c1
        for nbytes in range(b2, b1):
            line = c2 - Fraction(c2 - c1, b1 - b2) * (nbytes - b2)
            assert bound.at(nbytes, tolerance=Fraction(0)) == math.ceil(line)


def test_of_one_problem_it_is_that_of_its_frontier() -> None:
    for seed in range(60):
        p = random_problem(random.Random(seed), ops=20, top=30)
        try:
            found = frontier(p)
        except ValueError:
            continue
        bound = LowerBound([Part(p, 1)])
        for nbytes in range(found.points[-1].nbytes - 1, found.points[0].nbytes + 2, 3):
            assert bound.at(nbytes, tolerance=Fraction(0)) == found.lower_bound(nbytes)


def test_a_tolerance_is_a_share_of_the_hull() -> None:
    links = [((v,), (v + 1,), 10 + v) for v in range(40)]
    keep = {v: (Storage("keep", 50 + v * v),) for v in range(1, 41)}
    p = problem(links, storages=keep, outputs=(40,), demanded=tuple(range(1, 41)))
    exact, rough = LowerBound([Part(p, 3)]), LowerBound([Part(p, 3)])
    for nbytes in range(1000, 60_000, 997):
        best = exact.at(nbytes, tolerance=Fraction(0))
        assert best * 0.8 - 1 <= rough.at(nbytes, tolerance=Fraction(1, 5)) <= best


def test_no_parts_cost_nothing() -> None:
    assert LowerBound([]).at(0) == 0
    assert LowerBound([]).least_bytes == 0
    assert LowerBound([]).at(-1) == math.inf


def test_a_part_without_a_plan_is_refused() -> None:
    stuck = problem([((0,), (1,), 3)], storages={}, outputs=(1,), demanded=(1,), once=(0,))
    with pytest.raises(ValueError, match="no plan exists"):
        LowerBound([Part(stuck, 1)])
