"""The judge against enumeration, and the closing of keep-sets."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import Problem, Storage, close, evaluate
from support.graphs import cost_of, problem, problems, random_problem

KEEP = (Storage("keep", 8),)


def chain(*, once: tuple[int, ...] = (), storages: dict[int, tuple[Storage, ...]] | None = None) -> Problem:
    """0 -> 1 -> 2 -> 3 (output); 2 and 3 are demanded; 4 = derivative-only function of 1, demanded."""
    return problem(
        [((0,), (1,), 10), ((1,), (2,), 20), ((2,), (3,), 40), ((1,), (4,), 80)],
        storages=dict.fromkeys(range(1, 5), KEEP) if storages is None else storages,
        outputs=(3,),
        demanded=(2, 4),
        once=once,
    )


def test_nothing_kept_runs_again_what_is_demanded() -> None:
    plan = evaluate(chain(), {})
    assert plan.forward == {0, 1, 2}
    assert plan.rerun == {0, 1, 3}
    assert (plan.nbytes, plan.cost) == (0, 10 + 20)  # op 3 runs in the backward pass alone


def test_a_kept_derivative_runs_forward() -> None:
    plan = evaluate(chain(), {2: 0, 4: 0})
    assert plan.forward == {0, 1, 2, 3}
    assert plan.rerun == frozenset()
    assert (plan.nbytes, plan.cost) == (16, 0)


def test_what_is_kept_for_nothing_is_charged() -> None:
    assert evaluate(chain(), {2: 0, 3: 0, 4: 0}).nbytes == 24


def test_storage_costs_count() -> None:
    p = chain(storages={v: (Storage("keep", 8), Storage("pack", 1, 5)) for v in range(1, 5)})
    plan = evaluate(p, {2: 1, 4: 0})
    assert (plan.nbytes, plan.cost) == (9, 5)


def test_an_op_that_may_not_run_again_is_named() -> None:
    with pytest.raises(ValueError, match=r"not closed: op 1 \(op1\) may not run again.*outputs \(2,\)"):
        evaluate(chain(once=(1,)), {4: 0})


def test_an_open_input_must_be_kept() -> None:
    p = problem([((0,), (1,), 1)], storages={0: KEEP, 1: KEEP}, open_inputs=(0,), demanded=(1,))
    with pytest.raises(ValueError, match=r"not closed: the backward pass needs value 0, an input"):
        evaluate(p, {})
    assert evaluate(p, {0: 0}).nbytes == 8


@pytest.mark.parametrize("keep", [{2: 1}, {0: 0}, {9: 0}, {2: -1}])
def test_a_storage_that_does_not_exist(keep: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="has no storage"):
        evaluate(chain(), keep)


@given(problems(ops=6), st.randoms(use_true_random=False))
def test_evaluate_equals_enumeration(p: Problem, rng: random.Random) -> None:
    keep = {v: rng.randrange(len(s)) for v, s in enumerate(p.storages) if s and rng.random() < 0.4}
    expected = cost_of(p, keep)
    if expected is None:
        with pytest.raises(ValueError, match="not closed"):
            evaluate(p, keep)
    else:
        plan = evaluate(p, keep)
        assert (plan.nbytes, plan.cost) == expected
        assert plan.keep == keep


def test_close_keeps_what_may_not_run_again() -> None:
    assert close(chain(once=(1,)), {4: 0}) == {2: 0, 4: 0}


def test_close_takes_the_cheapest_storage() -> None:
    p = chain(once=(1,), storages={v: (Storage("keep", 8), Storage("pack", 1, 5)) for v in range(1, 5)})
    assert close(p, {})[2] == 1
    assert close(p, {}, price=None)[2] == 1
    assert close(p, {}, price=Fraction(1, 2))[2] == 0  # 8/2 is less than 1/2 + 5


def test_close_drops_what_is_not_read() -> None:
    assert close(chain(), {1: 0, 2: 0, 3: 0, 4: 0}) == {2: 0, 4: 0}


def test_close_drops_what_comes_anyway() -> None:
    p = problem([((0,), (1, 2), 3)], storages={1: KEEP, 2: KEEP}, outputs=(1,), demanded=(1, 2))
    assert close(p, {1: 0}) == {}
    assert close(p, {1: 0, 2: 0}) == {1: 0, 2: 0}


def test_close_moves_to_the_backward_pass_what_cannot_be_kept_whole() -> None:
    # Derivative-only, not repeatable, output 3 has no storage: to keep 2 alone is no plan, to run it late is.
    rows = [((0,), (1,), 3), ((1,), (2, 3), 5)]
    p = problem(rows, storages={1: KEEP, 2: KEEP}, outputs=(1,), demanded=(2, 3), once=(1,))
    assert close(p, {2: 0}) == {}
    assert evaluate(p, {}).rerun == {0, 1}


def test_close_says_what_is_stuck() -> None:
    p = problem([((0,), (1,), 3)], storages={}, outputs=(1,), demanded=(1,), once=(0,))
    with pytest.raises(ValueError, match=r"op 0 \(op0\) may not run again.*output 1 .*no storage"):
        close(p, {})


def test_a_closed_set_can_be_evaluated_and_stays() -> None:
    closed = 0
    for seed in range(400):
        rng = random.Random(seed)
        p = random_problem(rng)
        keep = {v: rng.randrange(len(s)) for v, s in enumerate(p.storages) if s and rng.random() < 0.4}
        try:
            found = close(p, keep)
        except ValueError:
            continue
        closed += 1
        plan = evaluate(p, found)
        assert close(p, found) == found == plan.keep
        try:
            before = evaluate(p, keep)
        except ValueError:
            continue
        assert plan.nbytes <= before.nbytes
        assert plan.cost <= before.cost
    assert closed > 300
