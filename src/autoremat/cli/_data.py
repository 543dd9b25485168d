"""Results as plain data: what the views are built from and `--json` prints. Bytes, FLOPs, seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoremat.plan import Frontier
from autoremat.transform import Residual, Residuals


def residuals_data(residuals: Residuals, function: str) -> dict[str, Any]:
    """All residuals in the order in which they are made, arguments first."""
    return {
        "function": function,
        "total_bytes": residuals.total_bytes,
        "argument_bytes": residuals.argument_bytes,
        "intermediate_bytes": residuals.intermediate_bytes,
        "residuals": [_residual_data(r) for r in residuals.residuals],
        "notes": list(residuals.notes),
    }


def _residual_data(residual: Residual) -> dict[str, Any]:
    return {**dataclasses.asdict(residual), "shape": list(residual.shape)}


def frontier_data(frontier: Frontier, forward_flops: int) -> dict[str, Any]:
    """A frontier, with the FLOPs of the forward pass to compare recomputation with."""
    points: Sequence[Any] = frontier.points
    return {
        "function": frontier.function,
        "target": frontier.target,
        "unplanned_bytes": frontier.unplanned_bytes,
        "forward_flops": forward_flops,
        "grouping": frontier.grouping,
        "planning_seconds": frontier.seconds,
        "ops": frontier.ops,
        "points": [dataclasses.asdict(point) for point in points],
    }
