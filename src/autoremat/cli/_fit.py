"""`autoremat fit`."""

from __future__ import annotations

from pathlib import Path

import click

from autoremat.cli._input import Spec, load_example
from autoremat.cli._options import (
    costs_option,
    effort_option,
    json_option,
    out_options,
    spec_argument,
    target_option,
)
from autoremat.cli._output import Output, check_out
from autoremat.cost import Costs
from autoremat.plan import fit
from autoremat.plan._fit import fit_data
from autoremat.report import fit_report


@click.command("fit")
@spec_argument
@click.option(
    "--memory", metavar="SIZE", help='Of one device, such as "16GiB"; left out, what the target has.'
)
@click.option(
    "--reserve",
    default="5%",
    show_default=True,
    metavar="SIZE",
    help="Of the memory, what must stay free for what no program shows.",
)
@out_options("PLAN.json", "Save the plan to this file.")
@target_option
@costs_option
@effort_option
@json_option
def fit_command(
    *,
    spec: Spec,
    memory: str | None,
    reserve: str,
    out: Path | None,
    force: bool,
    target: str | None,
    costs: Costs,
    effort: str,
    as_json: bool,
) -> None:
    """Fit a whole training step into the memory of a device.

    NAME in FILE.py is a function without arguments that returns the step and its example arguments: `return step, (params,
    state, batch)`. The step takes a gradient somewhere inside; jit it as you will run it. In your program:

    \b
        plan = autoremat.Plan.load("plan.json")
        step = autoremat.fit(step, *args, memory=..., plan=plan).step
    """
    output = Output(as_json=as_json)
    check_out(out, force=force)
    with output.quiet(), output.progress() as progress:
        example = load_example(spec)
        found = fit(
            example.fun,
            *example.args,
            memory=memory,
            reserve=reserve,
            target=target,
            costs=costs,
            effort=effort,
            progress=progress,
        )
    data = fit_data(found)
    output.show(fit_report(data))
    output.save(found.plan, out, data)
    output.finish(data)
