"""What the benchmarks write: a table for the terminal, and the committed page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe

Rows = Sequence[Sequence[str]]


def publish(
    name: str, title: str, text: str, header: Sequence[str], rows: Rows, *, out: Path, width: int
) -> None:
    """Print a table of cells, and write it as `name_jax<version>.md` in `out`, with the command and the machine that made it."""
    show(header, rows, width=width)
    path = write_page(name, title, [text, markdown_table(header, rows)], out=out)
    print(f"Wrote {path}")


def show(header: Sequence[str], rows: Rows, *, width: int) -> None:
    """Print a table of cells."""
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """A table of cells as Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_page(
    name: str, title: str, parts: Sequence[str], *, out: Path, machines: Sequence[str] | None = None
) -> Path:
    """Write `name_jax<version>.md` in `out`: the command, the machine (or `machines`) that made it, and parts with blank lines between.

    **Returns:** its path.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}_jax{jax.__version__}.md"
    made = f"Made by `python -m benchmarks.{name}` on {'; '.join(machines or [describe()])}."
    path.write_text("\n\n".join([f"# {title}", made, *parts]) + "\n")
    return path
