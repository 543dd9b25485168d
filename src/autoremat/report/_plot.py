"""A plot as lines of text."""

from __future__ import annotations

from autoremat.report._view import Axis, Plot

WIDTH, HEIGHT = 56, 12
"""Of the area for points, in characters: with its labels it fits 80 columns."""


def plot_lines(plot: Plot) -> list[str]:
    """The lines, at most 80 characters wide. In ASCII, which every terminal and log shows."""
    area = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x, y, mark in plot.points:
        area[HEIGHT - 1 - _cell(y, plot.y, HEIGHT)][_cell(x, plot.x, WIDTH)] = mark
    labels = [plot.y.high_text, *[""] * (HEIGHT - 2), plot.y.low_text]
    gutter = max(map(len, labels))
    lines = [plot.y.title]
    lines += [f"{label:>{gutter}} |{''.join(row)}".rstrip() for label, row in zip(labels, area, strict=True)]
    lines.append(f"{'':>{gutter}} +{'-' * WIDTH}")
    between = WIDTH - len(plot.x.low_text) - len(plot.x.high_text)
    lines.append(f"{'':>{gutter}}  {plot.x.low_text}{plot.x.title:^{between}}{plot.x.high_text}")
    return lines


def _cell(value: float, axis: Axis, cells: int) -> int:
    """The cell of an axis that a value falls into; all in the first one if the axis has no length."""
    length = axis.high - axis.low
    return round((value - axis.low) / length * (cells - 1)) if length > 0 else 0
