"""Step times that can be compared on a noisy machine: interleaved runs, medians, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def median_seconds(functions: Sequence[Callable[[], Any]], repeats: int = 7) -> list[float]:
    """The median time of each function in seconds; all run once in each of `repeats` rounds, after a warm-up."""
    for function in functions:
        jax.block_until_ready(function())
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]
