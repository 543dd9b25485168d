"""The page of results: a section for each version of JAX, put in place of the one that was there."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax

from conformance.reasons import Reason, explain, stale
from conformance.runner import FileResult
from conformance.selection import WHOLE_CLASS

INTRODUCTION = """\
# Conformance with `jax.checkpoint`

JAX's own tests, with our `checkpoint`, `remat`, `checkpoint_policies`, `checkpoint_name`, `saved_residuals` and
`print_saved_residuals` in place of JAX's, wherever a module of JAX holds them. Written by

    python -m conformance PATH    # PATH: a checkout of JAX's sources, say at the tag of the installed version

with one section for each version of JAX that it was run under.

- **Which cases**: every case of `RematTest`, and each other case under `tests/` whose test function, or a helper in the same file
  that it calls, uses an identifier with `remat`, `checkpoint` or `saved_residuals` in it.
- **Live** is a case that passes with JAX's own functions in the same installation, under the same settings (CPU, eight devices). The
  rest is skipped there, or fails: another device, another version.
- `Remat3Test` repeats `RematTest` under a flag that has JAX choose another implementation of its own.
- Where a test asks JAX's private `saved_residuals`, it gets `autoremat.saved_residuals` as pairs of an aval and a description.

The explanations are those of `conformance/reasons.toml`. A failing case without one makes the harness exit with 1, and so does one that a
user can notice, unless it is one of the differences that our documentation states ("documented").
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The results under one version of JAX, explained."""

    version: str
    sources: str
    files: Sequence[FileResult]
    reasons: Sequence[Reason]

    @property
    def failing(self) -> dict[str, str]:
        """The live cases that fail with ours, and what each said."""
        return {f"{f.name}::{case}": text for f in self.files for case, text in f.failed.items()}

    @property
    def live(self) -> list[str]:
        """All live cases."""
        return [f"{f.name}::{case}" for f in self.files for case in f.live]

    @property
    def unexplained(self) -> dict[str, str]:
        """The failing cases without an explanation, and what each said."""
        return {c: t for c, t in self.failing.items() if explain(self.reasons, c, self.version) is None}

    @property
    def noticeable(self) -> list[str]:
        """The failing cases that a user can notice."""
        found = ((c, explain(self.reasons, c, self.version)) for c in self.failing)
        return [c for c, reason in found if reason is not None and reason.noticeable == "yes"]

    @property
    def stale(self) -> list[str]:
        """The cases that have an explanation and pass."""
        return stale(self.reasons, self.live, self.failing, self.version)


def _groups(files: Sequence[FileResult]) -> list[tuple[str, list[str], list[str]]]:
    """`(label, live cases, failed cases)`: `RematTest` and its repetition apart from the rest of their file."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for result in files:
        name, failing = result.name.removeprefix("tests/"), result.failed
        for case in result.live:
            owner = case.partition("::")[0]
            apart = owner in {WHOLE_CLASS, "Remat3Test"}
            live, failed = groups.setdefault(f"`{name}`, `{owner}`" if apart else f"`{name}`", ([], []))
            live.append(case)
            if case in failing:
                failed.append(case)
    return [(label, live, failed) for label, (live, failed) in groups.items()]


def section(report: Report) -> str:
    """The section of one version."""
    groups = _groups(report.files)
    others = [group for group in groups if f"`{WHOLE_CLASS}`" not in group[0]]
    if 1 < len(others) < len(groups):
        every = [[case for group in others for case in group[i]] for i in (1, 2)]
        groups.append((f"all but `{WHOLE_CLASS}`", every[0], every[1]))
    rows = [(label, len(live), len(live) - len(failed), len(failed)) for label, live, failed in groups]
    lines = [
        f"## JAX {report.version}",
        "",
        f"Tests of {report.sources}; JAX {jax.__version__}, jaxlib {version('jaxlib')}, Python {platform.python_version()}.",
        "",
        "| tests | live | passed | failed |",
        "|---|---|---|---|",
        *(f"| {label} | {live} | {passed} | {failed} |" for label, live, passed, failed in rows),
        "",
        *_not_live(report.files),
        *_failures(report),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _not_live(files: Sequence[FileResult]) -> list[str]:
    dead = {f.name: len([c for c in f.plain if c]) - len(f.live) for f in files}
    broken = [f.name for f in files if f.import_error is not None]
    places = ", ".join(f"`{n.removeprefix('tests/')}` {k}" for n, k in dead.items() if k)
    total = sum(dead.values())
    lines = [
        f"Not live, with JAX's functions either: {total} {'case' if total == 1 else 'cases'} ({places or 'none'})."
    ]
    if broken:
        lines.append("Not importable here: " + ", ".join(f"`{n}`" for n in broken) + ".")
    return [*lines, ""]


def _failures(report: Report) -> list[str]:
    if not report.failing:
        return ["No live case fails."]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for case, text in report.failing.items():
        reason = explain(report.reasons, case, report.version)
        if reason is None:
            said = re.sub(r"/[^ ]*/", "", text.split("\n", 1)[0])[:160].replace("`", "'")
            row = ("**not explained**", f"`{_cell(said)}`", "not known")
        else:
            noticeable = "**yes**" if reason.noticeable == "yes" else reason.noticeable
            row = (_cell(reason.inspects), _cell(reason.differs), noticeable)
        rows.setdefault(row, []).append(f"`{case.removeprefix('tests/')}`")
    head = [
        "| failing cases | what they inspect | why ours differs | can a user notice |",
        "|---|---|---|---|",
    ]
    return [*head, *(f"| {'<br>'.join(cases)} | {' | '.join(row)} |" for row, cases in rows.items())]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def merge(path: Path, jax_version: str, text: str) -> None:
    """Write a section into the page, in place of the one for this version; sections are in the order of versions."""
    old = path.read_text() if path.exists() else ""
    parts = re.split(r"^(?=## JAX )", old, flags=re.MULTILINE)[1:]
    sections = {_version_of(part): part.rstrip() + "\n" for part in parts}
    sections[jax_version] = text
    ordered = [sections[v] for v in sorted(sections, key=_as_numbers)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([INTRODUCTION, *ordered]))


def _version_of(part: str) -> str:
    return part.split("\n", 1)[0].removeprefix("## JAX ").strip()


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version))
