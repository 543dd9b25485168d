"""The budget loop: predict, compile, correct, until the plan with the least recomputation that fits is found.

    of each way to stage the program:  the first plan of its path that is predicted to fit   (bisection)
    of all ways:                       the one that recomputes least, compiled
    its compiled peak over the predicted one corrects the predictions near it; and again

A prediction is never proof: the plan taken recomputes least among those that were compiled and fit.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoremat._errors import CompileError
from autoremat.plan._candidates import Candidates, Measured, Variant
from autoremat.plan._path import Path, State

WORTH = {"fast": 0.01, "balanced": 0.005, "optimal": 0.0}
"""A plan is compiled only if it recomputes so much less than the best one known, as a share of that,"""

MATTERS = {"fast": 0.002, "balanced": 0.001, "optimal": 0.0}
"""... and as a share of recomputing everything."""

PLENTY, MUCH = {"fast": 6, "balanced": 6, "optimal": 60}, 0.03
"""... and, once so many were compiled, only if it recomputes so much less: 3 % of what is recomputed."""

MAX_COMPILES = {"fast": 6, "balanced": 14, "optimal": 60}
"""Compilations of one search, beside that of the program as it is, by effort."""

SLACK = {"fast": 0.0, "balanced": 0.01, "optimal": 0.05}
"""A prediction may be too high by this share, ..."""

HOPEFUL = {"fast": 4, "balanced": 4, "optimal": 60}
"""... until so many compiled plans have not fit, ..."""

NEAR = 0.25
"""... but by no more than this share of the distance, in kept bytes, from a plan that was compiled."""

SAME = 0.001
"""Plans of one partition with equal predictions, whose recomputed FLOPs differ by no more than this share, are one to a compiler."""

VIEWS = 0.03
"""... or nearly one, where they differ in views: of a plan that is over the budget by no more than this share, the other is compiled at the end, ..."""

NARROW, LITTLE = 0.001, 0.01
"""Of a plan that is over the budget by no more than the first share, buffers decide that are too small for predictions to tell them apart: what keeps
least, and recomputes at most the second share more, is compiled next."""

FEW = {"fast": 0, "balanced": 5, "optimal": 60}
"""... if fewer than so many plans were compiled."""

FOREIGN = 4
"""A compiled plan of another partition corrects a prediction where one of its own differs so many times as much in kept bytes."""

PATIENCE = 4
"""Guesses from what is kept, before a bracket is halved: what is alive besides differs little from plan to plan."""

FINE = 0.003
"""A bracket of plans that differ by less than this share of the budget in what they keep is not narrowed further."""

ROOM, VAIN = 0.05, 2
"""A best plan that leaves this share of the budget is no end: what keeps so much more is compiled, in vain so often at most."""

ENDS = 3
"""Of each path, so many of the last plans that recompute much less than the best one, which leaves room, are compiled if they are expected to be over
the budget by no more than what views make: a path of which most plans do not fit is looked at in few places before."""

BOTTOM = 8
"""Plans of the second half of a path that are looked at where none is predicted to fit, ..."""

HOPE = 1.2
"""... and that are compiled if their expected peak is at most this multiple of the budget."""

MAY_BE_FLOOR = 1.5
"""What recomputes everything is compiled: of the path that is expected to need least, and of those expected to need at most this multiple of the
lowest that was compiled. What one partition showed corrects the predictions of others, of which the model may be wrong by a third."""


@dataclass
class Search:
    """One search for the best plan within `budget` bytes."""

    candidates: Candidates
    budget: int
    effort: str = "balanced"
    compiles: int = field(default=0, init=False)
    interrupted: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)
    _failed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]], init=False)
    _narrow: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]], init=False)
    _variants: Sequence[Variant] = field(default=(), init=False)

    def run(self) -> Measured | None:
        """The best plan that fits, or `None`. Interrupted (Ctrl-C), the best one until then; without one, the interrupt goes on."""
        try:
            return self._run()
        except KeyboardInterrupt:
            self.interrupted = True
            if self.best() is None:
                raise
            return self.best()

    def _run(self) -> Measured | None:
        baseline = self._measure(0, -1)
        if baseline is not None and self.fits(baseline):
            return baseline
        self.compiles = self._failures = 0
        paths = self._paths()
        self._lower(paths)
        if self.best() is None:
            self._reach_bottom(paths)
            self._lower(paths)
        if self.effort != "fast":
            self._try_views(paths)
            self._use_room(paths)
            self._try_views(paths)
        return self.best()

    def fits(self, m: Measured) -> bool:
        """Whether a compiled plan meets the budget."""
        return m.use.fits and m.use.peak_bytes <= self.budget

    def best(self) -> Measured | None:
        """The plan with the least recomputation among all compiled ones that fit; ties by the lower peak."""
        fitting = [m for m in self._known() if self.fits(m)]
        return min(fitting, key=lambda m: (m.cost, m.use.peak_bytes, m.variant, m.index), default=None)

    def floor(self) -> Measured | None:
        """The compiled plan with the lowest peak."""
        return min(self._known(), key=lambda m: (m.use.peak_bytes, m.cost), default=None)

    @property
    def exhausted(self) -> bool:
        """Whether the search ended because it may not compile more."""
        return self.compiles >= MAX_COMPILES[self.effort]

    def _known(self) -> Iterable[Measured]:
        return self.candidates.record.measured.values()

    def _paths(self) -> list[Path]:
        number = 1 if self.effort == "fast" else None
        self._variants = list(itertools.islice(self.candidates.variants(), number))
        return [v.path for v in self._variants]

    def _measure(self, variant: int, index: int) -> Measured | None:
        """`None` where the compiler itself ran out of memory: such a plan does not fit, and is not compiled again."""
        if (variant, index) in self._failed:
            return None
        new = (variant, index) not in self.candidates.record.measured
        self.compiles += new
        try:
            measured = self.candidates.measure(variant, index)
        except CompileError as error:
            if not error.out_of_memory:
                raise
            measured = None
            self._failed.add((variant, index))
        self._failures += new and (measured is None or not self.fits(measured))
        return measured

    def _lower(self, paths: Sequence[Path]) -> None:
        """Compile, again and again, the plan that recomputes least of those that are predicted to fit, or what stands in for one that nearly did."""
        while not self.exhausted and (chosen := self._instead(paths) or self._least(paths)) is not None:
            self._measure(*chosen)

    def _missed(self, share: float) -> list[Measured]:
        """The compiled plans that are over the budget by no more than this share of it, what recomputes least first."""
        over = [m for m in self._known() if m.index >= 0 and m.use.peak_bytes > self.budget]
        return sorted(
            (m for m in over if m.use.peak_bytes <= (1 + share) * self.budget), key=lambda m: m.cost
        )

    def _instead(self, paths: Sequence[Path]) -> tuple[int, int] | None:
        """What stands in for a plan that missed the budget narrowly, if there is such a plan that this was not asked for: variant and index."""
        for m in self._missed(NARROW):
            if (m.variant, m.index) in self._narrow:
                continue
            self._narrow.add((m.variant, m.index))
            if (found := self._with_little_more(paths, m)) is not None:
                return found
        return None

    def _with_little_more(self, paths: Sequence[Path], m: Measured) -> tuple[int, int] | None:
        """Of all that recomputes little more than a compiled plan and is predicted to need about as much, what keeps least, and less than it does."""
        found = [
            (path.states[i].nbytes, self.candidates.predicted(v, i), v, i)
            for v, path in enumerate(paths)
            if (i := self._last_within((1 + LITTLE) * m.cost, path)) >= 0
            and path.states[i].nbytes < m.nbytes
            and not self._is_known(v, path, i)
        ]
        most = (1 + VIEWS) * self.candidates.predicted(m.variant, m.index)
        return next(((v, i) for _, predicted, v, i in sorted(found) if predicted <= most), None)

    def _last_within(self, cost: float, path: Path) -> int:
        """The last plan without nested checkpoints that is better than the best one known and recomputes at most so much; -1 if there is none."""
        stop = min(path.flat, self._worth(path))
        return bisect.bisect_right(path.states, cost, hi=stop, key=lambda s: s.cost) - 1

    def _is_compiled(self, variant: int, index: int) -> bool:
        """Whether a plan was compiled, or the compiler ran out of memory over it."""
        return (variant, index) in self.candidates.record.measured or (variant, index) in self._failed

    def _is_known(self, variant: int, path: Path, index: int) -> bool:
        """The same, of it or of one that decides the same."""
        return self._is_compiled(variant, index) or any(
            self.candidates.same((m.variant, m.index), (variant, index))
            for m in self._twins(variant, path, index)
        )

    def _least(self, paths: Sequence[Path]) -> tuple[int, int] | None:
        """Of the first plan of each path that is predicted to fit, the one that recomputes least: variant and index."""
        chosen: tuple[int, int] | None = None
        for variant, path in enumerate(paths):
            stop = self._worth(path)
            if chosen is not None:
                least = paths[chosen[0]].states[chosen[1]].cost
                stop = min(stop, bisect.bisect_left(path.states, least, key=lambda s: s.cost))
            index = self._first(variant, path, stop)
            if index is not None:
                chosen = (variant, index)
        return chosen

    def _try_views(self, paths: Sequence[Path]) -> None:
        """A better plan is over the budget by little, and few were compiled: compile what differs from it in views, until that fails `VAIN` times."""
        vain = 0
        while (
            vain < VAIN
            and self.compiles < FEW[self.effort]
            and (found := self._other_views(paths)) is not None
        ):
            measured = self._measure(*found)
            vain += measured is None or not self.fits(measured)

    def _other_views(self, paths: Sequence[Path]) -> tuple[int, int] | None:
        """Of the plans that missed by little and recompute least, what keeps as much otherwise, if none such was compiled."""
        for m in self._missed(VIEWS):
            alike = [
                (v, i)
                for v, path in enumerate(paths)
                if v != m.variant and self._kind(v) == self._kind(m.variant)
                for i in range(self._worth(path))
                if _keep_as_much(path.states[i], m) and not self.candidates.same((v, i), (m.variant, m.index))
            ]
            if alike and not any(self._is_compiled(*key) for key in alike):
                return alike[0]
        return None

    def _use_room(self, paths: Sequence[Path]) -> None:
        """The best plan leaves room: compile what is expected to need little more than the budget, or what keeps so much more, or else the next better
        plan, whatever was predicted, until that fails `VAIN` times.

        A model of a compiler may be wrong about one plan and right about its neighbour; what they keep differs by what it differs.
        """
        vain = 0
        while vain < VAIN and not self.exhausted:
            best = self.best()
            if best is None or best.index < 0 or best.use.peak_bytes > (1 - ROOM) * self.budget:
                return
            chosen = self._nearly(paths) if self.candidates.predicts_well else None
            chosen = chosen or self._with_room(best, paths[best.variant])
            if chosen is None:
                return
            measured = self._measure(*chosen)
            vain += measured is None or not self.fits(measured)

    def _nearly(self, paths: Sequence[Path]) -> tuple[int, int] | None:
        """Of what recomputes much less than the best plan, at the end of each path, what is expected to need least, if that is little more than the
        budget: variant and index."""
        found: list[tuple[float, int, int]] = []
        for v, path in enumerate(paths):
            stop = min(self._worth(path, MUCH), path.flat)
            ends = [i for i in range(max(0, stop - ENDS), stop) if not self._is_known(v, path, i)]
            found += [
                (self._expected(v, path, i), v, i)
                for i in ends
                if not self._twins(v, path, i)
                and not self._alike(path.states[i], self.candidates.predicted(v, i))
            ]
        expected, variant, index = min(found, default=(math.inf, 0, 0))
        return (variant, index) if expected <= (1 + VIEWS) * self.budget else None

    def _with_room(self, best: Measured, path: Path) -> tuple[int, int] | None:
        """A plan of the path of the best one that recomputes less and was not compiled: the first that needs no more than is left, or the last."""
        room, stop = self.budget - best.use.peak_bytes, min(self._worth(path), path.flat)
        left = [i for i in range(stop) if not self._is_known(best.variant, path, i)]
        fitting = (i for i in left if path.states[i].nbytes - best.nbytes <= room)
        index = next(fitting, stop - 1 if stop - 1 in left else None)
        return None if index is None else (best.variant, index)

    def _first(self, variant: int, path: Path, stop: int) -> int | None:
        """The first plan of a path, not compiled yet and before `stop`, that is predicted to fit.

        Nesting lowers what is kept, but what it adds may cost a compiler more: the two parts are searched one after the other.
        """
        if stop and self._is_doubted(variant, path):
            return 0
        flat = min(path.flat, stop)
        for part in (range(flat), range(flat, stop)):
            if (index := self._first_of(variant, path, part)) is not None:
                return index
        return None

    def _first_of(self, variant: int, path: Path, part: range) -> int | None:
        """The same in a part of a path.

        States that split a loop are looked at between the two that they lie between: two loops need more than one, so among them the
        peak does not fall steadily.
        """
        whole = [i for i in part if path.states[i].split is None]
        low, high = self._bracket(variant, path, whole)
        tried = [
            i
            for i in range(whole[low] + 1 if low >= 0 else part.start, part.stop)
            if not self._is_compiled(variant, i)
        ]
        enough = whole[high] if high < len(whole) else part.stop
        near = [i for i in tried if i <= enough] + [i for i in tried if i > enough][:1]
        return next((i for i in near if self._expected(variant, path, i) <= self.budget), None)

    def _bracket(self, variant: int, path: Path, whole: Sequence[int]) -> tuple[int, int]:
        """Positions among the `whole` plans of the last not expected to fit, or a near one, and of the first that is.

        The last of all, the middle, and between them are looked at first: most paths have nothing that fits and recomputes less than
        what other paths have. At the highest effort every bracket is narrowed.
        """
        low, high, like, guesses = -1, len(whole), None, 0
        probes = (-1, high // 2, 3 * high // 4) if whole and self.effort != "optimal" else ()
        if probes and all(self._expected(variant, path, whole[i]) > self.budget for i in probes):
            return high - 1, high
        while not self._is_narrow(path, whole, low, high):
            if like is None or guesses >= PATIENCE:
                guess = (low + high) // 2
            else:
                guess = self._guess(path, whole, low, high, self.budget - like)
            expected = self._expected(variant, path, whole[guess])
            like = expected - path.states[whole[guess]].nbytes
            guesses += 1
            if expected <= self.budget:
                high = guess
            else:
                low = guess
        return low, high

    def _worth(self, path: Path, share: float | None = None) -> int:
        """How many plans of a path recompute enough less than the best one known: by `share`, if it is given."""
        best = self.best()
        if best is None:
            return len(path.states)
        if share is None:
            share = WORTH[self.effort] if self.compiles < PLENTY[self.effort] else MUCH
        least = max(1, share * best.cost, MATTERS[self.effort] * path.states[-1].cost)
        return sum(1 for s in path.states if s.cost <= best.cost - least)

    def _is_narrow(self, path: Path, whole: Sequence[int], low: int, high: int) -> bool:
        """Whether what lies in a bracket would not be told apart by predictions."""
        if high - low <= 1:
            return True
        if low < 0 or high == len(whole):
            return False
        return path.states[whole[low]].nbytes - path.states[whole[high]].nbytes <= FINE * self.budget

    def _guess(self, path: Path, whole: Sequence[int], low: int, high: int, wanted: float) -> int:
        """Where in a bracket the plans begin that keep at most the `wanted` bytes."""
        inside = range(low + 1, high)
        fits = bisect.bisect_left(
            inside, True, key=lambda p: path.states[whole[p]].nbytes <= wanted, hi=len(inside) - 1
        )
        return inside[fits]

    def _expected(self, variant: int, path: Path, index: int) -> float:
        """The least that the peak of a plan may be: as compiled, if it was; else as predicted, corrected by what the nearest compiled
        plan showed, less what the prediction may be wrong by."""
        known = self.candidates.record.measured.get((variant, index))
        if known is not None:
            return known.use.peak_bytes
        predicted = self.candidates.predicted(variant, index)
        twins = self._twins(variant, path, index)
        if twins:
            return min(m.use.peak_bytes for m in twins)
        alike = self._alike(path.states[index], predicted)
        if len(alike) >= VAIN:
            return min(m.use.peak_bytes for m in alike)
        slack = SLACK[self.effort] if self._failures < HOPEFUL[self.effort] else 0.0
        nbytes = path.states[index].nbytes
        like = self._nearest(variant, nbytes)
        if like is None:
            return predicted * (1 - slack)
        if self._kind(like.variant) == self._kind(variant):
            slack = min(slack, NEAR * abs(like.nbytes - nbytes) / self.budget)
        showed = like.use.peak_bytes / self.candidates.predicted(like.variant, like.index)
        return predicted * showed * (1 - slack)

    def _twins(self, variant: int, path: Path, index: int) -> Sequence[Measured]:
        """The compiled plans of other variants that decide the same; or of the same partition and differ in views alone, or in a last stage
        that hardly matters, as far as FLOPs and prediction tell: a compiler makes nearly one program of all."""
        state, predicted = path.states[index], self.candidates.predicted(variant, index)
        return [
            m
            for m in self._known()
            if m.index >= 0
            and m.variant != variant
            and _same_flops(state, m)
            and self.candidates.predicted(m.variant, m.index) == predicted
            and (
                self._kind(m.variant) == self._kind(variant)
                or self.candidates.same((m.variant, m.index), (variant, index))
            )
        ]

    def _alike(self, state: State, predicted: int) -> Sequence[Measured]:
        """The compiled plans, of whatever partition, that keep as much, recompute as much and are predicted to need as much; none where predictions
        tell little."""
        if not self.candidates.predicts_well:
            return []
        return [
            m
            for m in self._known()
            if _keep_as_much(state, m) and self.candidates.predicted(m.variant, m.index) == predicted
        ]

    def _kind(self, variant: int) -> tuple[str, str] | None:
        """Partition and fence of a variant; `None` for one of another effort, which this one does not look at."""
        if variant >= len(self._variants):
            return None
        return self._variants[variant].partition, self._variants[variant].fence

    def _is_doubted(self, variant: int, path: Path) -> bool:
        """Whether the first plan of a path may fit for all that is predicted, and none of its kind was compiled."""
        doubt, kind = self._variants[variant].doubt, self._kind(variant)
        if not doubt or any(self._kind(m.variant) == kind for m in self._known()):
            return False
        return not self._is_known(variant, path, 0) and (
            self.candidates.predicted(variant, 0) * (1 - doubt) <= self.budget
        )

    def _nearest(self, variant: int, nbytes: int) -> Measured | None:
        """The compiled plan that keeps most nearly so much; one of another partition or fence only if it is nearer by far."""
        kind = self._kind(variant)

        def distance(m: Measured) -> tuple[int, bool]:
            foreign = self._kind(m.variant) != kind
            return abs(m.nbytes - nbytes) * (FOREIGN if foreign else 1), foreign

        return min((m for m in self._known() if m.index >= 0), key=distance, default=None)

    def _reach_bottom(self, paths: Sequence[Path]) -> None:
        """Nothing is predicted to fit: compile what is expected to need least, until something fits.

        Predictions may be wrong for all of a path alike, so of each path what recomputes everything once is compiled first, if it may fit, then the
        plan with the fewest snapshots in loops; then, of what is looked at, whatever is expected to need least.
        """
        once = [(v, _last_once(path)) for v, path in enumerate(paths)]
        fewest = [(v, path.flat - 1) for v, path in enumerate(paths)]
        self._compile_bottoms(paths, once, HOPE * self.budget)
        self._compile_bottoms(paths, fewest, math.inf)
        looked_at = [(v, i) for v, path in enumerate(paths) for i in _spread(path)]
        while self.best() is None and not self.exhausted:
            expected = [
                (self._expected(v, paths[v], i), v, i)
                for v, i in looked_at
                if not self._is_known(v, paths[v], i)
            ]
            if not expected or min(expected)[0] > HOPE * self.budget:
                return
            _, variant, index = min(expected)
            looked_at.remove((variant, index))
            self._measure(variant, index)

    def _compile_bottoms(
        self, paths: Sequence[Path], bottoms: Sequence[tuple[int, int]], bound: float
    ) -> None:
        """Compile plans, by variant and index, that may be the floor and are expected to need no more than the bound, until something fits.

        Without a bound at least one is, whatever was compiled before: no plan is called infeasible without it.
        """

        def promise(bottom: tuple[int, int]) -> tuple[float, int]:
            variant, index = bottom
            return self._expected(variant, paths[variant], index), paths[variant].states[index].cost

        needed = bound == math.inf
        for variant, index in sorted(bottoms, key=promise):
            if self.best() is not None:
                return
            if not self._is_compiled(variant, index) and not self._twins(variant, paths[variant], index):
                if not needed and not self._may_be_floor(variant, paths[variant], index, bound):
                    continue
                self._measure(variant, index)
            needed = False

    def _may_be_floor(self, variant: int, path: Path, index: int, bound: float) -> bool:
        """Whether a plan may be compiled, and is expected to need no more than the bound and little more than what was compiled."""
        floor = self.floor()
        limit = bound if floor is None else min(bound, MAY_BE_FLOOR * floor.use.peak_bytes)
        return not self.exhausted and self._expected(variant, path, index) <= limit


def _keep_as_much(state: State, m: Measured) -> bool:
    """Whether a plan and a compiled one differ by no more than what views cost."""
    return state.nbytes == m.nbytes and _same_flops(state, m)


def _same_flops(state: State, m: Measured) -> bool:
    return abs(m.flops - state.flops) <= SAME * state.flops


def _last_once(path: Path) -> int:
    """The plan of a path that recomputes everything once; loops keep their carry at each iteration."""
    return sum(not s.halvings and not s.reversal for s in path.states) - 1


def _spread(path: Path) -> list[int]:
    """Plans of a path that may need least: spread over its second half, and over what is nested."""
    last, flat = len(path.states) - 1, path.flat - 1
    halves = {flat - flat * k // (2 * BOTTOM) for k in range(BOTTOM)}
    return sorted({last, (flat + last) // 2, *halves})
