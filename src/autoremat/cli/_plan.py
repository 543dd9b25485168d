"""`autoremat plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autoremat.cli._input import Spec
from autoremat.cli._options import (
    costs_option,
    effort_option,
    gradient_options,
    json_option,
    load,
    out_options,
    spec_argument,
    target_option,
)
from autoremat.cli._output import Output, check_out
from autoremat.cost import Costs
from autoremat.plan import plan
from autoremat.plan._plan import summarize
from autoremat.report import plan_report


@click.command("plan")
@spec_argument
@click.option(
    "--budget", required=True, metavar="SIZE", help='Of the compiled peak: "12GiB", "800MB", "50%".'
)
@out_options("PLAN.json", "Save the plan to this file.")
@gradient_options
@target_option
@costs_option
@effort_option
@json_option
def plan_command(
    *,
    spec: Spec,
    budget: str,
    out: Path | None,
    force: bool,
    argnums: int | tuple[int, ...] | None,
    has_aux: bool,
    target: str | None,
    costs: Costs,
    effort: str,
    as_json: bool,
) -> None:
    """Find what to keep and what to recompute so that a gradient fits a budget.

    NAME in FILE.py is a function without arguments that returns the function to differentiate and its example arguments:
    `return loss, (params, batch)`. The plan is checked against the compiled program. In your program:

    \b
        plan = autoremat.Plan.load("plan.json")
        loss = plan.apply(loss)
        step = jax.jit(step, compiler_options=plan.compiler_options)
    """
    output = Output(as_json=as_json)
    check_out(out, force=force)
    with output.quiet(), output.progress() as progress:
        example = load(spec, argnums, has_aux=has_aux)
        result = plan(
            example.fun,
            *example.args,
            budget=int(budget) if budget.strip().isdecimal() else budget,
            argnums=example.argnums,
            has_aux=example.has_aux,
            target=target,
            effort=effort,
            costs=costs,
            progress=progress,
        )
    data: dict[str, Any] = summarize(result)
    output.show(plan_report(data))
    output.save(result, out, data)
    output.finish(data)
