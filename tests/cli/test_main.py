"""The group: help, version, usage errors, and how errors become exit codes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import autoremat
from autoremat import _errors
from autoremat.cli import _errors as codes
from autoremat.cli import _residuals as residuals_module
from support.cli import Call

COMMANDS = ("plan", "residuals", "frontier", "demo")


def test_help_names_commands_and_exit_codes(call: Call):
    result = call("--help")
    assert result.code == 0
    for text in (*COMMANDS, "3    the budget is infeasible", "130  interrupted"):
        assert text in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, call: Call):
    result = call(command, "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    for text in ("Exit codes:", "--json", "2    wrong usage"):
        assert text in result.out


def test_version(call: Call):
    result = call("--version")
    assert (result.code, result.out) == (0, f"autoremat, version {autoremat.__version__}\n")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "Missing command"),
        (["plann"], "No such command 'plann'"),
        (["plan"], "Missing argument"),
        (["plan", "model.py:example"], "Missing option '--budget'"),
        (["plan", "model.py", "--budget", "50%"], "got 'model.py', need FILE.py:NAME"),
        (["plan", "model.py", "--budget", "50%"], "Cheapest fix: model.py:example"),
        (["plan", "model.py:", "--budget", "50%"], "got 'model.py:', need FILE.py:NAME"),
        (["plan", "m.py:f", "--budget", "1", "--effort", "slow"], "'slow' is not one of 'fast', 'balanced'"),
        (
            ["plan", "m.py:f", "--budget", "1", "--argnums", "x"],
            "got 'x', need argument numbers such as 0 or 0,2",
        ),
        (["frontier", "m.py:f", "--compiled", "-1"], "-1 is not in the range"),
        (["demo", "--size", "layer=1"], "got ['layer'], need some of ['layers'"),
        (["demo", "--size", "layers"], "need such as layers=2,width=32"),
    ],
)
def test_wrong_usage_is_2(argv: list[str], text: str, call: Call):
    result = call(*argv)
    assert result.code == codes.USAGE
    assert text in result.words
    assert result.out == ""
    assert "Traceback" not in result.err


def test_wrong_usage_as_json(call: Call):
    result = call("plan", "model.py", "--json")
    assert result.code == codes.USAGE
    assert result.data["exit_code"] == 2
    assert "FILE.py:NAME" in result.data["error"] or "--budget" in result.data["error"]
    assert result.data["kind"] in ("BadParameter", "MissingParameter")


def every_error() -> list[type[_errors.AutorematError]]:
    found: list[type[_errors.AutorematError]] = []
    waiting = [_errors.AutorematError]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    return found


def test_every_error_has_an_exit_code():
    """Those of the infeasible budget and of plans are told apart from a fault of the user's file."""
    found = {error.__name__: codes.exit_code(error("text")) for error in every_error()}
    assert found["InfeasibleBudgetError"] == 3
    assert found["BudgetError"] == 2
    assert {found[n] for n in ("InputError", "DifferentiationError", "PolicyError", "EffectError")} == {4}
    assert {
        found[n] for n in ("CompileError", "PlanMismatchError", "PlanFileError", "TargetError", "OutputError")
    } == {5}
    assert found["MissingPackageError"] == 1
    assert set(found.values()) == {1, 2, 3, 4, 5}


def raise_instead(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(residuals_module, "saved_residuals", fail)


def test_an_unexpected_error_is_1_with_a_traceback(model: Path, call: Call, monkeypatch: pytest.MonkeyPatch):
    raise_instead(monkeypatch, ZeroDivisionError("by zero"))
    result = call("residuals", f"{model}:example", "--json")
    assert result.code == codes.UNEXPECTED
    assert "Traceback" in result.err
    assert (
        "unexpected ZeroDivisionError: by zero. This is a fault of autoremat: please report it." in result.err
    )
    assert result.data["kind"] == "ZeroDivisionError"


def test_an_interrupt_is_130(model: Path, call: Call, monkeypatch: pytest.MonkeyPatch):
    raise_instead(monkeypatch, KeyboardInterrupt())
    result = call("residuals", f"{model}:example")
    assert result.code == codes.INTERRUPTED
    assert result.words == "autoremat: error: interrupted."


def test_a_warning_is_one_line(model: Path, call: Call, monkeypatch: pytest.MonkeyPatch):
    real = residuals_module.saved_residuals

    def warn(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("the name 'qkv' matches nothing", autoremat.UnmatchedNameWarning, stacklevel=1)
        return real(*args)

    monkeypatch.setattr(residuals_module, "saved_residuals", warn)
    result = call("residuals", f"{model}:example")
    assert result.code == 0
    assert result.err == "autoremat: warning: the name 'qkv' matches nothing\n"


def test_the_script_points_here():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="autoremat")
    assert {s.value for s in scripts} <= {"autoremat.cli:main"}


def test_a_reader_that_leaves_is_no_error(model: Path):
    """`autoremat ... | head`: no traceback."""
    source = Path(autoremat.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r}); from autoremat.cli import main; "
        f"sys.exit(main(['residuals', {f'{model}:example'!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == codes.UNEXPECTED
    # JAX 0.10's plug-in for GPUs, where it is installed, says by itself that there is none.
    of_jax = ("absl::InitializeLog()", "Could not find cuda drivers")
    assert [line for line in errors.splitlines() if not any(text in line for text in of_jax)] == []
