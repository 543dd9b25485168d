"""What a solver is given, and what it returns.

All costs are integers, so that equal inputs give equal plans on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from autoremat.graph import Graph

# Time units per byte: a Fraction or int; the only float is `math.inf`.
Price = Fraction | int | float


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to keep a value: `nbytes` while it waits, `cost` (time units) to encode and decode it."""

    name: str
    nbytes: int
    cost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A graph with integer prices.

    `op_cost[j]` is the cost of one execution of op `j`, in any integer time unit. `storages[v]` are the ways
    to keep value `v`; empty means that it may not be kept. An input that is `free` is there in the backward
    pass at no cost; any other input must be kept by one of its storages to be there. Ops with
    `repeatable == False` may run in the forward pass or in the backward pass, never in both.
    Ops that a primal output needs run in the forward pass in any case.
    """

    graph: Graph
    op_cost: tuple[int, ...]
    storages: tuple[tuple[Storage, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which values to keep, how, and what follows from it.

    `keep[v]` is an index into `problem.storages[v]`. `forward` and `rerun` are the ops that run in the
    forward and in the backward pass. `nbytes` are the kept bytes, `cost` the extra time: each op that runs
    in both passes, plus what the storages cost.
    """

    keep: Mapping[int, int]
    forward: frozenset[int]
    rerun: frozenset[int]
    nbytes: int
    cost: int


def cheapest(problem: Problem, value: int, price: Fraction | None) -> int:
    """Index of the storage of `value` that is cheapest at `price`; `None` means an infinite price."""
    options = problem.storages[value]
    if len(options) == 1:
        return 0

    def key(i: int) -> tuple[int, int, int]:
        s = options[i]
        if price is None:
            return s.nbytes, s.cost, i
        return price.numerator * s.nbytes + price.denominator * s.cost, s.nbytes, i

    return min(range(len(options)), key=key)
