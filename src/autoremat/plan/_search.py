"""The budget loop: predict, compile, correct, until the plan with the least recomputation that fits is found.

    of each way to stage the program:  the first plan of its path that is predicted to fit   (bisection)
    of all ways:                       the one that recomputes least, compiled
    its compiled peak over the predicted one corrects the predictions near it; and again

A prediction is never proof: the plan taken recomputes least among those that were compiled and fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoremat._errors import CompileError
from autoremat.plan._candidates import Candidates, Measured
from autoremat.plan._path import Path

WORTH = 0.995
"""A plan is compiled only if it recomputes at most this share of the best one known."""

MAX_COMPILES = {"fast": 6, "balanced": 14, "optimal": 60}
"""Compilations of one search, beside that of the program as it is, by effort."""

NEARLY = {"fast": 1.0, "balanced": 1.01, "optimal": 1.05}
"""A plan whose predicted peak is at most this multiple of the budget may still fit."""

BOTTOM = 4
"""Plans near the end of a path that are looked at where none is predicted to fit."""


@dataclass
class Search:
    """One search for the best plan within `budget` bytes."""

    candidates: Candidates
    budget: int
    effort: str = "balanced"
    compiles: int = field(default=0, init=False)

    def run(self) -> Measured | None:
        """The best plan that fits, or `None`."""
        baseline = self._measure(0, -1)
        if baseline is not None and self.fits(baseline):
            return baseline
        self.compiles = 0
        paths = self._paths()
        self._lower(paths)
        if self.best() is None:
            self._reach_bottom(paths)
            self._lower(paths)
        return self.best()

    def fits(self, m: Measured) -> bool:
        """Whether a compiled plan meets the budget."""
        return m.use.peak_bytes <= self.budget

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
        variants = self.candidates.variants()
        if self.effort == "fast":
            first = next(variants, None)
            return [] if first is None else [first.path]
        return [v.path for v in variants]

    def _measure(self, variant: int, index: int) -> Measured | None:
        """`None` where the compiler itself ran out of memory: such a plan does not fit."""
        new = (variant, index) not in self.candidates.record.measured
        self.compiles += new
        try:
            return self.candidates.measure(variant, index)
        except CompileError as error:
            if not error.out_of_memory:
                raise
            return None

    def _lower(self, paths: Sequence[Path]) -> None:
        """Compile, again and again, the plan that recomputes least of those that are predicted to fit."""
        failed: set[tuple[int, int]] = set()
        while not self.exhausted:
            chosen = [
                (path.states[index].cost, variant, index)
                for variant, path in enumerate(paths)
                if (index := self._first(variant, path, failed)) is not None
            ]
            if not chosen:
                return
            _, variant, index = min(chosen)
            if self._measure(variant, index) is None:
                failed.add((variant, index))

    def _first(self, variant: int, path: Path, failed: set[tuple[int, int]]) -> int | None:
        """The first plan of a path, not compiled yet, that is predicted to fit and recomputes less than the best one known."""
        best = self.best()
        most = float("inf") if best is None else best.cost * WORTH
        stop = sum(1 for s in path.states if s.cost <= most)
        low, high = -1, stop
        while high - low > 1:
            middle = (low + high) // 2
            if self._expected(variant, path, middle) <= NEARLY[self.effort] * self.budget:
                high = middle
            else:
                low = middle
        known = self.candidates.record.measured
        tried = (i for i in range(high, stop) if (variant, i) not in known and (variant, i) not in failed)
        index = next(tried, None)
        if index is None or self._expected(variant, path, index) > NEARLY[self.effort] * self.budget:
            return None
        return index

    def _expected(self, variant: int, path: Path, index: int) -> float:
        """The peak of a plan: as compiled if it was; else as predicted, corrected by what the nearest compiled plan showed."""
        known = self.candidates.record.measured.get((variant, index))
        if known is not None:
            return known.use.peak_bytes
        predicted = self.candidates.predicted(variant, index)
        like = self._nearest(variant, path.states[index].nbytes)
        if like is None:
            return predicted
        return predicted * like.use.peak_bytes / self.candidates.predicted(like.variant, like.index)

    def _nearest(self, variant: int, nbytes: int) -> Measured | None:
        own = [m for m in self._known() if m.variant == variant and m.index >= 0]
        return min(own, key=lambda m: abs(m.nbytes - nbytes), default=None)

    def _reach_bottom(self, paths: Sequence[Path]) -> None:
        """Nothing is predicted to fit: compile what is predicted to need least of each path."""
        for variant, path in enumerate(paths):
            last = len(path.states) - 1
            looked_at = {last - last * k // (3 * BOTTOM) for k in range(BOTTOM)} if last > 0 else {0}
            lowest = sorted(looked_at, key=lambda i: self.candidates.predicted(variant, i))
            for index in dict.fromkeys([lowest[0], last]):
                if not self.exhausted or self.floor() is None:
                    self._measure(variant, index)
