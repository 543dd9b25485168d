"""Every policy of `jax.checkpoint` against a plan at a budget of its compiled memory.

    python -m benchmarks.policies [--models transformer,unet] [--repeats 7] [--plots transformer] [--out benchmarks/results]

The models of `benchmarks.models`, memory scheduler. Reached means: peak at most 1 % above the policy's, FLOPs at most 0.5 % above. FLOPs
are counted one way for both: over the emitted program after dead-code elimination, loops times their trip counts. The compiler's own count
stands beside. Targets: all policies reached; the geometric mean of the step time below that of the policies; of unfused attention the core is
recomputed first, a fused kernel is not.

With `--models` the other models' rows stay as they are. With one round of timing (`--repeats 1`) the time ratios mean little.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autoremat as ar
from autoremat.measure import MemoryUse, default_compiler_options
from benchmarks.gradients import difference
from benchmarks.machine import describe
from benchmarks.models import MODELS
from benchmarks.models.model import Loss, Model, Wrap, unwrapped
from benchmarks.pages import show
from benchmarks.policy_results import (
    FLOP_SLACK,
    MEMORY_SLACK,
    NAME,
    ROW_HEADER,
    Figures,
    Result,
    Row,
    plot,
    read_results,
    row_cells,
    summary,
    time_mean,
    write_results,
)
from benchmarks.records import records_path, write_records
from benchmarks.reruns import moment
from benchmarks.timing import median_seconds

SHARES = (1 / 3, 1 / 2, 2 / 3)
"""Of the bytes that recomputation can free: where to look at what is recomputed first."""

PLOTTED = ("transformer", "transformer_scan")
"""Models whose frontier is drawn, which takes plans for more budgets than those of the policies."""

BUDGETS = (100, 85, 70, 60, 50, 45, 40, 35, 30)
"""... in percent of the peak without recomputation."""


def policies(model: Model) -> dict[str, Callable[..., Any]]:
    """JAX's own policies, those with names with the tags of the model."""
    cp = jax.checkpoint_policies
    found: dict[str, Callable[..., Any]] = {
        "everything_saveable": cp.everything_saveable,
        "nothing_saveable": cp.nothing_saveable,
        "dots_saveable": cp.dots_saveable,
        "dots_with_no_batch_dims_saveable": cp.dots_with_no_batch_dims_saveable,
    }
    for names in model.saved:
        found[f"save_only_these_names({', '.join(names)})"] = cp.save_only_these_names(*names)
    if model.left_out:
        but = ", ".join(model.left_out)
        found[f"save_any_names_but_these({but})"] = cp.save_any_names_but_these(*model.left_out)
        found[f"save_anything_except_these_names({but})"] = cp.save_anything_except_these_names(
            *model.left_out
        )
    if model.saved:
        first = model.saved[0]
        found[f"save_from_both_policies(dots_no_batch, {', '.join(first)})"] = cp.save_from_both_policies(
            cp.dots_with_no_batch_dims_saveable, cp.save_only_these_names(*first)
        )
    return found


@dataclass(frozen=True)
class Program:
    """The gradient of a loss, compiled, and what it is called with."""

    figures: Figures
    compiled: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> Any:
        """Value and gradients."""
        return self.compiled(*self.args)

    @property
    def gradients(self) -> Any:
        """Those of the first argument."""
        return self.run()[1]


@dataclass(frozen=True)
class Source:
    """The gradient of a loss, lowered. `text` stands for the program's text."""

    gradient: Callable[..., Any]
    args: tuple[Any, ...]
    lowered: Any
    text: str

    @classmethod
    def of(cls, model: Model, loss: Loss) -> Source:
        """Trace and lower."""
        gradient = jax.value_and_grad(loss, has_aux=model.has_aux)
        lowered = jax.jit(gradient).lower(*model.args)
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        return cls(gradient, model.args, lowered, text)

    def compile(self) -> Program:
        """Compile as plans are, and count."""
        compiled = self.lowered.compile(compiler_options=default_compiler_options())
        use = MemoryUse.read(compiled, 0.0)
        figures = Figures(
            predicted_bytes=ar.predict(self.gradient, *self.args).peak_bytes,
            peak_bytes=use.peak_bytes,
            temp_bytes=use.temp_bytes,
            flops=ar.jaxpr_flops(self.gradient, *self.args),
            compiler_flops=use.flops or 0.0,
        )
        return Program(figures, compiled, self.args)


def build(model: Model, loss: Loss) -> Program:
    """The compiled gradient of a loss of the model."""
    return Source.of(model, loss).compile()


def programs(model: Model) -> dict[str, tuple[Source, list[str]]]:
    """By policy the gradient under it, and the other policies that emit the same."""

    def wrap(policy: Callable[..., Any]) -> Wrap:
        return lambda block: jax.checkpoint(block, policy=policy)

    found: dict[str, tuple[Source, list[str]]] = {}
    by_text: dict[str, str] = {}
    for name, policy in policies(model).items():
        source = Source.of(model, model.make(wrap(policy)))
        first = by_text.setdefault(source.text, name)
        if first == name:
            found[name] = (source, [])
        else:
            found[first][1].append(name)
    return found


def plan_for(model: Model, loss: Loss, budget: int) -> ar.Plan:
    """A plan for a budget in bytes, or for the floor where that is above it."""
    try:
        return ar.plan(loss, *model.args, budget=budget, has_aux=model.has_aux)
    except ar.InfeasibleBudgetError as error:
        return ar.plan(loss, *model.args, budget=error.floor_bytes, has_aux=model.has_aux)


def compare(model: Model, loss: Loss, plain: Any, repeats: int) -> Iterator[Row]:
    """A row for each policy; `plain` are the gradients without recomputation."""
    for name, (source, also) in programs(model).items():
        theirs = source.compile()
        plan = plan_for(model, loss, theirs.figures.peak_bytes)
        ours = build(model, plan.apply(loss))
        if more := ours.figures.flops > FLOP_SLACK * theirs.figures.flops:
            again = plan_for(model, loss, int(MEMORY_SLACK * theirs.figures.peak_bytes))
            plan, ours = again, build(model, again.apply(loss))
        apart = difference(ours.gradients, plain)
        before, after = median_seconds([theirs.run, ours.run], repeats)
        yield Row(
            policy=name,
            also=tuple(also),
            theirs=theirs.figures,
            ours=ours.figures,
            time_ratio=after / before,
            whole=apart.whole,
            worst=apart.worst,
            compiles=plan.compiles,
            seconds=plan.seconds,
            more=more,
        )


def nudged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a batch that differs in the last bit."""

    def nudge(x: Any) -> Any:
        return x * (1 + jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return (args[0], *jax.tree.map(nudge, args[1:]))


def run_model(name: str, repeats: int) -> Result:
    """All of one model."""
    model = MODELS[name]()
    loss = model.make(unwrapped)
    plain = build(model, loss)
    gradients = plain.gradients
    moved = plain.compiled(*nudged(model.args))[1]
    rows = []
    for row in compare(model, loss, gradients, repeats):
        rows.append(row)
        print(" | ".join(row_cells(name, row)), flush=True)
    shares = SHARES if model.attention else ()
    return Result(
        model=name,
        about=model.about,
        machine=describe(),
        repeats=repeats,
        plain=plain.figures,
        sensitivity=difference(moved, gradients).whole,
        rows=tuple(rows),
        fused=model.fused,
        moments=tuple(moment(loss, model.args, share, model.attention) for share in shares),
    )


def frontier_points(name: str) -> list[tuple[int, int]]:
    """Bytes of compiled peak and emitted FLOPs of plans for `BUDGETS`."""
    model = MODELS[name]()
    loss = model.make(unwrapped)
    points = []
    for percent in BUDGETS:
        try:
            plan = ar.plan(loss, *model.args, budget=f"{percent}%", has_aux=model.has_aux)
        except ar.InfeasibleBudgetError:
            break
        gradient = jax.value_and_grad(plan.apply(loss), has_aux=model.has_aux)
        points.append((plan.peak_bytes, ar.jaxpr_flops(gradient, *model.args)))
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a target is missed by a model that was run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas (default: all)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds")
    parser.add_argument("--plots", default=",".join(PLOTTED), help="of these models, if they are run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    wanted = options.models.split(",")
    if unknown := set(wanted) - set(MODELS):
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    records = records_path(NAME, options.out)
    new = []
    for name in wanted:
        result = run_model(name, options.repeats)
        new.append(result)
        # Read anew: a run of another model may have ended meanwhile.
        known = read_results(records) | {name: result}
        results = [known[m] for m in MODELS if m in known]
        write_records(records, results)
        path = write_results(results, options.out)
        if name in options.plots.split(","):
            picture = options.out / f"policies_{name}_jax{jax.__version__}.png"
            plot(picture, result, frontier_points(name))
        jax.clear_caches()
        print(f"Wrote {path}", flush=True)
    show(ROW_HEADER, [row_cells(r.model, row) for r in new for row in r.rows], width=200)
    print(summary(new))
    met = all(r.reached == len(r.rows) and r.attention_right for r in new) and time_mean(new) < 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
