"""The pytest plugin, loaded by `-p conformance.plugin` before any test is imported.

It substitutes, lets a test file import what the installed JAX lacks, selects the cases, and writes each outcome at once,
so that a process that dies loses one case only.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.selection import Selection, imported_names, select
from conformance.substitution import substitute, supply


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin; the harness sets them."""
    group = parser.getgroup("conformance")
    group.addoption("--outcomes", metavar="FILE", help="write the outcome of each case to this file")
    group.addoption("--substitute", action="store_true", help="put autoremat in place of JAX's functions")
    group.addoption("--test-file", metavar="FILE", help="the test file, whose imports are seen to")


def pytest_configure(config: pytest.Config) -> None:
    """Change JAX before a test imports it."""
    if name := config.getoption("--test-file"):
        for module, attribute in imported_names(Path(name)):
            supply(module, attribute, config.rootpath)
    if config.getoption("--substitute"):
        substitute()
    if name := config.getoption("--outcomes"):
        config.pluginmanager.register(Recorder(Path(name)), "conformance-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that touch rematerialization."""
    selected = [item for item in items if _is_selected(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected


@functools.cache
def _selection(path: Path) -> Selection:
    return select(path)


def _is_selected(item: pytest.Item) -> bool:
    function: Callable[..., Any] | None = getattr(item, "function", None)
    if function is None:
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_firstlineno in _selection(Path(code.co_filename)).lines


class Recorder:
    """Appends `[case, outcome, message]` to a file, a line of JSON for each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, case: str, outcome: str, message: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([case, outcome, message]) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A case without a later line did not finish."""
        self._write(_case(nodeid), "unfinished")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome of the call; of set-up or tear-down if that is where it went wrong."""
        of_part = (
            type(report) is not pytest.TestReport
        )  # of a subtest: that it passed says nothing of the case
        if report.outcome != "passed" or (report.when == "call" and not of_part):
            self._write(_case(report.nodeid), report.outcome, _message(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.outcome != "passed":
            self._write("", report.outcome, _message(report))


def _case(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else str(report.longrepr).strip().splitlines()[-1]
