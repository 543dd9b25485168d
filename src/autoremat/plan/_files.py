"""Plan files: JSON that a person can read, and that is refused when it is not what was saved.

    {"format", "version", "autoremat", "plan": {...}, "checksum"}

The fields of the plan are those of the dataclasses, by their annotations: a field that is added there is written and
read here. A `Fraction` is `"p/q"`, and where a field may hold several classes, `"kind"` says which it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from autoremat._errors import PlanFileError
from autoremat.measure import environment, package_version
from autoremat.plan._plan import Plan

FORMAT = "autoremat plan"
VERSION = 4
"""Grows when an older reader could not understand a file, or a newer one would misread an old file."""

_HEADER = ("format", "version", "autoremat", "plan", "checksum")
_AGAIN = "Cheapest fix: make the plan again with autoremat.plan(...) and save it."


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path`, whole or not at all. Raises `PlanFileError` if an option has no JSON form."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "autoremat": package_version("autoremat"),
        "plan": _encode(plan),
    }
    document["checksum"] = _checksum(document)
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan. One that was verified under other versions or flags has a note that says so.

    Raises `PlanFileError` if the file is not what `save_plan` wrote, and `OSError` if it cannot be read.
    """
    document = _document(Path(path))
    plan = _Reader(path).read(Plan, document["plan"], "plan")
    if document["checksum"] != _checksum(document):
        raise PlanFileError(
            f"{path}: the checksum does not match: the file was edited, or damaged, after it was saved. What it says was "
            f"not verified. {_AGAIN}"
        )
    note = _environment_note(plan.environment)
    if note and note not in plan.notes:
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    return plan


# ------------------------------------------------------------------------------------------------------------- document


def _environment_note(then: Mapping[str, str]) -> str:
    here = environment()
    keys = [k for k in ("jax", "jaxlib", "xla_flags") if k in then and then[k] != here[k]]
    if not keys:
        return ""
    before = ", ".join(f"{k} {then[k] or 'none'}" for k in keys)
    now = ", ".join(f"{k} {here[k] or 'none'}" for k in keys)
    return (
        f"The peak was verified under {before}; here is {now}, and another compiler may need more. Verify it again with "
        "autoremat.measure, or plan again."
    )


def _checksum(document: Mapping[str, Any]) -> str:
    """Of everything but the checksum itself, whatever the layout of the file."""
    rest = {k: v for k, v in document.items() if k != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _document(path: Path) -> dict[str, Any]:
    """The parsed file with all entries of the header, checked up to the version."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{path}: not a plan file: it is no UTF-8 text ({error.reason}). {_AGAIN}"
        ) from error
    except json.JSONDecodeError as error:
        raise PlanFileError(_not_json(path, text, error)) from error
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python parses
        raise PlanFileError(f"{path}: not a plan file: {error}. {_AGAIN}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(f'{path}: not a plan file: it is JSON, but has no "format": "{FORMAT}". {_AGAIN}')
    if document.get("version") != VERSION:
        raise PlanFileError(
            f"{path}: written in version {document.get('version')!r} of the format, by autoremat "
            f"{document.get('autoremat', 'of unknown version')}; autoremat {package_version('autoremat')} reads version {VERSION}. "
            f"Cheapest fix: plan again with this version, or load it with the one that wrote it."
        )
    if missing := [k for k in _HEADER if k not in document]:
        raise PlanFileError(f"{path}: damaged: {missing} missing. {_AGAIN}")
    return document


def _not_json(path: Path, text: str, error: json.JSONDecodeError) -> str:
    if not text.strip():
        return f"{path}: not a plan file: it is empty. {_AGAIN}"
    start = text.lstrip().startswith("{")
    if start and not text.rstrip().endswith("}"):
        return f"{path}: truncated: it ends in the middle, at line {len(text.splitlines())}. {_AGAIN}"
    what = "damaged" if start else "not a plan file"
    return f"{path}: {what}: no JSON at line {error.lineno}, column {error.colno} ({error.msg}). {_AGAIN}"


# --------------------------------------------------------------------------------------------------------------- values


def _encode(value: Any) -> Any:
    """As JSON: what a plan may hold, or a `PlanFileError`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        return {"kind": kind} | {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PlanFileError(
        f"a plan with {value!r} of type {type(value).__name__} cannot be saved: JSON has no form for it. Cheapest fix: "
        "give compiler options as strings, numbers or bools."
    )


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


_SCALARS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    bool: ((bool,), "true or false"),
    types.NoneType: ((types.NoneType,), "null"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Makes values of annotated types from JSON. `where` is a value's place in the file, for messages."""

    path: str | os.PathLike[str]

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """`value` as the annotated type `kind`. Raises `PlanFileError` if it is none."""
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if kind in _SCALARS:
            accepted, name = _SCALARS[kind]
            self._expect(type(value) in accepted, value, where, name)
            return value
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, value, where)
        if kind is Fraction:
            return self._fraction(value, where)
        if origin is tuple:
            return self._tuple(parts, value, where)
        if origin in (types.UnionType, typing.Union):
            return self._union(parts, value, where)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            self._expect(isinstance(value, dict), value, where, "an object")
            return {
                k: v if parts[1] is Any else self.read(parts[1], v, f"{where}.{k}") for k, v in value.items()
            }
        raise TypeError(f"{where}: a field of type {kind} has no reader: add one here")

    def _expect(self, is_right: bool, value: Any, where: str, wanted: str) -> None:
        if not is_right:
            text = json.dumps(value)
            short = text if len(text) <= 60 else f"{text[:57]}..."
            raise PlanFileError(f"{self.path}: damaged: `{where}` must be {wanted}, got {short}. {_AGAIN}")

    def _dataclass(self, kind: Any, value: Any, where: str) -> Any:
        self._expect(isinstance(value, dict), value, where, "an object")
        names = [f.name for f in dataclasses.fields(kind)]
        if missing := [n for n in names if n not in value]:
            raise PlanFileError(f"{self.path}: damaged: `{where}` lacks {missing}. {_AGAIN}")
        if unknown := sorted(set(value) - {*names, "kind"}):
            raise PlanFileError(f"{self.path}: damaged: `{where}` has unknown fields {unknown}. {_AGAIN}")
        return kind(**{n: self.read(_hints(kind)[n], value[n], f"{where}.{n}") for n in names})

    def _union(self, parts: tuple[Any, ...], value: Any, where: str) -> Any:
        """One of several classes, by their names; or a type and `None`."""
        classes: dict[str, Any] = {
            c.__name__: c for c in parts if isinstance(c, type) and dataclasses.is_dataclass(c)
        }
        if classes:
            kind = str(value.get("kind")) if isinstance(value, dict) else ""
            self._expect(kind in classes, value, where, f'an object whose "kind" is one of {sorted(classes)}')
            return self.read(classes[kind], value, where)
        (other,) = (p for p in parts if p is not types.NoneType)
        return None if value is None else self.read(other, value, where)

    def _tuple(self, parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        self._expect(isinstance(value, list), value, where, "a list")
        if len(parts) == 2 and parts[1] is ...:
            return tuple(self.read(parts[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        self._expect(len(value) == len(parts), value, where, f"a list of {len(parts)}")
        return tuple(
            self.read(p, v, f"{where}[{i}]") for i, (p, v) in enumerate(zip(parts, value, strict=True))
        )

    def _fraction(self, value: Any, where: str) -> Fraction:
        is_right = isinstance(value, str) and re.fullmatch(r"-?\d+/[1-9]\d*", value) is not None
        self._expect(is_right, value, where, 'a fraction such as "3/4"')
        return Fraction(value)
