"""`largest_batch`: how large a batch fits, recomputing what must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autoremat._errors import CompileError, InfeasibleBudgetError
from autoremat.measure import abstract
from autoremat.plan._fit import Fit, fit

MAX_TRIED = 12
"""Sizes of a batch that are tried in one search."""


def largest_batch(
    step: Callable[..., Any], *args: Any, batch: int, multiple: int = 1, **options: Any
) -> tuple[int, Fit]:
    """The largest batch with which a training step fits into a device, and the step that does.

    **Arguments:**

    - `step`, `args`: as in `autoremat.fit`. The step must take batches of any size.
    - `batch`: the number of the argument that is the batch: arrays with the same leading axis.
    - `multiple`: the size must be a multiple of this, such as the number of devices that a batch is divided among.
    - `options`: those of `autoremat.fit`.

    **Returns:** the size, and the `Fit` for it. The size is the largest multiple for which a plan was found with this effort, unless `MAX_TRIED` sizes were not enough to
    find it, which a note of the fit says.

    **Raises:** `InfeasibleBudgetError` if not even the smallest batch fits; `ValueError` if the argument is no batch; what `fit` raises.
    """
    given = _size(args, batch)
    search = _Search(step, args, batch, multiple, options)
    return search.run(max(1, given // multiple))


def _size(args: tuple[Any, ...], batch: int) -> int:
    if not isinstance(batch, int) or not -len(args) <= batch < len(args):
        raise ValueError(
            f"`autoremat.largest_batch(batch=...)`: got {batch!r}, and there are {len(args)} arguments. Cheapest fix: the number of the "
            "argument that holds the batch."
        )
    shapes = [x.shape for x in jax.tree.leaves(jax.tree.map(abstract, args[batch]))]
    sizes = {s[0] for s in shapes if s}
    if len(sizes) != 1 or not all(shapes):
        raise ValueError(
            f"`autoremat.largest_batch(batch={batch})`: that argument holds arrays of shapes {shapes[:4]}, which share no leading axis. "
            "Cheapest fix: pass what is no batch (keys, counters) as another argument."
        )
    return sizes.pop()


@dataclass
class _Search:
    """Sizes are counted in multiples."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch: int
    multiple: int
    options: dict[str, Any]
    tried: int = field(default=0, init=False)
    error: Exception | None = field(default=None, init=False)

    def run(self, first: int) -> tuple[int, Fit]:
        """Double until nothing fits, then close in between."""
        low, high, best = 0, None, None
        size = first
        while self.tried < MAX_TRIED and (high is None or high - low > 1):
            found = self._fits(size)
            if found is None:
                high = size
                size = self._between(low, high)
            else:
                low, best = size, found
                size = 2 * size if high is None else self._between(low, high)
        if best is None:
            assert self.error is not None
            raise self.error
        if high is None or high - low > 1:
            tried = f"After {self.tried} sizes the search ended: a batch larger than {low * self.multiple} may fit."
            best = replace(best, notes=(*best.notes, tried))
        return low * self.multiple, best

    def _between(self, low: int, high: int) -> int:
        """The size at which the floor would meet the budget, if it grew with the batch from nothing; else the middle."""
        guess = (low + high) // 2
        if (
            isinstance(self.error, InfeasibleBudgetError)
            and self.error.floor_bytes
            and self.error.budget_bytes
        ):
            guess = int(high * self.error.budget_bytes / self.error.floor_bytes)
        return min(max(guess, low + 1), high - 1) if high - low > 1 else high

    def _fits(self, size: int) -> Fit | None:
        self.tried += 1
        try:
            return fit(self.step, *self._scaled(size * self.multiple), **self.options)
        except InfeasibleBudgetError as error:
            self.error = error
        except CompileError as error:
            if not error.out_of_memory:
                raise
            self.error = error
        return None

    def _scaled(self, size: int) -> tuple[Any, ...]:
        def scaled(x: Any) -> Any:
            x = abstract(x)
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=x.sharding)

        args = list(self.args)
        args[self.batch] = jax.tree.map(scaled, args[self.batch])
        return tuple(args)
