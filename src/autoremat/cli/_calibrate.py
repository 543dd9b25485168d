"""`autoremat calibrate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from autoremat.cli._input import Spec
from autoremat.cli._options import gradient_options, json_option, load, out_options, spec_argument
from autoremat.cli._output import Output, check_out
from autoremat.plan import calibrate
from autoremat.report import calibration_report


@click.command("calibrate")
@spec_argument
@out_options("COSTS.json", "Save the table to this file.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Samples of each operation; the median counts.",
)
@gradient_options
@json_option
def calibrate_command(
    *,
    spec: Spec,
    out: Path | None,
    force: bool,
    repeats: int,
    argnums: int | tuple[int, ...] | None,
    has_aux: bool,
    as_json: bool,
) -> None:
    """Time the operations of a gradient on this machine's device.

    Plans for this device can use the table in place of published rates: `autoremat plan --costs COSTS.json`.
    """
    output = Output(as_json=as_json)
    check_out(out, force=force)
    with output.quiet(), output.progress() as progress:
        example = load(spec, argnums, has_aux=has_aux)
        table = calibrate(
            example.fun,
            *example.args,
            argnums=example.argnums,
            has_aux=example.has_aux,
            repeats=repeats,
            progress=progress,
        )
    data = asdict(table)
    output.show(calibration_report(data))
    output.save(table, out, data)
    output.finish(data)
