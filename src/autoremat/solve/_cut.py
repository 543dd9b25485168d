"""The best plan at one price of memory: one minimum cut.

**Problem.** For a price λ in time units per byte, minimise λ·(kept bytes) + (extra time) over all choices
of what to keep, how, and which ops to run in which pass. `_network` has the encoding (design, section 3).

**Optimality.** Exact, at every price and for integers of any size: capacities are λ's numerator times bytes
plus its denominator times time, and nothing is rounded. The value of the cut is checked against the plan
as `Judge` sees it, which knows nothing of cuts.

**Ties.** Among the minimum cuts the one with the least source side is taken, so equal problems give equal
plans. Both ends of the range are lexicographic: price 0 means least time and then least bytes, an infinite
price least bytes and then least time. They are cuts at a finite price below, or above, all that can matter.

**Complexity.** One maximum flow on about 2·ops + values nodes, plus O(values + arcs).
"""

from __future__ import annotations

import math
from fractions import Fraction

from autoremat.solve._evaluate import Judge
from autoremat.solve._network import Network, build
from autoremat.solve._problem import Assignment, Price, Problem


def cut(problem: Problem, price: Price) -> Assignment:
    """Return a plan that minimises `price` · kept bytes + extra time.

    **Arguments:**

    - `problem`: what to decide.
    - `price`: time units per byte, a non-negative `Fraction` or `int`; 0 for the least time, `math.inf` for
        the least bytes.

    **Returns:** an `Assignment`, evaluated by `Judge` from the problem's own integers.

    Raises `ValueError` if the problem has no plan at all.
    """
    return Cutter(problem).cut(price)


class Cutter:
    """Cuts one problem at many prices: the network is built once."""

    def __init__(self, problem: Problem, *, network: Network | None = None) -> None:
        self.judge = Judge(problem)
        self._network = build(problem) if network is None else network
        most_bytes = sum(max((s.nbytes for s in row), default=0) for row in problem.storages)
        most_time = sum(problem.op_cost) + sum(
            max((s.cost for s in row), default=0) for row in problem.storages
        )
        # Only what costs nothing at all may be on the kept side of a minimum cut without being read.
        self._gratis = any(s.nbytes == 0 and s.cost == 0 for row in problem.storages for s in row)
        self._least_price = Fraction(1, most_bytes + 1)
        self._most_price = Fraction(most_time + 1)

    def cut(self, price: Price) -> Assignment:
        """As the function `cut`."""
        finite = self._finite(price)
        capacities, unit = self._network.capacities(finite)
        value, side = self._network.flow.solve(capacities)
        keep = self._network.kept(side, finite)
        if self._gratis:
            keep = self.judge.close(keep, price=finite)
        plan = self.judge.evaluate(keep)
        found = finite * plan.nbytes + plan.cost
        assert found == value * unit, f"the cut is worth {value * unit}, its plan {found}"
        return plan

    def _finite(self, price: Price) -> Fraction:
        """The price to cut at. Costs differ by at least 1, and so do bytes: both ends are lexicographic."""
        if price == 0:
            return self._least_price
        if price == math.inf:
            return self._most_price
        if isinstance(price, float) or price < 0:
            raise ValueError(f"a price is a non-negative Fraction or int, or math.inf; got {price!r}")
        return Fraction(price)
