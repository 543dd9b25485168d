"""How deeply checkpoints may lie in each other: deriving one derives the next inside it, so each takes some frames of Python's stack.

A plan near the floor has as many as the model has layers, more than Python's default limit leaves room for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_FRAMES = 250
"""Frames for one level: tracing, deriving and lowering one take 11 to 30, and the user's own function may take many more."""

_lock = threading.Lock()
_levels: list[int] = []
"""All levels that are entered, of all threads."""
_before: int | None = None
"""The limit before the first of them; none while it is in force."""
_thread = threading.local()


@contextlib.contextmanager
def one_level_deeper() -> Iterator[None]:
    """Leave Python's stack room for one more level. The limit is that of all threads: it is raised while one is inside, and given back by the
    last."""
    level: int = getattr(_thread, "level", 0) + 1
    _thread.level = level
    _raise(level)
    try:
        yield
    finally:
        _thread.level = level - 1
        _give_back(level)


def _raise(level: int) -> None:
    global _before
    with _lock:
        if _before is None:
            _before = sys.getrecursionlimit()
        _levels.append(level)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _before + _FRAMES * level))


def _give_back(level: int) -> None:
    global _before
    with _lock:
        _levels.remove(level)
        if _levels or _before is None:
            return
        # A thread that came in while another had raised the limit may stand deeper than it was: then the next to leave gives it back.
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(_before)
            _before = None
