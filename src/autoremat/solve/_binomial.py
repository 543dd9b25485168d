"""Optimal schedules for reversing a chain of equal steps with few snapshots.

**Problem.** A chain of `length` steps `x[i+1] = f(x[i])` is to be reversed: step `length - 1` first, step 0 last, and to reverse
step i one must have x[i]. There is room for `snapshots` states (x[0] is one of them) and for the state in hand. How often must
f be evaluated to bring the state in hand forward?

**Answer.** With r the least number such that `C(snapshots + r, snapshots) >= length`, no step need be advanced more than r times,
and the least number of steps advanced in all is

    t(length, snapshots) = r * length - C(snapshots + r, r - 1)

The evaluation of f that belongs to the reversal of a step (its linearization) is not counted.

**Schedule.** From a snapshot of x[p], with the steps p .. p+l-1 to reverse and s places, the one of the snapshot itself among
them: advance k steps, take a snapshot there, reverse the l-k steps right of it with s-1 places, then the k steps left of it
with s places. t grows by r from one length to the next as long as r stays the same, so k is optimal if and only if r of the
left part is one less than r of the right part (at the corners of t, either of two values counts).

**Source.** Griewank and Walther, Algorithm 799: *Revolve*, ACM TOMS 26(1), 2000; Grimm, Pottier and Rostaing-Schmidt, *Optimal
time and minimum space-time product for reversing a certain class of programs*, 1996 (the proof).

**Complexity.** O(length + snapshots taken), plain Python.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of a reversal, as tables of integers.

    A *section* j takes a snapshot of the state in hand, x[begin[j]], in place `slot[j]`, and then advances it to
    x[end[j]]. First the forward sweep, which ends with x[length]: the sections 0 .. first[length - 1] - 1. Its last section
    keeps x[length - 1], the state that was in hand before the last step. Then, for step i = length - 1 down to 0: take the
    snapshot in place `start[i]` in hand; do the sections first[i] .. last[i] - 1; the state in hand is x[i] now: reverse step i.

    `slots` is the number of places that are used: at most one more than `snapshots`, and the last one for x[length - 1] alone.
    """

    length: int
    snapshots: int
    slots: int
    slot: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    start: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def advances(self) -> int:
        """Steps that are advanced, without the very last one of the forward sweep: that is x[length], and no reversal needs it."""
        return sum(self.end) - sum(self.begin) - 1

    @property
    def steps_again(self) -> int:
        """Steps that are advanced after the forward sweep."""
        return self.advances - (self.length - 1)


def repetitions(length: int, snapshots: int) -> int:
    """The least r with `C(snapshots + r, snapshots) >= length`: how often a step is advanced at most."""
    r = 0
    while comb(snapshots + r, snapshots) < length:
        r += 1
    return r


def forward_steps(length: int, snapshots: int) -> int:
    """The least number of steps advanced in a reversal of `length` steps with `snapshots` places: t of the module's docstring."""
    if length <= 1:
        return 0
    r = repetitions(length, snapshots)
    return r * length - comb(snapshots + r, r - 1)


@functools.lru_cache(maxsize=256)
def binomial(length: int, snapshots: int) -> Schedule:
    """An optimal schedule for `length` >= 1 steps and `snapshots` >= 1 places."""
    if length < 1 or snapshots < 1:
        raise ValueError(
            f"a schedule needs at least one step and one snapshot, got {length} and {snapshots}."
        )
    slot: list[int] = []
    begin: list[int] = []
    end: list[int] = []
    start, first, last = [0] * length, [0] * length, [0] * length
    held = [0]  # the positions of the snapshots, by place
    for i in reversed(range(length)):
        while held[-1] > i:
            held.pop()
        start[i], first[i] = len(held) - 1, len(slot)
        sections = _way_to(i, held[-1], snapshots - len(held) + 1)
        for j, (left, right) in enumerate(sections):
            if j:
                held.append(left)
            slot.append(len(held) - 1)
            begin.append(left)
            end.append(right)
        if (
            i == length - 1
        ):  # the forward sweep: one section more, and the reversal of this step starts at its snapshot
            if held[-1] < i:
                held.append(i)
            slot.append(len(held) - 1)
            begin.append(i)
            end.append(length)
            start[i], first[i] = len(held) - 1, len(slot)
        last[i] = len(slot)
    return Schedule(
        length=length,
        snapshots=snapshots,
        slots=max(slot) + 1,
        slot=tuple(slot),
        begin=tuple(begin),
        end=tuple(end),
        start=tuple(start),
        first=tuple(first),
        last=tuple(last),
    )


def _way_to(i: int, position: int, places: int) -> list[tuple[int, int]]:
    """The sections from a snapshot at `position` to x[i], with so many places, that of the snapshot among them.

    A snapshot of x[i] itself is not taken: it is in hand when it is needed, and never again.
    """
    sections: list[tuple[int, int]] = []
    while position < i:
        steps = i + 1 - position
        ahead = steps - 1 if places == 1 else _split(steps, places)
        sections.append((position, position + ahead))
        position += ahead
        places -= 1
    return sections


def _split(length: int, places: int) -> int:
    """How far to advance before the next snapshot, the farthest that is optimal; `places` >= 2, `length` >= 2."""
    r = repetitions(length, places)
    return min(comb(places + r - 1, places), length - comb(places + r - 2, places - 1))
