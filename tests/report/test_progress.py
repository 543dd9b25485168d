"""What a log and a terminal see of compilations and of a loop."""

from __future__ import annotations

import io
from typing import NamedTuple

import pytest

from autoremat.report import TerminalProgress


class Use(NamedTuple):
    peak_bytes: int = 278_777_932
    seconds: float = 3.38
    cached: bool = False


def test_a_log_gets_finished_lines_only():
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        progress.compiling("plan 3 of [bold]9")
        assert file.getvalue() == ""
        progress.compiled("plan 3 of [bold]9", Use())
    assert file.getvalue() == "Compiled  265.9 MiB   3.4 s  plan 3 of [bold]9\n"


def test_a_long_name_goes_on_below():
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        progress.compiled("plan 42 of 68, one stage a unit, loop bodies in two stages, dependence", Use())
    assert file.getvalue().splitlines() == [
        "Compiled  265.9 MiB   3.4 s  plan 42 of 68, one stage a unit, loop bodies in two",
        "                             stages, dependence",
    ]


def test_what_was_compiled_before_took_no_time():
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        progress.compiled("plan 3 of 9", Use(cached=True))
    assert file.getvalue() == "Known     265.9 MiB          plan 3 of 9\n"


def test_a_terminal_sees_what_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        progress.compiling("plan 3 of 9")
        progress.compiled("plan 3 of 9", Use())
    assert "Compiling plan 3 of 9" in file.getvalue()
    assert "0:00:00" in file.getvalue()
    assert file.getvalue().endswith("Compiled  265.9 MiB   3.4 s  plan 3 of 9\n")


def test_an_error_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()

    def fail() -> None:
        with TerminalProgress(file) as progress:
            progress.compiling("plan 3 of 9")
            raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        fail()
    hidden, shown = (file.getvalue().rfind(code) for code in ("\x1b[?25l", "\x1b[?25h"))  # the cursor
    assert 0 <= hidden < shown


def test_a_bar_over_items(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        assert list(progress.over("abc", "Training", 3)) == ["a", "b", "c"]
    assert "Training" in file.getvalue()
    assert "3/3" in file.getvalue()


def test_a_log_gets_no_bar():
    file = io.StringIO()
    with TerminalProgress(file) as progress:
        assert list(progress.over(range(3), "Training", 3)) == [0, 1, 2]
    assert file.getvalue() == ""
