"""The view: what is shown, without how. Frozen, comparable, free of any renderer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Data = Mapping[str, Any]
"""Plain data as it goes to JSON: numbers, strings, lists and dicts. Sizes are bytes, times seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A label and a value, formatted; `remark` is said behind it in a quieter voice."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts below each other."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Numbers stand to the right and are never broken; text may go on in the next line."""

    title: str
    number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of formatted cells; `strong` are the numbers of the rows to look at."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`; the texts are those two with their units."""

    title: str
    low: float
    high: float
    low_text: str
    high_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Points `(x, y, mark)`; of two on one spot the later is seen."""

    x: Axis
    y: Axis
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Prose: how to read what stands above it."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that a user should not miss."""

    text: str


Block = Facts | Table | Plot | Paragraph | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled sequence of blocks."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Sections, and the data that they were built from, which is what `--json` prints."""

    sections: tuple[Section, ...]
    data: Data = field(default_factory=dict[str, Any], repr=False)
