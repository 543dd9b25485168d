"""Keras `ResNet50` and `VGG19`, planned without touching the model.

    python -m benchmarks.keras_models [--quick] [--models ResNet50,VGG19] [--repeats 3] [--out benchmarks/results]

`keras.applications` on the JAX backend, `weights=None`, `stateless_call(training=True)`. ResNet50 at 50 % and 30 % of its
unplanned compiled peak, VGG19 at 110 % of its floor. Peaks are those of the compiled programs that run. `--quick` takes
small images and batches.

At initialization these models amplify rounding: gradients of the unplanned program itself move in the second digit if the images
change in the last bit. So the difference between planned and unplanned gradients is given beside that, and once more in double
precision, for small images.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of Keras

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autoremat as ar
from autoremat.report import TerminalProgress
from benchmarks.double import in_double
from benchmarks.gradients import Difference, difference
from benchmarks.machine import describe
from benchmarks.timing import median_seconds

NEAR_FLOOR = 1.1
"""The budget of a model whose floor is high, as a multiple of that floor."""


@dataclass(frozen=True)
class Case:
    """A model, the side of its images in pixels, the batch, and the budgets to plan for."""

    model: str
    pixels: int
    batch: int
    budgets: tuple[str, ...]


DOUBLE_PIXELS, DOUBLE_BATCH = 32, 8
"""The size at which gradients are compared in double precision, in which XLA has no fast convolutions on CPU."""

CLOSE = 1e-5
"""The relative difference of gradients in double precision that is allowed."""

FULL = (Case("ResNet50", 224, 32, ("50%", "30%")), Case("VGG19", 224, 16, ("floor",)))
QUICK = (Case("ResNet50", 64, 32, ("75%",)), Case("VGG19", 64, 16, ("floor",)))


def build(
    model: str, pixels: int, batch: int, classes: int = 1000
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss `(trainable, others, images, labels) -> (loss, new others)` of a Keras application, and example arguments.

    The loss is differentiated in its first argument. What `stateless_call` returns besides, the moving statistics of batch
    normalization among it, is an auxiliary output.
    """
    import keras

    keras.utils.set_random_seed(0)
    net = getattr(keras.applications, model)(
        weights=None, input_shape=(pixels, pixels, 3), classes=classes, classifier_activation=None
    )
    return loss_of(net), example(net, pixels, batch, classes)


def loss_of(net: Any) -> Callable[..., Any]:
    """The cross entropy of a Keras model that returns logits, and what `stateless_call` returns besides."""

    def loss(trainable: Any, others: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits, others = net.stateless_call(trainable, others, images, training=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
        return -chosen.mean(), others

    return loss


def example(net: Any, pixels: int, batch: int, classes: int) -> tuple[Any, ...]:
    """A model's variables, trainable and not, and a random batch."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.standard_normal((batch, pixels, pixels, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, classes, batch), jnp.int32)
    trainable = [v.value for v in net.trainable_variables]
    return trainable, [v.value for v in net.non_trainable_variables], images, labels


@dataclass(frozen=True)
class Row:
    """One plan, compared with the program without recomputation.

    `difference` of the gradients, `sensitivity` of the unplanned program's to the last bit of the images, and `in_double` the
    difference in double precision for small images, of a plan at `double_share` of the unplanned peak; `None` if nothing can be
    recomputed at that size.
    """

    case: Case
    budget: str
    plan: ar.Plan
    unplanned_bytes: int
    time_ratio: float
    difference: Difference
    sensitivity: Difference
    in_double: Difference | None
    double_share: float

    @property
    def share(self) -> float:
        """Peak over the unplanned peak."""
        return self.plan.peak_bytes / self.unplanned_bytes

    @property
    def rerun_share(self) -> float:
        """Recomputed FLOPs over those of the forward pass."""
        return self.plan.recompute_flops / self.plan.forward_flops

    @property
    def met(self) -> bool:
        """Whether the budget is met and the gradients agree: within rounding, and closely in double precision."""
        rounding = max(CLOSE, 2 * self.sensitivity.whole)
        agree = self.difference.whole <= rounding and (
            self.in_double is None or self.in_double.whole <= CLOSE
        )
        return self.plan.peak_bytes <= self.plan.budget_bytes and agree


@dataclass(frozen=True)
class Floor:
    """The lowest peak that was found, as a plan for an absurd budget reports it."""

    case: Case
    unplanned_bytes: int
    nbytes: int
    op: str


def gradient(loss: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """The compiled gradient of a loss with an auxiliary output."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=dict(options))


def find_floor(case: Case, progress: TerminalProgress) -> Floor:
    """Ask for one byte; the error says what is possible, and which operation stands in the way."""
    loss, args = build(case.model, case.pixels, case.batch)
    unplanned = ar.measure(jax.value_and_grad(loss, has_aux=True), *args).peak_bytes
    try:
        ar.plan(loss, *args, budget=1, has_aux=True, progress=progress)
    except ar.InfeasibleBudgetError as error:
        return Floor(case, unplanned, error.floor_bytes, error.op)
    raise AssertionError("a budget of one byte was met")


def run_case(case: Case, repeats: int, progress: TerminalProgress) -> Iterator[Row | Floor]:
    """A row for each budget that can be met; a floor where one cannot, or where the budget is relative to it."""
    loss, args = build(case.model, case.pixels, case.batch)
    floor: Floor | None = None
    for budget in case.budgets:
        progress.console.print(f"{case.model}, {case.pixels} pixels, batch {case.batch}: {budget}")
        wanted: int | str = budget
        if budget == "floor":
            floor = find_floor(case, progress)
            yield floor
            wanted = math.ceil(NEAR_FLOOR * floor.nbytes)
        try:
            plan = ar.plan(loss, *args, budget=wanted, has_aux=True, progress=progress)
        except ar.InfeasibleBudgetError as error:
            plan = None
            if floor is None:
                floor = find_floor(case, progress)
                yield floor
            progress.console.print(f"{case.model} at {budget}: {error}")
        if plan is not None:
            yield compare(case, budget, loss, args, plan, repeats)


def compare(
    case: Case, budget: str, loss: Callable[..., Any], args: tuple[Any, ...], plan: ar.Plan, repeats: int
) -> Row:
    """Run the planned and the unplanned gradient."""
    assert plan.unplanned_bytes is not None
    plain = gradient(loss, plan.compiler_options)
    planned = gradient(plan.apply(loss), plan.compiler_options)
    theirs = plain(*args)[1]
    apart = difference(planned(*args)[1], theirs)
    trainable, others, images, labels = args
    nudged = images * (1 + np.finfo(np.float32).eps)
    sensitivity = difference(plain(trainable, others, nudged, labels)[1], theirs)
    del theirs, nudged
    before, after = median_seconds([lambda: plain(*args), lambda: planned(*args)], repeats)
    double, share = compare_in_double(case.model, plan.peak_bytes / plan.unplanned_bytes)
    return Row(case, budget, plan, plan.unplanned_bytes, after / before, apart, sensitivity, double, share)


def compare_in_double(model: str, share: float) -> tuple[Difference | None, float]:
    """Of small images, in double precision: the difference of the gradients under a plan for this share of the unplanned peak, or
    for the lowest that there is; and the share of that plan."""
    loss, args = build(model, DOUBLE_PIXELS, DOUBLE_BATCH)
    with jax.enable_x64(True):
        wide, wide_args = in_double(loss, *args)
        try:
            plan = ar.plan(wide, *wide_args, budget=f"{100 * share:.2f}%", has_aux=True, effort="fast")
        except ar.InfeasibleBudgetError as error:
            plan = ar.plan(wide, *wide_args, budget=error.floor_bytes, has_aux=True, effort="fast")
        assert plan.unplanned_bytes is not None
        if not plan.checkpoints:
            return None, 1.0
        theirs = gradient(wide, plan.compiler_options)(*wide_args)[1]
        ours = gradient(plan.apply(wide), plan.compiler_options)(*wide_args)[1]
    return difference(ours, theirs), plan.peak_bytes / plan.unplanned_bytes


def small_batch_note(case: Case) -> str:
    """What a plan says at a batch of one, where parameters fill the memory."""
    loss, args = build(case.model, case.pixels, 1)
    plan = ar.plan(loss, *args, budget="100%", has_aux=True)
    return next((note for note in plan.notes if "Activations are not the bulk" in note), "(no note)")


# --------------------------------------------------------------------------------------------------------------- report


HEADER = (
    "model",
    "pixels, batch",
    "budget",
    "peak MB",
    "peak / unplanned",
    "step time",
    "rerun / forward FLOPs",
    "gradient difference",
    "its own sensitivity",
    "in double, small images",
    "compiles",
    "seconds",
)


def cells(row: Row) -> list[str]:
    """A row in words."""
    plan = row.plan
    budget = f"{NEAR_FLOOR:.0%} of the floor" if row.budget == "floor" else row.budget
    return [
        row.case.model,
        f"{row.case.pixels}, {row.case.batch}",
        f"{budget}: {plan.budget_bytes / 1e6:.0f} MB" + ("" if row.met else " **missed**"),
        f"{plan.peak_bytes / 1e6:.0f} of {row.unplanned_bytes / 1e6:.0f}",
        f"{row.share:.3f}",
        f"x{row.time_ratio:.2f}",
        f"{row.rerun_share:.2f}",
        f"{row.difference.whole:.1e} ({row.difference.worst:.1e})",
        f"{row.sensitivity.whole:.1e} ({row.sensitivity.worst:.1e})",
        f"{row.in_double.whole:.1e} at {row.double_share:.2f}" if row.in_double else "nothing to recompute",
        str(plan.compiles),
        f"{plan.seconds:.1f} + {plan.compile_seconds:.0f} compiling",
    ]


def floor_line(floor: Floor) -> str:
    """A floor in words."""
    op = re.sub(r"(?<= at )\S*site-packages/", "", floor.op)  # where Keras is installed is nobody's business
    return (
        f"{floor.case.model}, {floor.case.pixels} pixels, batch {floor.case.batch}: the lowest peak found is "
        f"{floor.nbytes / 1e6:.0f} MB, {floor.nbytes / floor.unplanned_bytes:.1%} of the unplanned one. {op}"
    )


def table(rows: Sequence[Row]) -> Table:
    """The rows for the terminal."""
    result = Table(*HEADER)
    for row in rows:
        result.add_row(*cells(row))
    return result


def markdown(
    rows: Sequence[Row], floors: Sequence[Floor], notes: Sequence[tuple[Case, str]], command: str
) -> str:
    """The committed page."""
    lines = [
        "# Keras models, planned without touching them",
        "",
        f"Made by `{command}` on {describe()}.",
        "",
        "`keras.applications` on the JAX backend, `weights=None`, `stateless_call(training=True)`, float32. A peak is that of "
        "the compiled `value_and_grad`: arguments + outputs + temporaries - aliases, in MB (10^6 bytes). Step time is planned "
        "over unplanned, medians of interleaved steps. The gradient difference is the norm of the difference over the norm, "
        "of all parameters together and, in brackets, of the worst array (without those whose gradient is rounding: "
        "biases before batch normalization). These models amplify rounding: the next column is the same difference between the "
        "unplanned program's gradients and those for images larger by one part in 2^23. In double precision, and there only, "
        f"1e-5 can be asked for: {DOUBLE_PIXELS} pixels, batch {DOUBLE_BATCH}, planned for the same share of the unplanned peak, or "
        'the lowest that there is (the share after "at"). Seconds are planning, and compiling.',
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        "## Floors",
        "",
        *(f"- {floor_line(floor)}" for floor in floors),
        "",
        "## Where activations do not dominate",
        "",
        *(f"- {case.model}, {case.pixels} pixels, batch 1: {note}" for case, note in notes),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a budget or a gradient was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small images and batches, nothing written")
    parser.add_argument("--models", default="", help="only these, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    cases = [
        c
        for c in (QUICK if options.quick else FULL)
        if not options.models or c.model in options.models.split(",")
    ]
    rows: list[Row] = []
    floors: list[Floor] = []
    notes = []
    with TerminalProgress() as progress:
        for case in cases:
            for result in run_case(case, options.repeats, progress):
                if isinstance(result, Floor):
                    floors.append(result)
                    progress.console.print(floor_line(result))
                else:
                    rows.append(result)
                    progress.console.print(" | ".join(cells(result)))
            notes.append((case, small_batch_note(case)))
    Console().print(table(rows))
    if not options.quick:
        command = "python -m benchmarks.keras_models" + (
            f" --models {options.models}" if options.models else ""
        )
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"keras_models_jax{jax.__version__}.md"
        (options.out / name).write_text(markdown(rows, floors, notes, command))
    wanted = sum(len(c.budgets) for c in cases)
    return 0 if len(rows) == wanted and all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
