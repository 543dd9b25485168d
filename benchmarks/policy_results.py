"""Results of `benchmarks.policies`: records, one for each model, and the page that shows them all.

A full run takes long, so the records are a file beside the page, a line of JSON for each model. A model that is run again replaces its
line, and the page is written anew from all lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.pages import markdown_table, write_page
from benchmarks.records import read_records
from benchmarks.reruns import Moment

NAME = "policies"

MEMORY_SLACK, FLOP_SLACK = 1.01, 1.005
"""A policy is reached with a peak and FLOPs of at most these multiples of its own."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a compiled gradient: bytes at its peak, as predicted and as compiled, and of temporaries; FLOPs as emitted and as the compiler
    counts them."""

    predicted_bytes: int
    peak_bytes: int
    temp_bytes: int
    flops: int
    compiler_flops: float

    @property
    def error(self) -> float:
        """The predicted peak over the compiled one, less one."""
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy of JAX (`also`: others that emit the same program) against a plan for its peak.

    `time_ratio` is ours over theirs. `whole` and `worst` are the difference of our gradients from those without recomputation (see
    `benchmarks.gradients`). `seconds` of planning, without the `compiles`. `more`: the FLOPs were missed at the policy's peak, and this
    plan had the slack in addition.
    """

    policy: str
    also: tuple[str, ...]
    theirs: Figures
    ours: Figures
    time_ratio: float
    whole: float
    worst: float
    compiles: int
    seconds: float
    more: bool = False

    @property
    def memory_ratio(self) -> float:
        """Our compiled peak over theirs."""
        return self.ours.peak_bytes / self.theirs.peak_bytes

    @property
    def flop_ratio(self) -> float:
        """Our emitted FLOPs over theirs."""
        return self.ours.flops / self.theirs.flops

    @property
    def reached(self) -> bool:
        """Met or beaten in both."""
        return self.memory_ratio <= MEMORY_SLACK and self.flop_ratio <= FLOP_SLACK


@dataclass(frozen=True, kw_only=True)
class Result:
    """All of one model: what it is, on what and with how many timed rounds it was measured, the gradient without recomputation.

    `sensitivity` is the difference between the gradients without recomputation for two batches that differ in the last bit. `moments` are
    what plans compute again of the attention core, `fused` whether that is one kernel.
    """

    model: str
    about: str
    machine: str
    repeats: int
    plain: Figures
    sensitivity: float
    rows: tuple[Row, ...]
    fused: bool = False
    moments: tuple[Moment, ...] = ()

    @property
    def reached(self) -> int:
        """How many policies are reached."""
        return sum(r.reached for r in self.rows)

    @property
    def attention_right(self) -> bool:
        """Whether at the last moment the core of unfused attention, and no other product, runs again; of a fused one, nothing."""
        if not self.moments:
            return True
        last = self.moments[-1]
        if self.fused:
            return not last.operations_inside
        return last.products_inside > 0 and not last.products_outside


# --------------------------------------------------------------------------------------------------------------- records


def read_results(path: Path) -> dict[str, Result]:
    """The results by model."""
    return {r.model: r for r in read_records(path, _result)}


def _result(data: dict[str, Any]) -> Result:
    rows = tuple(_row(r) for r in data.pop("rows"))
    moments = tuple(Moment(**m) for m in data.pop("moments"))
    return Result(plain=Figures(**data.pop("plain")), rows=rows, moments=moments, **data)


def _row(data: dict[str, Any]) -> Row:
    theirs, ours = Figures(**data.pop("theirs")), Figures(**data.pop("ours"))
    return Row(theirs=theirs, ours=ours, also=tuple(data.pop("also")), **data)


# ------------------------------------------------------------------------------------------------------------------ page


def time_mean(results: Sequence[Result]) -> float:
    """The geometric mean of the ratio of step times."""
    logs = [math.log(r.time_ratio) for result in results for r in result.rows]
    return math.exp(sum(logs) / len(logs))


def summary(results: Sequence[Result]) -> str:
    """How many policies are reached, and the mean of the time ratios."""
    reached, rows = sum(r.reached for r in results), sum(len(r.rows) for r in results)
    return (
        f"Reached (peak within {MEMORY_SLACK - 1:.0%}, FLOPs within {FLOP_SLACK - 1:.1%}): **{reached} of {rows}**. Geometric mean of the "
        f"step time, ours over theirs: **{time_mean(results):.2f}**."
    )


def errors(results: Sequence[Result], *, ours: bool) -> list[float]:
    """The errors of the predicted peaks, without their signs, smallest first: of plans, or of the programs without one."""
    if ours:
        figures = [row.ours for r in results for row in r.rows]
    else:
        figures = [f for r in results for f in (r.plain, *(row.theirs for row in r.rows))]
    return sorted(abs(f.error) for f in figures)


ERROR_HEADER = ("model", "plans: median", "worst", "other programs: median", "worst")


def error_cells(name: str, results: Sequence[Result]) -> list[str]:
    """Errors in words."""
    cells = [name]
    for ours in (True, False):
        found = errors(results, ours=ours)
        cells += [f"{statistics.median(found):.1%}", f"{found[-1]:.1%}"]
    return cells


MODEL_HEADER = (
    "model",
    "",
    "peak MB without recomputation (temporaries)",
    "GFLOP",
    "sensitivity of the gradient",
    "reached",
    "time",
    "rounds",
)


def model_cells(result: Result) -> list[str]:
    """A model in words."""
    plain = result.plain
    return [
        f"`{result.model}`",
        result.about,
        f"{plain.peak_bytes / 1e6:.1f} ({plain.temp_bytes / 1e6:.1f})",
        f"{plain.flops / 1e9:.2f}",
        f"{result.sensitivity:.1e}",
        f"{result.reached} of {len(result.rows)}",
        f"{time_mean([result]):.2f}",
        str(result.repeats),
    ]


ROW_HEADER = (
    "model", "policy", "peak theirs", "peak ours", "ratio", "GFLOP theirs", "GFLOP ours", "ratio", "time", "difference", "compiles",
    "planning s", "",
)  # fmt: skip


def row_cells(model: str, row: Row) -> list[str]:
    """A comparison in words."""

    def gflop(figures: Figures) -> str:
        return f"{figures.flops / 1e9:.2f} ({figures.compiler_flops / 1e9:.2f})"

    return [
        model,
        f"`{row.policy}`",
        f"{row.theirs.peak_bytes / 1e6:.1f}",
        f"{row.ours.peak_bytes / 1e6:.1f}",
        f"{row.memory_ratio:.3f}",
        gflop(row.theirs),
        gflop(row.ours),
        f"{row.flop_ratio:.3f}",
        f"{row.time_ratio:.2f}",
        f"{row.whole:.1e} ({row.worst:.1e})",
        str(row.compiles),
        f"{row.seconds:.1f}",
        ("reached" if row.reached else "**missed**") + (" (with 1 % more)" if row.more else ""),
    ]


MOMENT_HEADER = (
    "model", "attention", "bytes freed", "core: products", "core: all else", "other products", "all else", "",
)  # fmt: skip


def moment_cells(result: Result) -> list[list[str]]:
    """What runs again of the attention core, in words, the verdict in the last row."""
    verdict = "as it should be" if result.attention_right else "**not as it should be**"
    return [
        [
            result.model,
            "fused" if result.fused else "unfused",
            f"{m.share:.0%}",
            *(
                f"{flops / 1e9:.3f}"
                for flops in (m.products_inside, m.others_inside, m.products_outside, m.others_outside)
            ),
            verdict if m is result.moments[-1] else "",
        ]
        for m in result.moments
    ]


TEXT = (
    "The budget of a plan is the policy's peak, and 1 % more where FLOPs are missed within it, which the last column says. Peaks are arguments + outputs + temporaries - aliases, in MB (10^6 bytes), under the "
    "memory-minimizing scheduler. GFLOP are counted over the emitted program, loops times their trips; in brackets the compiler's own count, "
    "which counts the body of a loop once. Time is ours over theirs, medians of interleaved steps.\n\n"
    "Difference is that of our gradients from those without recomputation: the norm of the difference over the norm, of all parameters and, "
    "in brackets, of the worst array (without those whose gradient is rounding). Beside it, in the table of the models, the same difference between "
    "the gradients without recomputation for two batches that differ in the last bit: networks with batch normalization amplify rounding at "
    "initialization. They are compared in double precision in `benchmarks/keras_models.py`.\n\n"
    "All policies of `jax.checkpoint_policies` that a model can use are listed, but for those that offload, which need a host memory. With "
    "names: those that the model tags. Policies that emit the same program (the same text before compilation) are one row; `checkpoint_dots` and "
    "`checkpoint_dots_with_no_batch_dims` are other names of `dots_saveable` and `dots_with_no_batch_dims_saveable`."
)

MOMENT_TEXT = (
    "Of the first plans that free so much of what recomputation can free: GFLOP that run again in the attention core (scores, softmax, weighted sum) "
    "and outside it, in products and in all else. The planner knows nothing of attention. Expected by two thirds: of unfused attention, products of the core "
    "run again and no others; of a fused kernel, nothing does."
)


ERROR_TEXT = (
    "How far the peaks that `autoremat.predict` foretells are from those of the compiled programs: of the plans, and of the programs without "
    "recomputation and under the policies. A plan's prediction here is the model's own, not corrected by what was compiled before it."
)


def write_results(results: Sequence[Result], out: Path) -> Path:
    """The page of all results. Returns its path."""
    machines = list(dict.fromkeys(r.machine for r in results))
    parts = [summary(results)]
    if len(machines) > 1:
        parts += [f"{'; '.join(r.model for r in results if r.machine == m)}: {m}." for m in machines]
    same = [
        f"- {r.model}: `{row.policy}` is {', '.join(f'`{name}`' for name in row.also)}"
        for r in results
        for row in r.rows
        if row.also
    ]
    moments = [cells for r in results for cells in moment_cells(r)]
    parts += [
        TEXT,
        "## Models",
        markdown_table(MODEL_HEADER, [model_cells(r) for r in results]),
        "## Policies",
        markdown_table(ROW_HEADER, [row_cells(r.model, row) for r in results for row in r.rows]),
    ]
    if same:
        parts += ["The same program:", "\n".join(same)]
    if moments:
        parts += ["## What is recomputed first", MOMENT_TEXT, markdown_table(MOMENT_HEADER, moments)]
    parts += [
        "## Predicted against compiled peaks",
        ERROR_TEXT,
        markdown_table(
            ERROR_HEADER, [*(error_cells(r.model, [r]) for r in results), error_cells("**all**", results)]
        ),
    ]
    title = "Policies of `jax.checkpoint` against plans at the same compiled memory"
    return write_page(NAME, title, parts, out=out, machines=machines)


def plot(path: Path, result: Result, points: Sequence[tuple[int, int]]) -> None:
    """The policies in the frontier of plans; `points` are more of these: bytes of compiled peak, emitted FLOPs."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    mine = sorted({*points, *((r.ours.peak_bytes, r.ours.flops) for r in result.rows)})
    axes.plot(
        [p / 1e6 for p, _ in mine],
        [f / 1e9 for _, f in mine],
        "o-",
        label="autoremat plans",
        color="tab:blue",
    )
    theirs = [(r.theirs.peak_bytes / 1e6, r.theirs.flops / 1e9) for r in result.rows]
    axes.plot(*zip(*theirs, strict=True), "x", color="tab:red", label="jax.checkpoint policies")
    for row, place in zip(result.rows, theirs, strict=True):
        axes.annotate(row.policy.split("(")[0], place, fontsize=6)
    plain = result.plain
    axes.plot([plain.peak_bytes / 1e6], [plain.flops / 1e9], "s", color="black", label="no checkpoint")
    axes.set_xlabel("compiled peak (MB)")
    axes.set_ylabel("emitted GFLOP per step")
    axes.set_title(f"{result.model}, JAX {jax.__version__} on CPU")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
