"""Every policy of `jax.checkpoint` against a plan at a budget of its compiled memory.

    python -m benchmarks.policies [--forms unrolled,scan] [--repeats 7] [--out benchmarks/results]

The transformer of `benchmarks.models.transformer`, unrolled and under `scan`, memory scheduler. FLOPs are counted one way for
both: over the emitted program after dead-code elimination, loops times their trip counts. The compiler's own count stands
beside (it counts a loop's body once). Reached means: peak at most 1 % above the policy's, FLOPs at most 0.5 % above.
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
from benchmarks.machine import describe
from benchmarks.models import transformer
from benchmarks.timing import median_seconds

MEMORY_SLACK, FLOP_SLACK = 1.01, 1.005
OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def policies() -> dict[str, Callable[..., Any]]:
    """JAX's own policies, those with names with the tags of the model. The offloading ones need a host memory."""
    cp = jax.checkpoint_policies
    return {
        "everything_saveable": cp.everything_saveable,
        "dots_saveable": cp.dots_saveable,
        "dots_with_no_batch_dims_saveable": cp.dots_with_no_batch_dims_saveable,
        "nothing_saveable": cp.nothing_saveable,
        "save_only_these_names(context)": cp.save_only_these_names("context"),
        "save_only_these_names(qkv, context, mlp)": cp.save_only_these_names("qkv", "context", "mlp"),
        "save_any_names_but_these(mlp)": cp.save_any_names_but_these("mlp"),
        "save_anything_except_these_names(mlp)": cp.save_anything_except_these_names("mlp"),
        "save_from_both_policies(dots_no_batch, context)": cp.save_from_both_policies(
            cp.dots_with_no_batch_dims_saveable, cp.save_only_these_names("context")
        ),
    }


@dataclass
class Program:
    """A gradient program, compiled: peak and temporaries in bytes, FLOPs emitted and as the compiler counts."""

    name: str
    memory: ar.MemoryUse
    flops: int
    run: Callable[[], Any]
    gradients: Any


def build(name: str, loss: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Trace, count, compile."""
    gradient = jax.value_and_grad(loss)
    flops = emitted_flops(gradient, args)
    memory = ar.measure(gradient, *args, compiler_options=OPTIONS)
    compiled = jax.jit(gradient, compiler_options=OPTIONS)
    return Program(name, memory, flops, lambda: compiled(*args), compiled(*args))


def emitted_flops(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """FLOPs of the program that `fun` emits, dead code removed."""
    return ar.jaxpr_flops(fun, *args)


def relative_difference(a: Any, b: Any) -> float:
    """Largest difference of two gradients, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(abs(x - y).max() / (abs(x).max() + 1e-30)) for x, y in pairs)


@dataclass
class Row:
    """One comparison."""

    form: str
    policy: str
    theirs: Program
    ours: Program
    plan: ar.Plan
    time_ratio: float
    difference: float

    @property
    def memory_ratio(self) -> float:
        """Our compiled peak over theirs."""
        return self.ours.memory.peak_bytes / self.theirs.memory.peak_bytes

    @property
    def flop_ratio(self) -> float:
        """Our emitted FLOPs over theirs."""
        return self.ours.flops / self.theirs.flops

    @property
    def reached(self) -> bool:
        """Met or beaten in both."""
        return self.memory_ratio <= MEMORY_SLACK and self.flop_ratio <= FLOP_SLACK


def compare(form: str, repeats: int) -> tuple[list[Row], Program, ar.Frontier, list[tuple[float, float]]]:
    """All rows of one form, the program without recomputation, and the frontier with compiled points."""
    make = transformer.unrolled if form == "unrolled" else transformer.scanned
    args = transformer.example(unrolled=form == "unrolled")
    loss = make()
    plain = build("no checkpoint", loss, args)
    rows = []
    for name, policy in policies().items():
        theirs = build(name, make(lambda f, p=policy: jax.checkpoint(f, policy=p)), args)
        start = time.perf_counter()
        plan = ar.plan(loss, *args, budget=theirs.memory.peak_bytes)
        ours = build(f"plan for {name}", plan.apply(loss), args)
        first, second = median_seconds([theirs.run, ours.run], repeats)
        difference = relative_difference(plain.gradients, ours.gradients)
        row = Row(form, name, theirs, ours, plan, second / first, difference)
        rows.append(row)
        print(f"{text_row(row)}  ({plan.compiles} compiles, {time.perf_counter() - start:.0f} s)", flush=True)
    frontier = ar.frontier(loss, *args)
    return rows, plain, frontier, compiled_points(loss, args)


def compiled_points(loss: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[float, float]]:
    """(peak bytes, emitted FLOPs) of plans over the range of budgets, for the plot."""
    points = []
    for share in (100, 85, 70, 60, 50, 45, 40, 35, 30):
        try:
            plan = ar.plan(loss, *args, budget=f"{share}%")
        except ar.InfeasibleBudgetError:
            break
        points.append((plan.peak_bytes, emitted_flops(jax.value_and_grad(plan.apply(loss)), args)))
    return points


def text_row(row: Row) -> str:
    """One line for the terminal."""
    return (
        f"{row.form:9s} {row.policy:48s} peak {row.theirs.memory.peak_bytes / 1e6:7.1f} -> "
        f"{row.ours.memory.peak_bytes / 1e6:7.1f} MB  GFLOP {row.theirs.flops / 1e9:6.2f} -> {row.ours.flops / 1e9:6.2f}  "
        f"time x{row.time_ratio:.2f}  {'reached' if row.reached else 'MISSED'}"
    )


def markdown(rows: list[Row], plains: dict[str, Program], command: str) -> str:
    """The committed table."""
    reached = sum(r.reached for r in rows)
    lines = [
        "# Policies of `jax.checkpoint` against plans at the same compiled memory",
        "",
        f"Made by `{command}` on {describe()}.",
        "",
        f"Reached (peak within 1 %, FLOPs within 0.5 %): **{reached} of {len(rows)}**. "
        + " ".join(
            f"Without recomputation, {form}: {p.memory.peak_bytes / 1e6:.1f} MB, {p.flops / 1e9:.2f} GFLOP."
            for form, p in plains.items()
        ),
        "",
        "The budget is the policy's peak.",
        "",
        "Peak is arguments + outputs + temporaries - aliases, in MB (10^6 bytes). GFLOP are counted over the emitted program; in "
        "brackets the compiler's own count, which counts the body of a loop once. Time is ours over theirs, medians "
        "of interleaved steps. Difference is the largest relative difference of our gradients to those without recomputation.",
        "",
        "| form | policy | peak theirs | peak ours | ratio | GFLOP theirs | GFLOP ours | ratio | time | difference | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.form} | `{r.policy}` | {r.theirs.memory.peak_bytes / 1e6:.1f} | {r.ours.memory.peak_bytes / 1e6:.1f} | "
            f"{r.memory_ratio:.3f} | {r.theirs.flops / 1e9:.2f} ({(r.theirs.memory.flops or 0) / 1e9:.2f}) | "
            f"{r.ours.flops / 1e9:.2f} ({(r.ours.memory.flops or 0) / 1e9:.2f}) | {r.flop_ratio:.3f} | "
            f"{r.time_ratio:.2f} | {r.difference:.1e} | {'reached' if r.reached else '**missed**'} |"
        )
    return "\n".join(lines) + "\n"


def plot(path: Path, form: str, rows: list[Row], plain: Program, points: list[tuple[float, float]]) -> None:
    """The frontier with the policies in it."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    mine = sorted({*points, *((r.ours.memory.peak_bytes, r.ours.flops) for r in rows)})
    axes.plot(
        [p / 1e6 for p, _ in mine],
        [f / 1e9 for _, f in mine],
        "o-",
        label="autoremat plans",
        color="tab:blue",
    )
    axes.plot(
        [r.theirs.memory.peak_bytes / 1e6 for r in rows],
        [r.theirs.flops / 1e9 for r in rows],
        "x",
        color="tab:red",
        label="jax.checkpoint policies",
    )
    for r in rows:
        axes.annotate(
            r.policy.split("(")[0], (r.theirs.memory.peak_bytes / 1e6, r.theirs.flops / 1e9), fontsize=6
        )
    axes.plot([plain.memory.peak_bytes / 1e6], [plain.flops / 1e9], "s", color="black", label="no checkpoint")
    axes.set_xlabel("compiled peak (MB)")
    axes.set_ylabel("emitted GFLOP per step")
    axes.set_title(f"6-layer transformer, {form}, JAX {jax.__version__} on CPU")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its table and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default="unrolled,scan")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    rows: list[Row] = []
    plains: dict[str, Program] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    version = jax.__version__
    for form in options.forms.split(","):
        found, plain, _, points = compare(form, options.repeats)
        rows += found
        plains[form] = plain
        plot(options.out / f"policies_{form}_jax{version}.png", form, found, plain, points)
    target = options.out / f"policies_jax{version}.md"
    target.write_text(markdown(rows, plains, "python -m benchmarks.policies"))
    print(f"Wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
