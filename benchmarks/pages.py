"""What the benchmarks write: a table for the terminal, and the committed page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe


def publish(
    name: str,
    title: str,
    text: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    out: Path,
    width: int,
) -> None:
    """Print a table of cells, and write it as `name_jax<version>.md` in `out`, with the command and the machine that made it."""
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}_jax{jax.__version__}.md"
    lines = [
        f"# {title}",
        "",
        f"Made by `python -m benchmarks.{name}` on {describe()}.",
        "",
        text,
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    path.write_text("\n".join(lines))
    print(f"Wrote {path}")
