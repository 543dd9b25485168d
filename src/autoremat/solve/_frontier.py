"""The exact frontier of kept bytes against extra time, and the plans between its points.

**Problem.** Over all plans of a problem, the pairs (kept bytes, extra time). Wanted: the vertices of their
lower convex hull, each with the prices (time units per byte) at which it is optimal.

**Algorithm.** Eisner and Severance (Mathematical techniques for efficient record segmentation in large
shared databases, J. ACM 23, 1976): between two optimal plans, cut at the price at which they tie. Either that
finds a better plan, and there are two smaller gaps, or it proves that no plan lies below the line between the
two. The gap that may be largest goes first, so that a stopped search is good everywhere.

**Optimality.** With `tolerance=0` all vertices are found, in 2k-1 cuts for k of them (a cut more for each plan
met in the middle of an edge), and `Frontier.lower_bound` is the hull itself: no plan of this model is below
it. With a tolerance the hull is known to within that share of its range of costs; `lower_bound` stays a
proven bound and `gap` says how far it can be from the points.

**Between the points.** Identical layers flip at the same price, so neighbours on the hull can lie far apart.
`splices` takes the decisions of one for what is made early and of the other for what is made late. These
plans are not optimal in general; how far off they can be is what `lower_bound` tells. `pareto` adds plans in
which the step of one edge of the hull is taken before its turn.

**Complexity.** A cut and two O(n) walks per hull point; a walk per splice. No library: the recursion is ours.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, pairwise

from autoremat.solve._cut import Cutter
from autoremat.solve._evaluate import Judge
from autoremat.solve._problem import Assignment, Price, Problem

EXACT_OPS = 1000
"""Up to so many ops the frontier is exact unless a tolerance is given."""

TOLERANCE = Fraction(1, 10_000)
"""Tolerance of larger problems, as a share of the range of costs."""

SPLICES = 64
"""Positions at which two neighbours are spliced, at most."""

_SPLICE_WORK = 6_000_000
# Splices evaluated by `pareto`, times ops: at about 1 µs each this bounds it to some 10 s.


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The lower convex hull of (kept bytes, extra time).

    - `points`: its vertices, by falling bytes and rising cost.
    - `prices`: for each point the interval of prices at which no other point is better; the first starts at
        0, the last ends at `math.inf`.
    - `between`: optimal plans found in the middle of the hull's edges, by falling bytes.
    - `duals`: pairs (price, least value of price · bytes + cost at it), by rising price. Each bounds every plan.
    - `gap`: how far, in time units, a plan could be below the line through the points; 0 if exact.
    - `cuts`: how many cuts it took.
    """

    points: tuple[Assignment, ...]
    prices: tuple[tuple[Price, Price], ...]
    between: tuple[Assignment, ...]
    duals: tuple[tuple[Fraction, Fraction], ...]
    gap: Fraction
    cuts: int

    @property
    def exact(self) -> bool:
        """Whether all vertices of the hull are among the points."""
        return self.gap == 0

    def lower_bound(self, nbytes: int) -> int | float:
        """No plan that keeps at most `nbytes` costs less (time units); `math.inf` if there is no such plan."""
        if nbytes < self.points[-1].nbytes:
            return math.inf
        return max(math.ceil(value - price * nbytes) for price, value in self.duals)

    def best(self, nbytes: int) -> Assignment | None:
        """The cheapest point that keeps at most `nbytes`; `None` if none does."""
        i = bisect_left(self.points, -nbytes, key=lambda p: -p.nbytes)
        return self.points[i] if i < len(self.points) else None


def frontier(
    problem: Problem, *, tolerance: float | Fraction | None = None, max_points: int | None = None
) -> Frontier:
    """Return the frontier of `problem`.

    **Arguments:**

    - `problem`: what to decide.
    - `tolerance`: stop when no plan can be further below the points than this share of the range of costs.
        0 is exact. Left out: 0 for problems of up to `EXACT_OPS` ops, `TOLERANCE` for larger ones.
    - `max_points`: stop at so many points (2 at least), whatever the gap.

    Raises `ValueError` if the problem has no plan at all.
    """
    if tolerance is None:
        tolerance = 0 if len(problem.graph.ops) <= EXACT_OPS else TOLERANCE
    if tolerance < 0 or (max_points is not None and max_points < 2):
        raise ValueError(
            f"tolerance must be at least 0 and max_points at least 2: got {tolerance}, {max_points}"
        )
    search = _Search(problem)
    search.run(Fraction(tolerance), max_points)
    return search.result()


@dataclass(frozen=True, slots=True, order=True)
class _Edge:
    """Two neighbours on the hull so far. Ordered by falling `gap`, ties by falling bytes."""

    key: tuple[Fraction, int]
    a: Assignment = field(compare=False)
    b: Assignment = field(compare=False)
    a_price: Price = field(compare=False)
    b_price: Price = field(compare=False)

    @property
    def gap(self) -> Fraction:
        return -self.key[0]


def _tie(a: Assignment, b: Assignment) -> Fraction:
    """The price at which both are worth the same."""
    return Fraction(b.cost - a.cost, a.nbytes - b.nbytes)


def _edge(a: Assignment, b: Assignment, a_price: Price, b_price: Price) -> _Edge:
    """`a` is optimal at `a_price`, `b` at `b_price`: no plan is below either tangent.

    The gap is the height of the triangle between the two tangents and the line through both points.
    """
    width, price = a.nbytes - b.nbytes, _tie(a, b)
    if price in (a_price, b_price):
        gap = Fraction(0)
    elif isinstance(b_price, float):
        gap = Fraction(price - a_price) * width
    else:
        gap = Fraction(price - a_price) * width * Fraction(b_price - price) / Fraction(b_price - a_price)
    return _Edge((-gap, -a.nbytes), a, b, a_price, b_price)


class _Search:
    """State of the recursion. Invariant: every plan is on or above the tangents of each open edge."""

    def __init__(self, problem: Problem) -> None:
        self._cutter = Cutter(problem)
        first, last = self._cutter.cut(0), self._cutter.cut(math.inf)
        self._points = [first]
        self._met: list[Assignment] = []
        self._duals = {Fraction(0): Fraction(first.cost)}
        self._open: list[_Edge] = []
        self._cuts = 2
        if last.nbytes < first.nbytes:
            self._points.append(last)
            self._open.append(_edge(first, last, 0, math.inf))
        self._range = last.cost - first.cost

    def run(self, tolerance: Fraction, max_points: int | None) -> None:
        """Close edges, the largest gap first, until all are small enough."""
        limit = tolerance * self._range
        while self._open and self._open[0].gap > limit:
            if max_points is not None and len(self._points) >= max_points:
                return
            self._split(heapq.heappop(self._open))

    def _split(self, edge: _Edge) -> None:
        a, b, price = edge.a, edge.b, _tie(edge.a, edge.b)
        c = self._cutter.cut(price)
        self._cuts += 1
        value = price * c.nbytes + c.cost
        self._duals[price] = value
        if value < price * a.nbytes + a.cost:
            self._points.append(c)
            heapq.heappush(self._open, _edge(a, c, edge.a_price, price))
            heapq.heappush(self._open, _edge(c, b, price, edge.b_price))
        elif b.nbytes < c.nbytes < a.nbytes:
            self._met.append(c)

    def result(self) -> Frontier:
        points, met = _hull(self._points)
        met += [c for c in self._met if c.nbytes not in {m.nbytes for m in met}]
        return Frontier(
            points=tuple(points),
            prices=_prices(points),
            between=tuple(sorted(met, key=lambda p: -p.nbytes)),
            duals=tuple(sorted(self._duals.items())),
            gap=max((e.gap for e in self._open), default=Fraction(0)),
            cuts=self._cuts,
        )


def _hull(points: Iterable[Assignment]) -> tuple[list[Assignment], list[Assignment]]:
    """Vertices by falling bytes, and the points that lie in the middle of an edge."""
    hull: list[Assignment] = []
    middle: list[Assignment] = []
    for p in sorted(points, key=lambda p: -p.nbytes):
        while len(hull) > 1 and _tie(hull[-2], hull[-1]) >= _tie(hull[-1], p):
            middle.append(hull.pop())
        hull.append(p)
    return hull, middle


def _prices(hull: Sequence[Assignment]) -> tuple[tuple[Price, Price], ...]:
    """For each vertex the interval of prices at which it is the best."""
    return tuple(pairwise([Fraction(0), *(_tie(a, b) for a, b in pairwise(hull)), math.inf]))


def repriced(
    problem: Problem, plans: Iterable[Assignment]
) -> tuple[list[Assignment], dict[tuple[int, int], tuple[Price, Price]]]:
    """Plans for other costs of the same operations, judged by those of `problem`.

    Returns those that no other one beats, by falling bytes and rising cost, and for each vertex of their lower convex hull, by bytes and cost,
    the prices at which it is the best of them.
    """
    judge = Judge(problem)
    best = _undominated(judge.evaluate(p.keep) for p in plans)
    hull, _ = _hull(best)
    return best, {(p.nbytes, p.cost): prices for p, prices in zip(hull, _prices(hull), strict=True)}


def splices(problem: Problem, a: Assignment, b: Assignment, *, limit: int = SPLICES) -> list[Assignment]:
    """Return plans strictly between `a` and `b`, which keeps fewer bytes than `a` at a higher cost.

    At each position of the program one plan has the decisions of `b` before and of `a` after it (early
    values are computed again, late ones kept), another one the reverse. Only positions where decisions
    differ matter, and of those at most `limit`, evenly spaced. Each plan is closed (see `close`) and
    evaluated; those that close to something outside of the two, or dominated, are left out.
    """
    return _splices(Judge(problem), a, b, limit)


def _splices(judge: Judge, a: Assignment, b: Assignment, limit: int) -> list[Assignment]:
    if a.nbytes <= b.nbytes:
        return []
    graph, price = judge.problem.graph, _tie(a, b)
    differing: dict[int, list[int]] = {}
    for v in sorted({*a.keep, *b.keep}):
        if a.keep.get(v) != b.keep.get(v):
            producer = graph.values[v].producer
            differing.setdefault(-1 if producer is None else producer, []).append(v)
    order = sorted(differing)
    found: list[Assignment] = []
    for early, late in ((b, a), (a, b)):
        keep = dict(late.keep)
        done = 0
        for cut in _spaced(len(order), limit):
            for v in (v for j in order[done:cut] for v in differing[j]):
                keep.pop(v, None)
                if v in early.keep:
                    keep[v] = early.keep[v]
            done = cut
            plan = _closed(judge, keep, price)
            if plan is not None and b.nbytes < plan.nbytes < a.nbytes and plan.cost < b.cost:
                found.append(plan)
    return _undominated(found)


def _spaced(count: int, limit: int) -> list[int]:
    """Positions 1 to count-1, at most `limit` of them, evenly spaced."""
    if count - 1 <= limit:
        return list(range(1, count))
    return sorted({round(i * count / (limit + 1)) for i in range(1, limit + 1)} - {0, count})


def _closed(judge: Judge, keep: dict[int, int], price: Fraction) -> Assignment | None:
    """The plan of a closed splice, or `None` if it needs what can be neither kept nor made again."""
    try:
        return judge.evaluate(judge.close(keep, price=price))
    except ValueError:
        return None


def _undominated(plans: Iterable[Assignment]) -> list[Assignment]:
    """By falling bytes and rising cost; of equals the first."""
    best: list[Assignment] = []
    for p in sorted(plans, key=lambda p: (p.nbytes, p.cost)):
        if not best or p.cost < best[-1].cost:
            best.append(p)
    return best[::-1]


def pareto(
    problem: Problem, *, found: Frontier | None = None, limit: int = SPLICES
) -> tuple[Assignment, ...]:
    """Return the points of the frontier, splices between them and steps out of order, by falling bytes and rising
    cost.

    **Arguments:**

    - `problem`: what to decide.
    - `found`: its frontier, if it is known already.
    - `limit`: positions to splice a pair of neighbours at, at most. In large problems a pair gets as many
        as its share of the bytes allows, possibly none: the work is bounded, whatever the number of points.
    """
    found = frontier(problem) if found is None else found
    judge = Judge(problem)
    plans = [*found.points, *found.between]
    known = _undominated(plans)
    width = known[0].nbytes - known[-1].nbytes
    budget = _SPLICE_WORK / max(1, len(problem.graph.ops)) / 2
    for a, b in pairwise(known):
        share = int(budget * (a.nbytes - b.nbytes) / width)
        plans += _splices(judge, a, b, min(limit, share))
    plans += _out_of_order(judge, known, int(budget))
    return tuple(_undominated(plans))


def _out_of_order(judge: Judge, known: Sequence[Assignment], limit: int) -> list[Assignment]:
    """The points, each with the step of one later edge taken before its turn; wide edges first, `limit` plans at most.

    Steps of nearly one price stand on the hull in an order that a budget between them does not care for.
    """
    plans: list[Assignment] = []
    edges = sorted(pairwise(range(len(known))), key=lambda e: known[e[1]].nbytes - known[e[0]].nbytes)
    steps = ((i, first, last) for first, last in edges for i in range(first))
    for i, first, last in islice(steps, limit):
        before, after = known[first].keep, known[last].keep
        keep = {v: s for v, s in known[i].keep.items() if v in after or v not in before}
        keep |= {v: s for v, s in after.items() if before.get(v) != s}
        plan = _closed(judge, keep, _tie(known[first], known[last]))
        if plan is not None and plan.nbytes < known[i].nbytes:
            plans.append(plan)
    return plans
