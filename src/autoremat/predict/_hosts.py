"""Temporaries that live where a result will be written later. No JAX here.

XLA's buffer assignment gives the results of a program memory of their own, and then, from the largest on, lets each temporary use the smallest
of these places that is large enough and free for as long as the temporary is alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoremat.solve import Step

_SMALL = 2000
"""A temporary of less than one part in so many of all of them counts too little to look for its place."""


@dataclass(slots=True)
class _Place:
    """The memory of one result, and as bits the steps during which it is taken."""

    nbytes: int
    taken: int


def hosted(nbytes: Sequence[int], steps: Sequence[Step], results: Collection[int]) -> set[int]:
    """The copies that live in the memory of results.

    `steps` are all that runs, in order; what they make includes the results, of which each has memory of its own from the first to the
    last step.
    """
    first, last = _lives(steps)
    places = sorted(
        (_Place(nbytes[v], _bits(first[v], len(steps))) for v in results if v in first),
        key=lambda p: p.nbytes,
    )
    sizes = [p.nbytes for p in places]
    copies = [v for v in first if v not in results and nbytes[v]]
    least = sum(nbytes[v] for v in copies) // _SMALL
    found: set[int] = set()
    for v in sorted((v for v in copies if nbytes[v] > least), key=lambda v: -nbytes[v]):
        alive = _bits(first[v], last[v] + (not _overwritten(nbytes, steps[last[v]], v)))
        for place in places[bisect_left(sizes, nbytes[v]) :]:
            if not place.taken & alive:
                place.taken |= alive
                found.add(v)
                break
    return found


def _lives(steps: Sequence[Step]) -> tuple[dict[int, int], dict[int, int]]:
    """For each copy that is made, the step that makes it, and the last that reads it."""
    first = {v: i for i, step in enumerate(steps) for v in step.makes}
    last = dict(first)
    for i, step in enumerate(steps):
        for v in step.reads:
            if v in first:
                last[v] = i
    return first, last


def _overwritten(nbytes: Sequence[int], step: Step, copy: int) -> bool:
    """Whether a step may write what it makes over a copy that it reads."""
    return copy in step.over and any(nbytes[v] == nbytes[copy] for v in step.makes)


def _bits(start: int, stop: int) -> int:
    return ((1 << (stop - start)) - 1) << start
