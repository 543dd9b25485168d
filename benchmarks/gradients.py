"""How far two gradients are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Difference:
    """Of two gradients: the norm of the difference over the norm, of all parameters together and of the worst array.

    Arrays whose gradient is nothing but rounding are left out of the second: the bias of a convolution before batch
    normalization has the gradient zero.
    """

    whole: float
    worst: float


ROUNDING = 1e-6
"""An array whose largest entry is below this share of the largest of all is nothing but rounding."""


def difference(ours: Any, theirs: Any) -> Difference:
    """How far two gradients are apart."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    ]
    largest = max(float(np.abs(b).max()) for _, b in pairs)
    norms = [(float(np.linalg.norm(a - b)), float(np.linalg.norm(b))) for a, b in pairs]
    whole = math.hypot(*(d for d, _ in norms)) / math.hypot(*(n for _, n in norms))
    real = [n for n, (_, b) in zip(norms, pairs, strict=True) if np.abs(b).max() >= ROUNDING * largest]
    return Difference(whole, max(d / n for d, n in real))
