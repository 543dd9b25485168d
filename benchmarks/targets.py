"""Plans for devices that are not there: every policy of `jax.checkpoint` against a plan at its compiled peak, on TPUs and GPUs.

    python -m benchmarks.targets [--targets tpu:v5e,gpu:h100] [--models unrolled,scan] [--effort balanced] [--out benchmarks/results]

A transformer of shapes alone, in two forms, compiled by the compilers of the devices (`pip install "autoremat[tpu,gpu]"`). Nothing is run, so there
are no times: memory is the compiler's, FLOPs are counted one way for both, over the emitted program, loops times their trips, and the compiler's own
count stands beside where it has one (a loop's body once). Plans minimize seconds, by the published rates of the device: now and then that is to run a
product again rather than a reduction that reads much more. Where a plan has more FLOPs than the policy, another one is made that minimizes FLOPs
(`costs="flops"`). Targets: at each policy's compiled peak fewer FLOPs or as many; what does not fit the device without recomputation fits with less of it
than under any policy that fits.

Results are records, a line for each target and model; a run replaces its own lines, and the page is written anew from all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import autoremat as ar
from benchmarks.machine import describe
from benchmarks.models.large_transformer import model
from benchmarks.models.model import Loss, Model, unwrapped
from benchmarks.pages import markdown_table, show, write_page
from benchmarks.policies import policies
from benchmarks.records import read_records, records_path, write_records

NAME = "targets"

FLOP_SLACK = 1.0001
"""As many FLOPs, up to an elementwise operation or two."""

FORMS: dict[str, Callable[[], Model]] = {
    "unrolled": partial(model, scan=False, layers=6, batch=4),
    "scan": partial(model, scan=True, layers=12, batch=8),
}
TARGETS = ("tpu:v5e", "gpu:h100")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of a compiled gradient: bytes at its peak and of temporaries, FLOPs as emitted and as the compiler counts them (0: it does not)."""

    peak_bytes: int
    temp_bytes: int
    flops: int
    compiler_flops: float
    fits: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy and a plan at its peak; no plan where the policy does not fit the device. `by_flops`: the plan minimizes FLOPs, which took so many of
    the compilations. Compilations and seconds are those of all that was asked for."""

    policy: str
    theirs: Figures
    ours: Figures | None
    compiles: int
    seconds: float
    compile_seconds: float
    by_flops: int | None = None

    @property
    def reached(self) -> bool:
        """Within the peak, with as many FLOPs or fewer."""
        if self.ours is None:
            return True
        return (
            self.ours.peak_bytes <= self.theirs.peak_bytes
            and self.ours.flops <= FLOP_SLACK * self.theirs.flops
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """All of one model on one target. `device_plan` is the plan for all of the device's memory, where the model does not fit as it is."""

    target: str
    form: str
    about: str
    compiler: str
    machine: str
    plain: Figures
    rows: tuple[Row, ...]
    device_plan: Figures | None = None

    @property
    def least_of_a_policy(self) -> int:
        """The FLOPs of the policy that recomputes least of those that fit."""
        return min((r.theirs.flops for r in self.rows if r.theirs.fits), default=0)


def figures(target: str, model: Model, loss: Loss) -> Figures:
    """Compile the gradient of a loss for a target, and count."""
    gradient = jax.value_and_grad(loss)
    use = ar.measure(gradient, *model.args, target=target)
    return Figures(
        peak_bytes=use.peak_bytes,
        temp_bytes=use.temp_bytes,
        flops=ar.jaxpr_flops(gradient, *model.args),
        compiler_flops=use.flops or 0.0,
        fits=use.fits and use.peak_bytes <= ar.target(target).device.memory_bytes,
        seconds=use.seconds,
    )


@dataclass
class Compilations:
    """Counts what is compiled: how often, and for how many seconds."""

    count: int = 0
    seconds: float = 0.0

    def compiling(self, what: str) -> None:
        """One starts."""

    def compiled(self, what: str, use: ar.MemoryUse) -> None:
        """It ended, or was known."""
        self.count += not use.cached
        self.seconds += 0.0 if use.cached else use.seconds


def plan_for(
    target: str,
    model: Model,
    loss: Loss,
    budget: int,
    effort: str,
    counter: Compilations,
    *,
    by_flops: bool = False,
) -> Figures:
    """A plan for a budget in bytes, or for the floor where that is above it, and what it compiles to."""
    costs = "flops" if by_flops else None
    make = partial(ar.plan, loss, *model.args, target=target, effort=effort, costs=costs, progress=counter)
    try:
        plan = make(budget=budget)
    except ar.InfeasibleBudgetError as error:
        plan = make(budget=error.floor_bytes)
    gradient = jax.value_and_grad(plan.apply(loss))
    return Figures(
        peak_bytes=plan.peak_bytes,
        temp_bytes=plan.memory.temp_bytes,
        flops=ar.jaxpr_flops(gradient, *model.args),
        compiler_flops=plan.memory.flops or 0.0,
        fits=True,
        seconds=plan.memory.seconds,
    )


def rows(target: str, model: Model, effort: str) -> Iterator[Row]:
    """A row for each policy that emits a program of its own."""
    loss = model.make(unwrapped)
    seen: set[tuple[int, int]] = set()
    for name, policy in policies(model).items():
        theirs = figures(target, model, model.make(lambda block, p=policy: jax.checkpoint(block, policy=p)))
        key = (theirs.peak_bytes, theirs.flops)
        if key in seen:
            continue
        seen.add(key)
        if not theirs.fits:
            yield Row(policy=name, theirs=theirs, ours=None, compiles=0, seconds=0.0, compile_seconds=0.0)
            continue
        counter, start = Compilations(), time.perf_counter()
        plan = partial(plan_for, target, model, loss, theirs.peak_bytes, effort, counter)
        ours, by_flops = plan(), None
        if ours.flops > FLOP_SLACK * theirs.flops:
            before = counter.count
            ours = plan(by_flops=True)
            by_flops = counter.count - before
        yield Row(
            policy=name,
            theirs=theirs,
            ours=ours,
            compiles=counter.count,
            seconds=time.perf_counter() - start - counter.seconds,
            compile_seconds=counter.seconds,
            by_flops=by_flops,
        )


def run(target: str, form: str, effort: str) -> Result:
    """All of one model on one target."""
    chosen = FORMS[form]()
    loss = chosen.make(unwrapped)
    plain = figures(target, chosen, loss)
    found = []
    start = time.perf_counter()
    for row in rows(target, chosen, effort):
        found.append(row)
        print(f"{time.perf_counter() - start:6.0f} s  " + " | ".join(cells(target, form, row)), flush=True)
    device = ar.target(target).device.memory_bytes
    whole = None if plain.fits else plan_for(target, chosen, loss, device, effort, Compilations())
    return Result(
        target=target,
        form=form,
        about=chosen.about,
        compiler=ar.target(target).compiler,
        machine=describe(),
        plain=plain,
        rows=tuple(found),
        device_plan=whole,
    )


# ------------------------------------------------------------------------------------------------------------------ page

HEADER = (
    "target", "model", "policy", "peak theirs", "peak ours", "ratio", "GFLOP theirs", "GFLOP ours", "ratio", "compiles", "planning s",
    "compiling s", "",
)  # fmt: skip


def cells(target: str, form: str, row: Row) -> list[str]:
    """A comparison in words."""
    theirs, ours = row.theirs, row.ours
    start = [target, form, f"`{row.policy}`", f"{theirs.peak_bytes / 1e6:.0f}"]
    if ours is None:
        return [*start, "-", "-", f"{theirs.flops / 1e9:.0f}", *["-"] * 5, "does not fit the device"]
    return [
        *start,
        f"{ours.peak_bytes / 1e6:.0f}",
        f"{ours.peak_bytes / theirs.peak_bytes:.3f}",
        _gflop(theirs),
        _gflop(ours),
        f"{ours.flops / theirs.flops:.3f}",
        _compiles(row),
        f"{row.seconds:.0f}",
        f"{row.compile_seconds:.0f}",
        ("reached" if row.reached else "**missed**") + (", by FLOPs" if row.by_flops is not None else ""),
    ]


def _compiles(row: Row) -> str:
    return str(row.compiles) if row.by_flops is None else f"{row.compiles - row.by_flops} + {row.by_flops}"


def _gflop(figures: Figures) -> str:
    counted = f" ({figures.compiler_flops / 1e9:.0f})" if figures.compiler_flops else ""
    return f"{figures.flops / 1e9:.0f}{counted}"


MODEL_HEADER = (
    "target",
    "compiler",
    "model",
    "",
    "without recomputation: peak MB",
    "GFLOP",
    "for all of the device's memory",
)


def model_cells(result: Result) -> list[str]:
    """A model in words."""
    plain, plan = result.plain, result.device_plan
    peak = f"{plain.peak_bytes / 1e6:.0f}" + ("" if plain.fits else ", does not fit")
    text = "-"
    if plan is not None:
        least = result.least_of_a_policy
        text = f"{plan.flops / 1e9:.0f} GFLOP at {plan.peak_bytes / 1e6:.0f} MB; the best policy that fits {least / 1e9:.0f}"
    return [result.target, result.compiler, result.form, result.about, peak, _gflop(plain), text]


TEXT = (
    "Peaks in MB (10^6 bytes), arguments and outputs included: of a TPU the compiler's own, of a GPU arguments + outputs + temporaries - aliases. GFLOP are "
    "counted over the emitted program, loops times their trips; in brackets the compiler's own count, which counts the body of a loop once (there is none for "
    "GPUs). The budget of a plan is the policy's peak. Plans minimize seconds, by the device's published rates; *by FLOPs*: such a plan had more FLOPs than the policy, so "
    'this one minimizes FLOPs (`costs="flops"`); compilations are those of the first and of the second. Reached: within that peak, with as many FLOPs or fewer, up to 0.01 %.'
)


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """The results by target and form."""
    return {(r.target, r.form): r for r in read_records(path, _result)}


def _result(data: dict[str, Any]) -> Result:
    def read(figures: dict[str, Any] | None) -> Any:
        return None if figures is None else Figures(**figures)

    made = [
        Row(**{**row, "theirs": read(row["theirs"]), "ours": read(row["ours"])}) for row in data.pop("rows")
    ]
    plain, plan = read(data.pop("plain")), read(data.pop("device_plan"))
    return Result(plain=plain, device_plan=plan, rows=tuple(made), **data)


def write(results: Sequence[Result], out: Path) -> Path:
    """Records and page. Returns the page's path."""
    write_records(records_path(NAME, out), results)
    reached, count = sum(r.reached for x in results for r in x.rows), sum(len(x.rows) for x in results)
    parts = [
        f"Reached: **{reached} of {count}**.",
        TEXT,
        markdown_table(MODEL_HEADER, [model_cells(r) for r in results]),
        markdown_table(HEADER, [cells(r.target, r.form, row) for r in results for row in r.rows]),
    ]
    machines = list(dict.fromkeys(r.machine for r in results))
    return write_page(NAME, "Plans for devices that are not there", parts, out=out, machines=machines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a target is missed by what was run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas")
    parser.add_argument("--models", default=",".join(FORMS), help="separated by commas")
    parser.add_argument("--effort", default="balanced", help="of the planner")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    forms = options.models.split(",")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(FORMS)}")
    new = []
    for target in options.targets.split(","):
        for form in forms:
            known = read_results(records_path(NAME, options.out))
            result = run(target, form, options.effort)
            new.append(result)
            known[target, form] = result
            print(f"Wrote {write(list(known.values()), options.out)}", flush=True)
    show(HEADER, [cells(r.target, r.form, row) for r in new for row in r.rows], width=200)
    return 0 if all(row.reached for r in new for row in r.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
