"""Plans of a Llama-like model for twenty budgets: met, and monotone.

    python -m benchmarks.monotone [--layers 32] [--budgets 20] [--forms unrolled scan] [--out benchmarks/results]

The model on which PyTorch's activation_memory_budget raises the peak when it is given less (pytorch/pytorch#197838): at 0.05 it needs
4.17 times the memory of 0.15. Budgets are shares of the compiled peak without recomputation, arguments and outputs included. Each is
planned in turn, the largest first; then all are asked for again over the finished record of compiled candidates, which compiles
nothing. Targets: no plan is over its budget; a smaller budget has neither the higher peak nor less recomputation; what is not
feasible is an error that names the floor.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoremat as ar
from benchmarks import llama
from benchmarks.pages import markdown_table, show, write_page

PYTORCH = {0.05: 1145.4, 0.10: 508.2, 0.15: 274.8, 0.20: 325.2, 0.25: 359.4, 0.30: 411.1, 0.35: 456.6}
"""Incremental peak in MB by budget, a ratio of saved bytes: published in the issue, on a GPU."""


@dataclass(frozen=True)
class Row:
    """One budget. Bytes are compiled; `first` is the plan when it was asked for, `again` over the finished record."""

    share: float
    budget_bytes: int
    first: ar.Plan | None
    again: ar.Plan | None
    floor_bytes: int
    seconds: float

    @property
    def met(self) -> bool:
        """Whether a plan keeps to the budget, or the floor is above it."""
        if self.again is None:
            return self.floor_bytes > self.budget_bytes
        return all(p is None or p.peak_bytes <= self.budget_bytes for p in (self.first, self.again))


def plan_for(loss: Any, args: tuple[Any, ...], budget: int) -> tuple[ar.Plan | None, int]:
    """The plan, or the floor in bytes."""
    try:
        return ar.plan(loss, *args, budget=budget), 0
    except ar.InfeasibleBudgetError as error:
        return None, error.floor_bytes or 0


def run(form: str, shape: llama.Shape, budgets: int) -> list[Row]:
    """All budgets of one form, the largest first."""
    scan = form == "scan"
    loss, args = llama.make_loss(shape, scan=scan), llama.example(shape, scan=scan)
    whole = ar.plan(loss, *args, budget="100%").unplanned_bytes
    assert whole is not None
    shares = [(budgets - i) / budgets for i in range(budgets)]
    asked = []
    for share in shares:
        start = time.perf_counter()
        found, _ = plan_for(loss, args, int(share * whole))
        asked.append((found, time.perf_counter() - start))
        peak = f"{found.peak_bytes / 1e6:.0f} MB" if found else "infeasible"
        print(f"{form} {share:.0%}: {peak}, {asked[-1][1]:.0f} s", flush=True)
    rows = []
    for share, (first, seconds) in zip(shares, asked, strict=True):
        again, floor = plan_for(loss, args, int(share * whole))
        rows.append(Row(share, int(share * whole), first, again, floor, seconds))
    return rows


def monotone(rows: list[Row]) -> bool:
    """Whether peaks fall and recomputation grows with every smaller budget, over the finished record."""
    plans = [r.again for r in rows if r.again]
    pairs = list(itertools.pairwise(plans))
    return all(
        a.peak_bytes >= b.peak_bytes and a.recompute_flops <= b.recompute_flops for a, b in pairs
    ) and all(r.again is None for r in rows[len(plans) :])


HEADER = (
    "budget", "MB", "peak MB", "predicted MB", "recomputed", "gap", "compiles", "s", "again: peak MB", "again: recomputed",
    "PyTorch at this budget, MB", "",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row in words."""
    return [
        f"{row.share:.0%}",
        f"{row.budget_bytes / 1e6:.1f}",
        *_first(row.first),
        f"{row.seconds:.0f}",
        *_again(row),
        str(PYTORCH.get(round(row.share, 2), "")),
        "met" if row.met and row.again else "infeasible" if row.met else "missed",
    ]


def _first(plan: ar.Plan | None) -> list[str]:
    if plan is None:
        return ["infeasible", "", "", "", ""]
    return [
        f"{plan.peak_bytes / 1e6:.1f}",
        f"{plan.predicted_bytes / 1e6:.1f}",
        f"{plan.recompute_flops / plan.forward_flops:.1%}",
        f"{plan.gap:.2%}",
        str(plan.compiles),
    ]


def _again(row: Row) -> list[str]:
    if row.again is None:
        return [f"floor {row.floor_bytes / 1e6:.1f}", ""]
    return [
        f"{row.again.peak_bytes / 1e6:.1f}",
        f"{row.again.recompute_flops / row.again.forward_flops:.1%}",
    ]


def errors(rows: list[Row]) -> str:
    """How far predicted peaks are from compiled ones."""
    plans = [p for r in rows for p in (r.first, r.again) if p is not None]
    found = [abs(p.predicted_bytes / p.peak_bytes - 1) for p in plans]
    return f"Predicted against compiled peaks: median error {statistics.median(found):.1%}, worst {max(found):.1%}."


def text(shape: llama.Shape) -> str:
    """What the tables show."""
    return (
        f"A Llama-like model of {shape.layers} layers (width {shape.width}, MLP {shape.mlp}, {shape.heads} heads, batch {shape.batch} of "
        f"{shape.sequence}, float32); budgets in shares of the compiled peak of its gradient, arguments and outputs included. *Recomputed*: "
        "in shares of the forward FLOPs; *gap*: how far from the best it can be, in shares of a step. *Again*: the same budget over the "
        "finished record. PyTorch's figures are those published in pytorch/pytorch#197838, incremental peaks on a GPU; its budget is a share "
        "of saved bytes, not of the peak."
    )


def page(forms: dict[str, list[Row]], shape: llama.Shape, out: Path) -> Path:
    """Write the committed page."""
    parts = [text(shape)]
    for form, rows in forms.items():
        verdict = "monotone" if monotone(rows) else "not monotone"
        table = markdown_table(HEADER, [cells(r) for r in rows])
        parts += [f"## {form}: {verdict} over the finished record", errors(rows), table]
    return write_page("monotone", "Twenty budgets", parts, out=out)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a budget was missed or the plans are not monotone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--forms", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    shape = llama.Shape(layers=options.layers, sequence=options.sequence)
    forms = {form: run(form, shape, options.budgets) for form in options.forms}
    for form, rows in forms.items():
        print(form)
        show(HEADER, [cells(row) for row in rows], width=170)
    print(f"Wrote {page(forms, shape, options.out)}")
    return 0 if all(monotone(rows) and all(r.met for r in rows) for rows in forms.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
