"""`autoremat residuals`."""

from __future__ import annotations

import click

from autoremat.cli._data import residuals_data
from autoremat.cli._input import Spec
from autoremat.cli._options import json_option, load, spec_argument
from autoremat.cli._output import Output
from autoremat.report import residuals_report
from autoremat.transform import saved_residuals


@click.command("residuals")
@spec_argument
@click.option("--all", "everything", is_flag=True, help="Show every residual, not the largest twenty.")
@json_option
def residuals_command(*, spec: Spec, everything: bool, as_json: bool) -> None:
    """List what the backward pass of a function keeps, largest first.

    Every floating-point argument counts as differentiated. Nothing is compiled.
    """
    output = Output(as_json=as_json)
    with output.quiet():
        example = load(spec, None, has_aux=False)
        data = residuals_data(saved_residuals(example.fun, *example.args), example.title)
    output.show(residuals_report(data, top=None if everything else 20))
    output.finish(data)
