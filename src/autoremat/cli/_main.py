"""The group of commands, and `main`: the one place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from typing import Any, TextIO

import click

import autoremat
from autoremat._errors import AutorematError, AutorematWarning
from autoremat.cli._calibrate import calibrate_command
from autoremat.cli._demo_command import demo_command
from autoremat.cli._errors import EXIT_CODES, INTERRUPTED, OK, UNEXPECTED, error_data, exit_code
from autoremat.cli._fit import fit_command
from autoremat.cli._frontier import frontier_command
from autoremat.cli._plan import plan_command
from autoremat.cli._residuals import residuals_command
from autoremat.cli._targets import targets_command
from autoremat.report import to_json


@click.group(
    no_args_is_help=False,  # what that exits with depends on click's version
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(autoremat.__version__, prog_name="autoremat")
def group() -> None:
    """Rematerialization for JAX that is given a memory budget and proves that it is met.

    Start with `autoremat demo`, then point `autoremat plan` at a function of your own.
    """


for command in (
    plan_command,
    fit_command,
    residuals_command,
    frontier_command,
    targets_command,
    calibrate_command,
    demo_command,
):
    group.add_command(command)
    command.epilog = EXIT_CODES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    **Arguments:** `argv` are the arguments without the program's name; left out, those of the process.

    **Returns:** the exit code: see `autoremat --help`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in arguments
    try:
        with _short_warnings():
            result = group.main(arguments, prog_name="autoremat", standalone_mode=False)
            sys.stdout.flush()
    except click.ClickException as error:
        return _report_usage(error, as_json=as_json)
    except AutorematError as error:
        return _report(error, exit_code(error), str(error), as_json=as_json)
    except click.Abort as error:
        return _report(error, INTERRUPTED, "interrupted.", as_json=as_json)
    except BrokenPipeError:
        # The reader of stdout left, as `head` does: nothing is to be said, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except Exception as error:  # the outermost place: a script gets its exit code, a bug report its traceback
        traceback.print_exc()
        text = f"unexpected {type(error).__name__}: {error}. This is a fault of autoremat: please report it."
        return _report(error, UNEXPECTED, text, as_json=as_json)
    return result if isinstance(result, int) else OK


def _report(error: BaseException, code: int, message: str, *, as_json: bool) -> int:
    """One message on stderr, the same as JSON on stdout if asked for."""
    click.echo(f"autoremat: error: {message}", err=True)
    if as_json:
        click.echo(to_json(error_data(error, code, message)))
    return code


def _report_usage(error: click.ClickException, *, as_json: bool) -> int:
    """Click's own message, with its hint at `--help`."""
    error.show()
    if as_json:
        click.echo(to_json(error_data(error, error.exit_code, error.format_message())))
    return error.exit_code


@contextlib.contextmanager
def _short_warnings() -> Generator[None, None, None]:
    """Warnings of autoremat as one line each, without the line of code that they came from."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        if issubclass(category, AutorematWarning):
            click.echo(f"autoremat: warning: {message}", err=True)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
