"""Schedules are optimal, by the closed formula and by enumeration; what they say can be done, by simulation."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import Schedule, binomial, forward_steps


@functools.cache
def least_advances(length: int, places: int) -> int:
    """By trying every place for the next snapshot."""
    if length <= 1:
        return 0
    if places == 1:
        return length * (length - 1) // 2
    return min(
        k + least_advances(k, places) + least_advances(length - k, places - 1) for k in range(1, length)
    )


def simulate(schedule: Schedule) -> int:
    """Do the actions; returns the steps advanced before and between the reversals, or fails."""
    advanced = 0
    places: dict[int, int] = {}
    in_hand = 0

    def sections(first: int, last: int) -> None:
        nonlocal in_hand, advanced
        for j in range(first, last):
            assert in_hand == schedule.begin[j]
            assert schedule.slot[j] < schedule.slots
            places[schedule.slot[j]] = in_hand
            assert schedule.end[j] > schedule.begin[j]
            advanced += schedule.end[j] - schedule.begin[j]
            in_hand = schedule.end[j]

    sections(0, schedule.first[schedule.length - 1])
    assert in_hand == schedule.length
    last_taken = max(places.values())
    for i in reversed(range(schedule.length)):
        in_hand = places[schedule.start[i]]
        sections(schedule.first[i], schedule.last[i])
        assert in_hand == i, "the step is reversed at its own state"
        places = {slot: p for slot, p in places.items() if p <= i}
        # The state in hand before the last step has a place of its own, until that step is reversed.
        held = [p for p in places.values() if i < schedule.length - 1 or p != last_taken]
        assert len(held) <= schedule.snapshots
    return advanced


@pytest.mark.parametrize(("snapshots", "advances"), [(20, 2747), (10, 3636), (1, 499500), (1000, 999)])
def test_a_thousand_steps(snapshots: int, advances: int) -> None:
    schedule = binomial(1000, snapshots)
    assert forward_steps(1000, snapshots) == schedule.advances == advances
    assert schedule.steps_again == advances - 999


def test_formula_schedule_and_enumeration_agree() -> None:
    for length in range(1, 61):
        for snapshots in range(1, 12):
            best = least_advances(length, snapshots)
            assert forward_steps(length, snapshots) == best, (length, snapshots)
            assert binomial(length, snapshots).advances == best, (length, snapshots)


@given(st.integers(1, 400), st.integers(1, 40))
def test_the_actions_reverse_the_chain(length: int, snapshots: int) -> None:
    schedule = binomial(length, snapshots)
    assert simulate(schedule) == schedule.advances + 1 == forward_steps(length, snapshots) + 1
    assert schedule.slots <= min(snapshots + 1, length)


def test_tables_grow_with_the_length_alone() -> None:
    for snapshots in (3, 10, 100):
        assert len(binomial(1000, snapshots).slot) <= 1000


@pytest.mark.parametrize(("length", "snapshots"), [(0, 3), (3, 0)])
def test_bad_input(length: int, snapshots: int) -> None:
    with pytest.raises(ValueError, match=f"at least one step and one snapshot, got {length} and {snapshots}"):
        binomial(length, snapshots)
