"""The budget loop: along a path, find the plan with the least recomputation whose compiled peak fits.

The compiled peak follows the kept bytes, but not exactly: so each step asks the compiler, and interpolates between what it
said. The plan taken is the one with the least recomputation among all that were compiled and fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoremat._errors import CompileError
from autoremat.plan._candidates import Candidates, Measured
from autoremat.plan._path import Path

CLOSE = 0.985
"""A plan whose peak is at least this share of the budget is not improved further."""

MAX_COMPILES = 9
"""Compilations for the first path, beside those for the floor."""

WORTH = 0.97
"""Another path is tried only for plans that recompute at most this share of the best one known."""

STEPS_BACK = (WORTH, 0.85, 0.7)
"""... starting from states that recompute so much of it, in this order."""

MAX_STEPS_BACK = 5
"""... so many at most."""

NEARLY = 1.03
"""A peak of at most this multiple of the budget makes neighbours worth a compilation."""

PROMISING = 1.15
"""... and whose peak, predicted from their kept bytes, is at most this multiple of the budget."""


@dataclass
class Search:
    """One search for the best plan within `budget` bytes."""

    candidates: Candidates
    budget: int

    def run(self, *, thorough: bool = True) -> Measured | None:
        """The best plan that fits, or `None`."""
        baseline = self._measure(0, -1)
        if baseline is not None and self.fits(baseline):
            return baseline
        for number, variant in enumerate(self.candidates.variants()):
            if number and not thorough and self.best() is not None:
                break
            self._search_path(number, variant.path, first=number == 0)
        return self.best()

    def fits(self, m: Measured) -> bool:
        """Whether a compiled plan meets the budget."""
        return m.use.peak_bytes <= self.budget

    def best(self) -> Measured | None:
        """The plan with the least recomputation among all compiled ones that fit; ties by the lower peak."""
        fitting = [m for m in self.candidates.record.measured.values() if self.fits(m)]
        return min(fitting, key=lambda m: (m.cost, m.use.peak_bytes, m.variant, m.index), default=None)

    def floor(self) -> Measured | None:
        """The compiled plan with the lowest peak."""
        known = self.candidates.record.measured.values()
        return min(known, key=lambda m: (m.use.peak_bytes, m.cost), default=None)

    def _measure(self, variant: int, index: int) -> Measured | None:
        """`None` where the compiler itself ran out of memory: such a plan does not fit."""
        try:
            return self.candidates.measure(variant, index)
        except CompileError as error:
            if not error.out_of_memory:
                raise
            return None

    def _search_path(self, variant: int, path: Path, *, first: bool) -> None:
        """Bisect one path. A path that is not the first is followed only while it recomputes less than the best plan.

        States that split a loop come last: two loops need more than one, so among them the peak does not fall steadily.
        """
        whole = [s.index for s in path.states if s.split is None]
        low, high = self._known_bracket(variant, whole)
        best = self.best()
        compiles = MAX_COMPILES
        if not first and best is not None:
            compiles = MAX_COMPILES // 2
            better = self._better(variant, path, whole, best, high)
            if better is None:
                return
            low, high = (low, better) if low < better else (-1, better)
        if high is None:
            high = self._feasible_end(variant, path, whole)
        if high is None:
            return
        low, high = self._bisect(variant, path, whole, low, high, compiles)
        if high - low == 1 and low >= 0:
            self._between(variant, range(whole[low] + 1, whole[high]))

    def _better(
        self, variant: int, path: Path, whole: Sequence[int], best: Measured, high: int | None
    ) -> int | None:
        """A position that fits and recomputes less than the best plan known.

        The peak does not fall steadily along a path, so where the nearest one does not fit, a few before it are tried.
        """
        tried: set[int] = set()
        for share in STEPS_BACK:
            position = max(
                (p for p, i in enumerate(whole) if path.states[i].cost <= share * best.cost), default=-1
            )
            if high is not None and position >= high:
                return high
            while position >= 0 and position not in tried and len(tried) < MAX_STEPS_BACK:
                if not self._promising(variant, path, whole[position], best):
                    break
                tried.add(position)
                measured = self._measure(variant, whole[position])
                if measured is not None and self.fits(measured):
                    return position
                # Barely too much: a loop split in two, or what is kept a little differently, may fit.
                if measured is None or measured.use.peak_bytes > NEARLY * self.budget:
                    break
                if len(tried) == 1 and self._split_fits(variant, path, whole, position, best):
                    return None
                position -= 1
        return None

    def _split_fits(
        self, variant: int, path: Path, whole: Sequence[int], position: int, best: Measured
    ) -> bool:
        """Whether, between a state and the next, a split fits that recomputes less than the best plan known."""
        stop = whole[position + 1] if position + 1 < len(whole) else len(path.states)
        splits = [i for i in range(whole[position] + 1, stop) if path.states[i].cost <= WORTH * best.cost]
        self._between(variant, splits)
        return self.best() != best

    def _promising(self, variant: int, path: Path, index: int, best: Measured) -> bool:
        """Whether a state may fit: what is alive at the peak beside the kept bytes differs little from plan to plan.

        A compilation may take a minute, so a path is not looked at where this says that it must fail.
        """
        state = path.states[index]
        own = [
            m for (number, i), m in self.candidates.record.measured.items() if number == variant and i >= 0
        ]
        like = min(own, key=lambda m: abs(m.nbytes - state.nbytes), default=best)
        predicted = state.nbytes + like.use.peak_bytes - like.nbytes
        return predicted <= PROMISING * self.budget

    def _bisect(
        self, variant: int, path: Path, whole: Sequence[int], low: int, high: int, compiles: int
    ) -> tuple[int, int]:
        """Narrow the bracket: position `low` of `whole` does not fit, `high` does."""
        for _ in range(compiles):
            if high - low <= 1 or self._close(variant, whole[high]):
                break
            middle = self._guess(variant, path, whole, low, high)
            if self._fits_at(variant, whole[middle]):
                high = middle
            else:
                low = middle
        return low, high

    def _between(self, variant: int, splits: Sequence[int]) -> None:
        """Try the splits between two neighbours, from the one that recomputes most, as long as they fit."""
        for index in reversed(splits):
            if not self._fits_at(variant, index) or self._close(variant, index):
                break

    def _fits_at(self, variant: int, index: int) -> bool:
        measured = self._measure(variant, index)
        return measured is not None and self.fits(measured)

    def _known_bracket(self, variant: int, whole: Sequence[int]) -> tuple[int, int | None]:
        """Positions of the last state known not to fit before the first known to fit, from earlier searches."""
        measured = self.candidates.record.measured
        known = {p: measured[variant, i] for p, i in enumerate(whole) if (variant, i) in measured}
        high = min((p for p, m in known.items() if self.fits(m)), default=None)
        low = max(
            (p for p, m in known.items() if not self.fits(m) and (high is None or p < high)), default=-1
        )
        return low, high

    def _feasible_end(self, variant: int, path: Path, whole: Sequence[int]) -> int | None:
        """A position that fits near the end of the path. Recomputing everything is not always the lowest peak."""
        last = len(whole) - 1
        edges = set(path.edges)
        others = [p for p, i in enumerate(whole) if i in edges and last * 0.6 <= p < last]
        tried = [last, *(others[len(others) // 2 :: max(1, len(others) // 4)][:2] if variant == 0 else ())]
        return next((p for p in tried if self._fits_at(variant, whole[p])), None)

    def _close(self, variant: int, index: int) -> bool:
        known = self.candidates.record.measured.get((variant, index))
        return known is not None and self.fits(known) and known.use.peak_bytes >= CLOSE * self.budget

    def _guess(self, variant: int, path: Path, whole: Sequence[int], low: int, high: int) -> int:
        """Interpolate the compiled peak over kept bytes; stay inside the bracket."""
        kept = [path.states[i].nbytes for i in whole]
        measured = self.candidates.record.measured
        upper = measured.get((variant, whole[low])) if low >= 0 else measured.get((0, -1))
        lower = measured.get((variant, whole[high]))
        if lower is None or upper is None or upper.use.peak_bytes <= lower.use.peak_bytes:
            return (low + high) // 2
        share = (self.budget - lower.use.peak_bytes) / (upper.use.peak_bytes - lower.use.peak_bytes)
        wanted = kept[high] + share * (kept[max(low, 0)] - kept[high])
        position = next((p for p in range(low + 1, high) if kept[p] <= wanted), high - 1)
        # Never less than a tenth of the bracket: interpolation alone can creep.
        margin = max(1, (high - low) // 10)
        return min(max(position, low + margin), high - margin)
