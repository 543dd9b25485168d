"""`autoremat frontier`."""

from __future__ import annotations

import click

from autoremat.cli._data import frontier_data
from autoremat.cli._input import Spec
from autoremat.cli._options import (
    costs_option,
    gradient_options,
    json_option,
    load,
    spec_argument,
    target_option,
)
from autoremat.cli._output import Output
from autoremat.cost import Costs
from autoremat.measure import jaxpr_flops
from autoremat.plan import frontier
from autoremat.report import frontier_report


@click.command("frontier")
@spec_argument
@click.option(
    "--compiled",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Compile N of the plans and show their peaks.",
)
@click.option("--all", "everything", is_flag=True, help="Show every plan in the table.")
@gradient_options
@target_option
@costs_option
@json_option
def frontier_command(
    *,
    spec: Spec,
    compiled: int,
    everything: bool,
    argnums: int | tuple[int, ...] | None,
    has_aux: bool,
    target: str | None,
    costs: Costs,
    as_json: bool,
) -> None:
    """Show the trade of memory against recomputation, as a plot and a table."""
    output = Output(as_json=as_json)
    with output.quiet(), output.progress() as progress:
        example = load(spec, argnums, has_aux=has_aux)
        result = frontier(
            example.fun,
            *example.args,
            argnums=example.argnums,
            has_aux=example.has_aux,
            target=target,
            compiled=compiled,
            costs=costs,
            progress=progress,
        )
        data = frontier_data(result, jaxpr_flops(example.fun, *example.args))
    output.show(frontier_report(data, rows=None) if everything else frontier_report(data))
    output.finish(data)
