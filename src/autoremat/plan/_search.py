"""The budget loop: along a path, find the plan with the least recomputation whose compiled peak fits.

The compiled peak follows the kept bytes, but not exactly: so each step asks the compiler, and interpolates between what it
said. The plan taken is the one with the least recomputation among all that were compiled and fit.
"""

from __future__ import annotations

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


@dataclass
class Search:
    """One search. `infeasible` is the least peak seen when nothing fits."""

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
        except CompileError:
            return None

    def _search_path(self, variant: int, path: Path, *, first: bool) -> None:
        """Bisect one path. A path that is not the first is followed only while it recomputes less than the best plan."""
        low, high = self._known_bracket(variant, path)
        best = self.best()
        compiles = MAX_COMPILES
        if not first and best is not None:
            compiles = MAX_COMPILES // 2
            better = max((s.index for s in path.states if s.cost <= WORTH * best.cost), default=-1)
            if better <= low:
                return
            if high is None or high > better:
                if not self._fits_at(variant, better):
                    return
                high = better
        if high is None:
            high = self._feasible_end(variant, path)
        if high is None:
            return
        for _ in range(compiles):
            if high - low <= 1 or self._close(variant, high):
                return
            middle = self._guess(variant, path, low, high)
            if self._fits_at(variant, middle):
                high = middle
            else:
                low = middle

    def _fits_at(self, variant: int, index: int) -> bool:
        measured = self._measure(variant, index)
        return measured is not None and self.fits(measured)

    def _known_bracket(self, variant: int, path: Path) -> tuple[int, int | None]:
        """The last state known not to fit before the first known to fit, from earlier searches."""
        known = {i: m for (g, i), m in self.candidates.record.measured.items() if g == variant and i >= 0}
        high = min((i for i, m in known.items() if self.fits(m)), default=None)
        low = max((i for i, m in known.items() if not self.fits(m) and (high is None or i < high)), default=-1)
        return low, high

    def _feasible_end(self, variant: int, path: Path) -> int | None:
        """A state that fits near the end of the path. Recomputing everything is not always the lowest peak."""
        last = len(path.states) - 1
        others = [e for e in path.edges if last * 0.6 <= e < last]
        tried = [last, *(others[len(others) // 2 :: max(1, len(others) // 4)][:2] if variant == 0 else ())]
        return next((index for index in tried if self._fits_at(variant, index)), None)

    def _close(self, variant: int, index: int) -> bool:
        known = self.candidates.record.measured.get((variant, index))
        return known is not None and self.fits(known) and known.use.peak_bytes >= CLOSE * self.budget

    def _guess(self, variant: int, path: Path, low: int, high: int) -> int:
        """Interpolate the compiled peak over kept bytes; stay inside the bracket."""
        states = path.states
        upper = self.candidates.record.measured.get((variant, low))
        lower = self.candidates.record.measured.get((variant, high))
        baseline = self.candidates.record.measured.get((0, -1))
        high_bytes = states[max(low, 0)].nbytes
        high_peak = upper.use.peak_bytes if upper else baseline.use.peak_bytes if baseline else None
        if lower is None or high_peak is None or high_peak <= lower.use.peak_bytes:
            return (low + high) // 2
        share = (self.budget - lower.use.peak_bytes) / (high_peak - lower.use.peak_bytes)
        wanted = states[high].nbytes + share * (high_bytes - states[high].nbytes)
        index = next((i for i in range(low + 1, high) if states[i].nbytes <= wanted), high - 1)
        # Never less than a tenth of the bracket: interpolation alone can creep.
        margin = max(1, (high - low) // 10)
        return min(max(index, low + margin), high - margin)
