"""A model for many chips, planned where there is none: a Llama-like 7B over 256 TPU v5p.

    python -m benchmarks.sharded [--target tpu:v5p:4x8x8] [--tensor 4] [--sequences 256] [--budgets 95%,60%] [--out benchmarks/results]

Shapes alone (benchmarks/models/llama_7b.py). The training step with Adam is planned by `autoremat.fit` for shares of one chip's memory and compiled by the
compiler of the chips. Target: within the budget on each device; the page says how long each part takes, and what fills the memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import autoremat as ar
from benchmarks.models import llama_7b
from benchmarks.pages import publish

HEADER = (
    "budget", "peak MB", "share of it", "activations MB", "temporaries MB", "run again, of forward", "compiles", "tracing and planning s",
    "compiling s", "all s", "",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A step that was fitted."""

    budget: str
    found: ar.Fit
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the compiled step is within the budget, its reserve taken off."""
        return self.found.plan.peak_bytes <= self.found.memory_bytes - self.found.reserve_bytes

    @property
    def cells(self) -> list[str]:
        """The row in words."""
        plan, account = self.found.plan, self.found.account
        return [
            self.budget,
            f"{plan.peak_bytes / 1e6:,.0f}",
            f"{plan.peak_bytes / plan.budget_bytes:.1%}",
            f"{account.activations / 1e6:,.0f}",
            f"{account.temporaries / 1e6:,.0f}",
            f"{plan.recompute_flops / plan.forward_flops:.1%}",
            str(plan.compiles),
            f"{plan.seconds:.0f}",
            f"{plan.compile_seconds:.0f}",
            f"{self.seconds:.0f}",
            "met" if self.fits else "missed",
        ]


def fitted(step: Callable[..., Any], args: tuple[Any, ...], target: ar.Target, budget: str) -> Row:
    """The step within a share of a chip's memory."""
    memory = int(target.device.memory_bytes * float(budget.rstrip("%")) / 100)
    start = time.perf_counter()
    found = ar.fit(step, *args, memory=memory, reserve=0, target=target)
    return Row(budget=budget, found=found, seconds=time.perf_counter() - start)


def main() -> int:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="tpu:v5p:4x8x8")
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--budgets", default="95%,60%")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    target = ar.target(options.target)
    chips = len(target.devices)
    mesh = target.mesh((chips // options.tensor, options.tensor), ("data", "model"))
    args = llama_7b.example(mesh, options.sequences)
    step = llama_7b.make_step(mesh)
    parameters = sum(x.size for x in jax.tree.leaves(args[0]))
    plain = ar.measure(step, *args, target=target)
    predicted = ar.predict(step, *args, target=target)
    print(
        f"no recomputation: {plain.peak_bytes / 1e6:,.0f} MB (predicted {predicted.peak_bytes / 1e6:,.0f}), fits: {plain.fits}"
    )
    rows = []
    for budget in options.budgets.split(","):
        rows.append(fitted(step, args, target, budget))
        print(" | ".join(rows[-1].cells), flush=True)
    account = rows[0].found.account
    text = "\n\n".join(
        [
            f"{parameters / 1e9:.2f} billion parameters in float32, with Adam's moments; {options.sequences} sequences of {llama_7b.SHAPE.sequence} tokens; "
            f"{chips} chips as {chips // options.tensor} (data) by {options.tensor} (model); {target.compiler}. Budgets are shares of the "
            f"{target.device.memory_bytes / 1e6:,.0f} MB of a chip. Figures are those of one chip.",
            f"Without recomputation the step {'fits' if plain.fits else 'does not fit'}: its compiler says {plain.peak_bytes / 1e6:,.0f} MB, after "
            f"{plain.seconds:.0f} s; predicted were {predicted.peak_bytes / 1e6:,.0f} MB.",
            f"At {rows[0].budget}: "
            + ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in account.items())
            + ".",
        ]
    )
    publish(
        "sharded",
        "A 7B model over many chips",
        text,
        HEADER,
        [r.cells for r in rows],
        out=options.out,
        width=170,
    )
    return 0 if all(r.fits for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
