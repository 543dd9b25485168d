"""Views rendered: with rich to a terminal, the same without colours as plain text, the data as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any, cast

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autoremat.report._build import plan_report
from autoremat.report._fit import fit_report
from autoremat.report._plot import plot_lines
from autoremat.report._view import (
    Block,
    Data,
    Facts,
    Note,
    Paragraph,
    Plot,
    Report,
    Section,
    Table,
)

WIDTH = 80
"""Columns of plain text, and the least that the views are made for."""

MOST = 100
"""Columns beyond which a wider terminal only tears rows apart."""


def terminal(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console for views: as wide as the terminal, up to a limit, and 80 columns where there is none.

    Strings are never read as markup: a name such as `f[bold]` comes out as it is.
    """
    console = Console(file=file, stderr=stderr, markup=False, highlight=False, emoji=False)
    console.width = min(console.width, MOST)
    return console


def show(report: Report, console: Console) -> None:
    """Print a report. Where there is no terminal, as plain text, so that a log has no trailing spaces."""
    if not console.is_terminal:
        console.file.write(f"{to_text(report)}\n\n")
        return
    for renderable in _report(report):
        console.print(renderable)


def to_text(report: Report) -> str:
    """A report as plain text of 80 columns, without trailing spaces."""
    file = io.StringIO()
    console = Console(
        file=file, width=WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False
    )
    for renderable in _report(report):
        console.print(renderable, highlight=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def to_json(data: Data) -> str:
    """Data as one JSON object. Infinities and NaN are `null`: JSON has none."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def plan_text(summary: Data) -> str:
    """The text of a plan, from the data of its summary."""
    return to_text(plan_report(summary))


def fit_text(data: Data) -> str:
    """The text of a fitted step, from its data."""
    return to_text(fit_report(data))


def _finite(value: Any) -> Any:
    match value:
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
        case dict():
            return {str(k): _finite(v) for k, v in cast("dict[Any, Any]", value).items()}
        case list() | tuple():
            return [_finite(v) for v in cast("list[Any]", value)]
        case _:
            return value


# ------------------------------------------------------------------------------------------------------------- lowering


def _report(report: Report) -> Iterator[RenderableType]:
    for section in report.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[RenderableType]:
    yield Text(section.title, style="bold")
    for block in section.blocks:
        yield Padding(_block(block), (0, 0, 0, 2), expand=False)
    yield Text("")


def _block(block: Block) -> RenderableType:
    match block:
        case Facts():
            return _facts(block)
        case Table():
            return _table(block)
        case Plot():
            return Text("\n".join(plot_lines(block)), no_wrap=True)
        case Paragraph(text):
            return Text(text, style="dim")
        case Note(text):
            return Text.assemble(("Note: ", "bold yellow"), text)


def _facts(facts: Facts) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in facts.facts:
        value = Text(fact.value)
        if fact.remark:
            value.append(f", {fact.remark}", style="dim")
        grid.add_row(Text(fact.label), value)
    return grid


def _table(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns:
        if column.number:
            grid.add_column(Text(column.title), justify="right", no_wrap=False, overflow="fold")
        else:
            grid.add_column(Text(column.title), overflow="fold", min_width=4)
    for i, row in enumerate(table.rows):
        style = "bold" if i in table.strong else ""
        cells = zip(row, table.columns, strict=True)
        grid.add_row(*(Text(cell, style=style, no_wrap=column.number) for cell, column in cells))
    return grid
