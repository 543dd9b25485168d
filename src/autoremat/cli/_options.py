"""The options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from autoremat._errors import CostTableError
from autoremat.cli._input import Example, Spec, load_example, read_argnums, read_spec
from autoremat.cost import Costs, CostTable

F = TypeVar("F", bound=Callable[..., Any])

spec_argument = click.argument("spec", callback=read_spec, metavar="FILE.py:NAME")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, nothing else, to stdout."
)
target_option = click.option(
    "--target",
    metavar="NAME",
    help="Where it will run, such as tpu:v5e or gpu:h100 (see `autoremat targets`); left out, this machine's backend.",
)


def _read_costs(context: click.Context, parameter: click.Parameter, value: str | None) -> Costs:
    if value is None or value == "flops":
        return value
    try:
        return CostTable.load(value)
    except CostTableError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise CostTableError(
            f"{error} --costs takes a file that `autoremat calibrate --out` made, or flops. Cheapest fix: leave it out, for the published rates."
        ) from error


costs_option = click.option(
    "--costs",
    callback=_read_costs,
    metavar="COSTS.json|flops",
    help="What recomputation is priced by: times measured by `autoremat calibrate`, or FLOPs alone; left out, published rates.",
)


def out_options(metavar: str, help: str) -> Callable[[F], F]:
    """`--out`, and `--force` to overwrite its file. See `Output.save`."""

    def add(command: F) -> F:
        command = click.option("--force", is_flag=True, help="Overwrite the file of --out.")(command)
        return click.option("--out", type=click.Path(path_type=Path), metavar=metavar, help=help)(command)

    return add


effort_option = click.option(
    "--effort",
    type=click.Choice(["fast", "balanced", "optimal"]),
    default="balanced",
    show_default=True,
    help="fast tries one way to stage the program, balanced all promising ones, optimal compiles many more.",
)


def gradient_options(command: F) -> F:
    """`--argnums` and `--has-aux`. Left out, what NAME returns holds."""
    command = click.option(
        "--argnums",
        callback=read_argnums,
        metavar="N[,N...]",
        help="The arguments to differentiate, as in jax.grad: 0, or 0,2.  [default: 0]",
    )(command)
    return click.option(
        "--has-aux", is_flag=True, help="The function returns (loss, auxiliary data), as in jax.grad."
    )(command)


def load(spec: Spec, argnums: int | tuple[int, ...] | None, *, has_aux: bool) -> Example:
    """The example, with what the command line says about it."""
    example = load_example(spec)
    return replace(
        example,
        argnums=example.argnums if argnums is None else argnums,
        has_aux=example.has_aux or has_aux,
    )
