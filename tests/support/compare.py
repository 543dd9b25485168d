"""Results of two programs that must be the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_same(actual: Any, expected: Any, rtol: float) -> None:
    """Equal structure, dtypes and shapes, and values that differ by no more than `rtol`, of each and of the largest."""
    got, want = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(got) == len(want)
    for a, e in zip(got, want, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * (1 + np.max(np.abs(e), initial=0)))
