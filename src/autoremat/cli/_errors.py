"""Errors as exit codes that scripts can trust."""

from __future__ import annotations

from typing import Any

from autoremat._errors import (
    AutorematError,
    BudgetError,
    DifferentiationError,
    EffectError,
    InfeasibleBudgetError,
    PolicyError,
)

OK, UNEXPECTED, USAGE, INFEASIBLE, BAD_INPUT, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_CODES = """\
\b
Exit codes:
  0    done
  1    an unexpected error, or a package is missing
  2    wrong usage: an option, an argument, a budget that cannot be read
  3    the budget is infeasible: the message states the floor
  4    FILE.py or its function is bad: no import, no such name, no gradient
  5    planning, compiling or writing failed
  130  interrupted
"""
"""For `--help`. The first line keeps click from filling the lines."""


class InputError(AutorematError):
    """FILE.py or what NAME returns cannot be used."""


class MissingPackageError(AutorematError):
    """A package that a command needs is not installed."""


class OutputError(AutorematError):
    """A file cannot be written."""


_CODES: tuple[tuple[type[AutorematError], int], ...] = (
    (MissingPackageError, UNEXPECTED),
    (BudgetError, USAGE),
    (InfeasibleBudgetError, INFEASIBLE),
    (InputError, BAD_INPUT),
    (DifferentiationError, BAD_INPUT),
    (PolicyError, BAD_INPUT),
    (EffectError, BAD_INPUT),
)


def exit_code(error: AutorematError) -> int:
    """The exit code of an error that autoremat raised on purpose."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def error_data(error: BaseException, code: int, message: str = "") -> dict[str, Any]:
    """An error as `--json` prints it."""
    data: dict[str, Any] = {
        "error": message or str(error),
        "kind": type(error).__name__,
        "exit_code": code,
    }
    if isinstance(error, InfeasibleBudgetError):
        data |= {"floor_bytes": error.floor_bytes, "op": error.op}
    return data
