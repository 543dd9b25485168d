"""Results of benchmarks that take long: a file beside the page, a line of JSON for each result. A run replaces its own lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def records_path(name: str, out: Path) -> Path:
    """Where the records of a benchmark under this version of JAX are."""
    return out / f"{name}_jax{jax.__version__}.jsonl"


def read_records(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """The results, none if there is no file."""
    if not path.exists():
        return []
    return [parse(json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def write_records(path: Path, results: Iterable[Any]) -> None:
    """A line for each result, which is a dataclass."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in results), "utf-8")
