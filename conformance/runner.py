"""One test file in a process of its own, with JAX's functions or with ours; and what became of each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import autoremat

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
"""Settings of both runs: the CPU, as eight devices."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: `"passed"`, `"failed"`, `"skipped"`, or `"unfinished"` if the process ended first."""

    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class FileResult:
    """The cases of one test file with JAX's functions (`plain`) and with ours."""

    name: str
    plain: Mapping[str, Outcome] = field(default_factory=dict)
    ours: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def import_error(self) -> str | None:
        """Why the file cannot be imported in this installation, with JAX as it is."""
        return self.plain[""].message if "" in self.plain else None

    @property
    def live(self) -> list[str]:
        """The cases that pass with JAX's functions in this installation."""
        return [case for case, o in self.plain.items() if case and o.outcome == "passed"]

    @property
    def failed(self) -> dict[str, str]:
        """The live cases that do not pass with ours, each with what it said."""
        found: dict[str, str] = {}
        for case in self.live:
            own = self.ours.get(case) or self.ours.get("") or Outcome("unfinished", "did not run")
            if own.outcome != "passed":
                found[case] = own.message or own.outcome
        return found


def run_file(checkout: Path, name: str, folder: Path, timeout: float) -> FileResult:
    """Run the selected cases of a test file both ways. Outcomes lie in `folder`; those that are there are not run again."""
    plain = _run(checkout, name, folder / f"{_flat(name)}.jax.jsonl", False, timeout)
    ours = _run(checkout, name, folder / f"{_flat(name)}.autoremat.jsonl", True, timeout) if plain else {}
    return FileResult(name, plain, ours)


def _flat(name: str) -> str:
    return name.replace("/", "-").removesuffix(".py")


def _run(checkout: Path, name: str, outcomes: Path, substitute: bool, timeout: float) -> dict[str, Outcome]:
    if not outcomes.exists():
        partial = outcomes.with_suffix(".partial")
        partial.write_text("")
        _pytest(checkout, name, partial, substitute, timeout)
        partial.rename(outcomes)
    return _read(outcomes)


def _pytest(checkout: Path, name: str, outcomes: Path, substitute: bool, timeout: float) -> None:
    """Run pytest; what it finds out is in `outcomes`, whether it ends well or not.

    Neither the checkout's configuration nor its `conftest.py` is read, and the working directory is an empty one: the `jax`
    that the tests import is the installed one, not the one in the checkout.
    Nothing is captured: some tests capture what is printed themselves.
    """
    arguments = ["--import-mode=importlib", "--noconftest", "--rootdir", str(checkout), "-c", os.devnull]
    arguments += [
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "conformance.plugin",
        "--outcomes",
        str(outcomes.resolve()),
    ]
    arguments += ["--substitute"] if substitute else []
    command = [sys.executable, "-m", "pytest", *arguments, "--test-file", str(checkout / name), "-q"]
    paths = [Path(__file__).parents[1], Path(autoremat.__file__).parents[1]]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    path = os.pathsep.join([*map(str, paths), *(os.path.abspath(p) for p in inherited)])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as empty, outcomes.with_suffix(".log").open("w") as log:
        try:
            subprocess.run(
                [*command, str(checkout / name)],
                cwd=empty,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {timeout:g} s\n")


def _read(outcomes: Path) -> dict[str, Outcome]:
    """The outcome of each case: the worst that was reported, since set-up, call and tear-down report one each."""
    found: dict[str, Outcome] = {}
    for line in outcomes.read_text().splitlines():
        case, outcome, message = json.loads(line)
        if case not in found or found[case].outcome != "failed":
            found[case] = Outcome(outcome, message)
    return found
