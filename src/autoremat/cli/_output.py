"""Where the results of a command go: tables for a person, or one JSON object and nothing else on stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import click

from autoremat.cli._errors import OutputError
from autoremat.report import Report, TerminalProgress, show, terminal, to_json


def check_out(out: Path | None, *, force: bool) -> None:
    """Refuse a file that is there, before any work is done for it."""
    if out is None:
        return
    if out.is_dir():
        raise click.UsageError(f"--out: {out} is a folder; need the name of a file in it.")
    if out.exists() and not force:
        raise click.UsageError(
            f"--out: {out} exists. Cheapest fix: another name, or --force to overwrite it."
        )
    if not out.parent.is_dir():
        raise click.UsageError(f"--out: the folder {out.parent} does not exist. Cheapest fix: make it first.")


@contextlib.contextmanager
def writing(out: Path) -> Generator[None, None, None]:
    """A file that cannot be written is an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}.") from error


class Savable(Protocol):
    """What has a file format of its own."""

    def save(self, path: Path) -> None:
        """Write it."""
        ...


class Output:
    """Prints reports as they come, or collects their data for `--json`."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._console = terminal()

    def quiet(self) -> AbstractContextManager[Any]:
        """While the user's code runs: with `--json`, what it prints goes to stderr."""
        return contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext()

    def progress(self) -> TerminalProgress:
        """Progress on stderr."""
        return TerminalProgress()

    def show(self, report: Report) -> None:
        """Print a report, unless the data will be printed in the end."""
        if not self.as_json:
            show(report, self._console)
            self._console.file.flush()

    def say(self, text: str) -> None:
        """A line for a person."""
        if not self.as_json:
            click.echo(text)

    def save(self, what: Savable, out: Path | None, data: dict[str, Any]) -> None:
        """Write a plan or a table to the file of `--out`, if there is one, and say so. Raises `OutputError` if it cannot be written."""
        if out is None:
            return
        with writing(out):
            what.save(out)
        data["wrote"] = str(out)
        self.say(f"Wrote {out}")

    def finish(self, data: Any) -> None:
        """The data of everything, with `--json`."""
        if self.as_json:
            click.echo(to_json(data))
