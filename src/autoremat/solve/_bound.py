"""How little any plan recomputes within a number of bytes: the Lagrangian bound of one knapsack over many cuts.

**Problem.** Several problems share one memory: part `i` occurs `copies` times, each copy keeps what it likes, and all
kept bytes together are at most a capacity. Wanted: a number that no choice of plans for the copies costs less than.

**Bound.** For a price λ in time units per byte, every choice with at most `capacity` kept bytes costs at least

    L(λ) = Σ copies · min over plans of (λ · bytes + cost)  -  λ · capacity,

since what it keeps is not more than the capacity (Lagrange; Geoffrion, Lagrangean relaxation for integer programming, 1974).
Each minimum is one cut (`_cut`), and no value is needed of the plans themselves. The largest L(λ) is the lower convex hull of all
parts together, read off at the capacity.

**Method.** L is concave and piecewise linear. Two plans bracket the capacity; cut at the price at which they tie: either that
is where L is largest, or the new plan replaces one of the two. It is the recursion of Eisner and Severance (J. ACM 23, 1976, see
`_frontier`), followed into the one interval that the capacity lies in.

**Optimality.** Exact in integers with `tolerance=0`. With a tolerance the search stops as soon as the hull is at most that
share above L(λ); each L(λ) is a bound by itself, so what is returned is always proven. The best plan may cost more than the hull:
plans between its vertices are not on it.

**Complexity.** At most a cut of each part for each vertex of the hull; in practice some ten. What is learned at one capacity serves
all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from autoremat.solve._cut import Cutter
from autoremat.solve._problem import Price, Problem

TOLERANCE = Fraction(1, 1000)
"""The search stops where the hull can be above the bound by no more than this share."""


@dataclass(frozen=True, slots=True)
class Part:
    """A problem that occurs `copies` times, each with a plan of its own."""

    problem: Problem
    copies: int


@dataclass(frozen=True, slots=True)
class _Vertex:
    """Bytes and cost of an optimal choice for all copies at some price."""

    nbytes: int
    cost: int

    def worth(self, price: Fraction) -> Fraction:
        return price * self.nbytes + self.cost


class LowerBound:
    """Bounds on the cost of any plans for `parts`, at any number of kept bytes.

    Raises `ValueError` if some part has no plan at all.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(Cutter(p.problem), p.copies) for p in parts]
        self._known: dict[Price, _Vertex] = {}

    @property
    def least_bytes(self) -> int:
        """No choice keeps fewer bytes."""
        return self._cut(math.inf).nbytes

    def at(self, nbytes: int, *, tolerance: Fraction = TOLERANCE) -> int | float:
        """No choice that keeps at most `nbytes` costs less (time units); `math.inf` if there is no such choice."""
        left, right = self._cut(0), self._cut(math.inf)
        if left.nbytes <= nbytes:
            return left.cost
        if right.nbytes > nbytes:
            return math.inf
        best = Fraction(left.cost)
        while True:
            price = Fraction(right.cost - left.cost, left.nbytes - right.nbytes)
            hull = left.worth(price) - price * nbytes
            found = self._cut(price)
            best = max(best, found.worth(price) - price * nbytes)
            if hull - best <= tolerance * hull:
                return math.ceil(best)
            if found.nbytes > nbytes:
                left = found
            else:
                right = found

    def _cut(self, price: Price) -> _Vertex:
        if price not in self._known:
            plans = [(cutter.cut(price), copies) for cutter, copies in self._parts]
            self._known[price] = _Vertex(
                sum(p.nbytes * copies for p, copies in plans), sum(p.cost * copies for p, copies in plans)
            )
        return self._known[price]
