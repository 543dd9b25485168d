"""Time to trace and lower a gradient with `autoremat.checkpoint`, over that with `jax.checkpoint`.

    python -m benchmarks.tracing [--layers 24] [--repeats 9] [--out benchmarks/results]

The transformer of `benchmarks/models/transformer.py`, unrolled and under `scan`, each layer a checkpoint. Every measurement makes its
functions anew, so that no cache of an earlier one helps. Beside the time: how often the layer itself is traced, at the first call and
when the gradient is traced again. Target: at most 1.5 times the time, and equally many traces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import autoremat as ar
from benchmarks.models import transformer
from benchmarks.pages import publish

TARGET = 1.5

POLICIES: dict[str, str | None] = {
    "no policy": None,
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims_saveable",
    "save_only_these_names(context)": "save_only_these_names",
}

Checkpoint = Callable[..., Any]


@dataclass(frozen=True)
class Measured:
    """Seconds to trace and to lower, and how often the layer was traced in a first and a second call."""

    trace: float
    lower: float
    first: int
    again: int

    @property
    def total(self) -> float:
        """Seconds from function to lowered program."""
        return self.trace + self.lower


@dataclass(frozen=True)
class Row:
    """Medians of both for one program."""

    form: str
    policy: str
    theirs: Measured
    ours: Measured

    @property
    def ratio(self) -> float:
        """Our time over theirs."""
        return self.ours.total / self.theirs.total

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.ratio <= TARGET and (self.ours.first, self.ours.again) == (
            self.theirs.first,
            self.theirs.again,
        )


def example(form: str, layers: int) -> tuple[Any, Any]:
    """Shapes of parameters and batch; nothing is computed."""
    stacked = jax.eval_shape(lambda: transformer.init(jax.random.key(0), layers))
    x = jax.ShapeDtypeStruct((transformer.BATCH, transformer.SEQUENCE, transformer.WIDTH), "float32")
    if form == "scan":
        return stacked, x
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    return [one] * layers, x


def measure(form: str, layers: int, checkpoint: Checkpoint, policies: Any, policy: str | None) -> Measured:
    """Trace and lower once, with functions made for this call."""
    traces = 0

    def counted(f: Callable[..., Any]) -> Callable[..., Any]:
        def block(*args: Any) -> Any:
            nonlocal traces
            traces += 1
            return f(*args)

        found: Any = None if policy is None else getattr(policies, policy)
        return checkpoint(block, policy=found("context") if policy == "save_only_these_names" else found)

    loss = (transformer.unrolled if form == "unrolled" else transformer.scanned)(counted)
    args = example(form, layers)
    start = time.perf_counter()
    traced = jax.jit(jax.value_and_grad(loss)).trace(*args)
    middle = time.perf_counter()
    traced.lower()
    end = time.perf_counter()
    first = traces
    jax.jit(jax.value_and_grad(loss)).trace(*args)
    return Measured(middle - start, end - middle, first, traces - first)


def compare(form: str, policy: str, layers: int, repeats: int) -> Row:
    """Interleaved measurements of both, after one of each to warm up."""
    ways = [(jax.checkpoint, jax.checkpoint_policies), (ar.checkpoint, ar.checkpoint_policies)]
    found: list[list[Measured]] = [[], []]
    for _ in range(repeats + 1):
        for own, (checkpoint, policies) in zip(found, ways, strict=True):
            own.append(measure(form, layers, checkpoint, policies, POLICIES[policy]))
    theirs, ours = (_median(own[1:]) for own in found)
    return Row(form, policy, theirs, ours)


def _median(runs: list[Measured]) -> Measured:
    return Measured(
        statistics.median(r.trace for r in runs),
        statistics.median(r.lower for r in runs),
        runs[-1].first,
        runs[-1].again,
    )


HEADER = (
    "form",
    "policy",
    "ms `jax.checkpoint` (trace + lower)",
    "ms ours (trace + lower)",
    "ratio",
    "layer traced, theirs (again)",
    "layer traced, ours (again)",
    "",
)


def cells(row: Row) -> list[str]:
    """A row in words."""

    def ms(m: Measured) -> str:
        return f"{1e3 * m.total:.0f} ({1e3 * m.trace:.0f} + {1e3 * m.lower:.0f})"

    return [
        row.form,
        row.policy,
        ms(row.theirs),
        ms(row.ours),
        f"{row.ratio:.2f}",
        f"{row.theirs.first} ({row.theirs.again})",
        f"{row.ours.first} ({row.ours.again})",
        "met" if row.met else "missed",
    ]


def text(layers: int) -> str:
    """What the page says of the table."""
    return (
        f"The gradient of a transformer of {layers} layers, each a checkpoint; medians of interleaved measurements, every one with "
        f"functions of its own. Target: a ratio of at most {TARGET}, and equally many traces of the layer."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    rows = [
        compare(form, policy, options.layers, options.repeats)
        for form in ("unrolled", "scan")
        for policy in POLICIES
    ]
    publish(
        "tracing",
        "Time to trace and lower",
        text(options.layers),
        HEADER,
        [cells(row) for row in rows],
        out=options.out,
        width=140,
    )
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
