"""`autoremat demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from autoremat.cli._demo import run
from autoremat.cli._demo_model import Size
from autoremat.cli._options import json_option
from autoremat.cli._output import Output
from autoremat.report import (
    Report,
    frontier_report,
    model_report,
    plan_report,
    policies_report,
    residuals_report,
    training_report,
)

STEPS = 36
COMPILED = 4

VIEWS: dict[str, Callable[[Any], Report]] = {
    "model": model_report,
    "residuals": lambda data: residuals_report(data, top=8),
    "frontier": frontier_report,
    "plan": plan_report,
    "policies": policies_report,
    "training": training_report,
}
"""The parts of the demo in their order, and how each is shown."""


def read_size(ctx: click.Context, param: click.Parameter, value: str) -> Size:
    """Click's callback for sizes of the model, `layers=2,width=32`: those not named keep their defaults."""
    names = [f.name for f in fields(Size)]
    try:
        sizes = {k.strip(): int(v) for k, v in (item.split("=") for item in value.split(",") if item)}
    except ValueError as error:
        raise click.BadParameter(f"got {value!r}, need such as layers=2,width=32.", ctx, param) from error
    if unknown := sorted(set(sizes) - set(names)):
        raise click.BadParameter(f"got {unknown}, need some of {names}.", ctx, param)
    return Size(**sizes)


@click.command("demo")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, hidden=True)
@click.option("--size", callback=read_size, default="", hidden=True)
@click.option("--compiled", type=click.IntRange(min=0), default=COMPILED, hidden=True)
@click.option("--effort", type=click.Choice(["fast", "balanced", "optimal"]), default="balanced", hidden=True)
@json_option
def demo_command(*, steps: int, size: Size, compiled: int, effort: str, as_json: bool) -> None:
    """Train a small GPT on real text three ways, and compare them.

    Without recomputation, with the best policy of jax.checkpoint, and with a plan for half of the memory. Takes two or three
    minutes on two cores; needs Optax.
    """
    output = Output(as_json=as_json)
    parts: dict[str, Any] = {}
    with output.progress() as progress:
        for name, data in run(size, steps=steps, compiled=compiled, effort=effort, progress=progress):
            parts[name] = data
            output.show(VIEWS[name](data))
    output.finish(parts)
