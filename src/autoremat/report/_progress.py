"""What is going on, on stderr: a line that moves while something is compiled, a line that stays when it is done."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from autoremat.report._format import seconds_text, size_text
from autoremat.report._terminal import terminal

T = TypeVar("T")


class Compiled(Protocol):
    """What is known of a compiled program."""

    @property
    def peak_bytes(self) -> int:
        """Its compiled peak, in bytes."""
        ...

    @property
    def seconds(self) -> float:
        """How long the compiler took."""
        ...

    @property
    def cached(self) -> bool:
        """Whether an earlier compilation of the same program was read from disk instead."""
        ...


class TerminalProgress:
    """Progress for a person; a context manager, so that an error leaves the terminal as it was.

    A terminal sees what is being compiled and for how long; a log sees the finished lines only.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.console: Console = terminal(file, stderr=file is None)
        self._live: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def compiling(self, what: str) -> None:
        """A compilation starts."""
        self._start(f"Compiling {what}", None, SpinnerColumn(), _text(), TimeElapsedColumn())

    def compiled(self, what: str, use: Compiled) -> None:
        """It ended: a line with its peak, how long it took, and what it was."""
        self.stop()
        size = size_text(use.peak_bytes)
        verb, took = ("Known   ", "") if use.cached else ("Compiled", seconds_text(use.seconds))
        start = f"{verb} {size:>10} {took:>7}  "
        lines = textwrap.wrap(what, max(20, self.console.width - len(start))) or [""]
        self.console.print(start + f"\n{' ' * len(start)}".join(lines), soft_wrap=True)

    def over(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items, with a bar that shows how many of `total` are done."""
        self._start(what, total, _text(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        for item in items:
            yield item
            if self._live is not None:
                self._live.advance(self._live.task_ids[0])
        self.stop()

    def stop(self) -> None:
        """Take the moving line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, what: str, total: int | None, *columns: ProgressColumn) -> None:
        self.stop()
        if self.console.is_terminal:
            self._live = Progress(*columns, console=self.console, transient=True)
            self._live.add_task(what, total=total)
            self._live.start()


def _text() -> TextColumn:
    """The description of a task, which is no markup."""
    return TextColumn("{task.description}", markup=False)
