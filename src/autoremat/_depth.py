"""How deeply checkpoints may lie in each other: deriving one derives the next inside it, so each takes some frames of Python's stack.

A plan near the floor has as many as the model has layers, more than Python's default limit leaves room for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FRAMES = 250
"""Frames that one level may take, JAX's own included."""

_lock = threading.Lock()
_levels: list[int] = []
"""All levels that are entered, of all threads."""
_before = 0
"""The limit before the first of them."""
_thread = threading.local()


@contextmanager
def one_level_deeper() -> Iterator[None]:
    """Leave Python's stack room for one more level. The limit is that of all threads: it is raised while one is inside, and given back by the
    last."""
    global _before
    level: int = getattr(_thread, "level", 0) + 1
    _thread.level = level
    with _lock:
        if not _levels:
            _before = sys.getrecursionlimit()
        _levels.append(level)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _before + _FRAMES * level))
    try:
        yield
    finally:
        _thread.level = level - 1
        with _lock:
            _levels.remove(level)
            if not _levels:
                sys.setrecursionlimit(_before)
