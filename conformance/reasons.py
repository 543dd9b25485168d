"""Why a case fails with ours: the explanations of `reasons.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("reasons.toml")

NOTICEABLE = ("no", "documented", "yes")


class ReasonsError(ValueError):
    """The file of explanations cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Reason:
    """An explanation for `cases` (`tests/api_test.py::RematTest::test_x`), in the versions of JAX that start so.

    `noticeable` says whether a user of autoremat can notice, by values, errors, memory, time or what is printed: `"no"`, `"yes"`, or
    `"documented"`, where the difference is one that our documentation states, as a feature or as a limit.
    """

    cases: tuple[str, ...]
    inspects: str
    differs: str
    noticeable: str
    versions: tuple[str, ...] = ("",)

    def applies_to(self, case: str, version: str) -> bool:
        """Whether it explains a case under a version of JAX."""
        return case in self.cases and version.startswith(self.versions)


def load(path: Path = FILE) -> list[Reason]:
    """Read the explanations."""
    try:
        entries = tomllib.loads(path.read_text()).get("reason", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ReasonsError(f"{path}: {error}") from None
    return [_reason(entry, path) for entry in entries]


def _reason(entry: dict[str, Any], path: Path) -> Reason:
    kinds = {"cases": list, "inspects": str, "differs": str, "noticeable": str, "versions": list}
    for key, value in entry.items():
        if not isinstance(value, kinds.get(key, ())):
            raise ReasonsError(f"{path}: `{key} = {value!r}` in a [[reason]]; expected are {sorted(kinds)}")
    if missing := sorted(kinds.keys() - entry.keys() - {"versions"}):
        raise ReasonsError(f"{path}: a [[reason]] for {entry.get('cases')} lacks {missing}")
    if entry["noticeable"] not in NOTICEABLE:
        raise ReasonsError(f"{path}: noticeable = {entry['noticeable']!r}; expected is one of {NOTICEABLE}")
    texts = {key: entry[key] for key in ("inspects", "differs", "noticeable")}
    return Reason(cases=tuple(entry["cases"]), versions=tuple(entry.get("versions", [""])), **texts)


def explain(reasons: Sequence[Reason], case: str, version: str) -> Reason | None:
    """The explanation of a failing case, if there is one."""
    return next((r for r in reasons if r.applies_to(case, version)), None)


def stale(
    reasons: Sequence[Reason], live: Sequence[str], failing: Mapping[str, str], version: str
) -> list[str]:
    """The cases with an explanation that do not fail."""
    return [c for c in live if c not in failing and any(r.applies_to(c, version) for r in reasons)]
