"""Loss curves of training with ours and without rematerialization, beside the noise of JAX's own.

    python -m benchmarks.training [--steps 200] [--budget 50%] [--out benchmarks/results]

The model and text of `autoremat demo`, with sequences of half its length, and AdamW; each step one compiled program; in float32, and with the blocks in
bfloat16 (parameters, residual stream and loss in float32). The learning rate is one at which training is stable: where it is not, rounding
grows into differences of any size. The noise are runs of JAX alone that are the same but for rounding: with the rows
of each batch in another order, so that the same numbers are added up differently, and with `jax.checkpoint`. Target: our curve is no
further from that of JAX without checkpoint than theirs are, at the largest difference and on average.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoremat as ar
from autoremat.cli._demo_model import Size, batches, init, make_block, make_loss, read_text
from benchmarks.pages import publish

SIZE = Size(sequence=128)
LEARNING_RATE, WARM_UP = 5e-4, 20
DTYPES = ("float32", "bfloat16")

Loss = Callable[..., Any]
Checkpoint = Callable[[Loss], Loss]


@dataclass(frozen=True)
class Way:
    """A way to train: what is wrapped round a block, the plan's budget, and the order of a batch's rows."""

    name: str
    checkpoint: Checkpoint = lambda block: block
    budget: str | None = None
    order: tuple[int, ...] = tuple(range(SIZE.batch))
    ours: bool = False


def ways(budget: str) -> list[Way]:
    """The reference first, then JAX's others, then ours."""
    rows = tuple(range(SIZE.batch))
    return [
        Way("JAX, no checkpoint"),
        Way("the same, rows of a batch reversed", order=rows[::-1]),
        Way("the same, rows of a batch rotated", order=(*rows[1:], rows[0])),
        Way("JAX, `jax.checkpoint` of a block", jax.checkpoint),
        Way("ours, `checkpoint` of a block", ar.checkpoint, ours=True),
        Way(f"ours, `plan` for {budget}", budget=budget, ours=True),
    ]


@dataclass(frozen=True)
class Curve:
    """The losses of one run, and what its compiled step needs in bytes."""

    way: Way
    losses: np.ndarray
    temp_bytes: int


@dataclass(frozen=True)
class Row:
    """One run against the reference. Differences are of losses, in nats; `noise` is that of JAX's own."""

    dtype: str
    curve: Curve
    largest: float
    mean: float
    noise: tuple[float, float]

    @property
    def met(self) -> bool:
        """Whether the run is within the noise."""
        return self.largest <= self.noise[0] and self.mean <= self.noise[1]


def loss_for(way: Way, dtype: str) -> Loss:
    """The demo's loss, its blocks computed in `dtype`."""
    block = make_block(SIZE.heads)

    def in_dtype(x: Any, p: Any) -> Any:
        narrow = jax.tree.map(lambda a: a.astype(dtype), p)
        return x + (block(x.astype(dtype), narrow) - x.astype(dtype)).astype(x.dtype)

    return make_loss(way.checkpoint(block if dtype == "float32" else in_dtype))


def train(way: Way, dtype: str, steps: int) -> Curve:
    """Train from the same parameters on the same batches."""
    params = init(jax.random.key(0), SIZE)
    data = batches(read_text(), SIZE)
    optimizer = optax.adamw(optax.linear_schedule(0.0, LEARNING_RATE, WARM_UP))
    state = optimizer.init(params)
    loss = loss_for(way, dtype)
    if way.budget:
        loss = ar.plan(loss, params, next(batches(read_text(), SIZE)), budget=way.budget).apply(loss)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled: Any = None
    losses = []
    for batch in itertools.islice(data, steps):
        batch = jnp.asarray(batch[list(way.order)])
        compiled = compiled or jax.jit(step).lower(params, state, batch).compile()
        params, state, value = compiled(params, state, batch)
        losses.append(float(value))
    return Curve(way, np.array(losses), compiled.memory_analysis().temp_size_in_bytes)


def compare(dtype: str, steps: int, budget: str) -> list[Row]:
    """All ways in one precision, against the first."""
    curves = []
    for way in ways(budget):
        curves.append(train(way, dtype, steps))
        print(f"{dtype}: {way.name}: {curves[-1].losses[0]:.4f} -> {curves[-1].losses[-1]:.4f}", flush=True)
    away = [np.abs(c.losses - curves[0].losses) for c in curves]
    others = [d for d, c in zip(away, curves, strict=True) if not c.way.ours]
    noise = float(max(d.max() for d in others)), float(max(d.mean() for d in others))
    return [
        Row(dtype, curve, float(d.max()), float(d.mean()), noise)
        for curve, d in zip(curves, away, strict=True)
    ]


HEADER = (
    "blocks in",
    "run",
    "temporaries, MB",
    "first loss",
    "last loss",
    "largest difference",
    "mean difference",
    "",
)


def cells(row: Row) -> list[str]:
    """A row in words."""
    losses = row.curve.losses
    return [
        row.dtype,
        row.curve.way.name,
        f"{row.curve.temp_bytes / 1e6:.1f}",
        f"{losses[0]:.4f}",
        f"{losses[-1]:.4f}",
        f"{row.largest:.1e}",
        f"{row.mean:.1e}",
        "" if not row.curve.way.ours else "within the noise" if row.met else "beyond the noise",
    ]


def text(steps: int) -> str:
    """What the page says of the table."""
    return (
        f"The demo's model ({SIZE.layers} layers, width {SIZE.width}, batch {SIZE.batch} of {SIZE.sequence} bytes), AdamW with a learning rate of {LEARNING_RATE}, {steps} steps. "
        "Differences are those of the losses, in nats, from the first run of the same precision. The noise is the largest difference of the "
        "other runs of JAX alone: equal but for rounding."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a curve of ours is beyond the noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    rows = [row for dtype in DTYPES for row in compare(dtype, options.steps, options.budget)]
    publish(
        "training",
        "Loss curves",
        text(options.steps),
        HEADER,
        [cells(row) for row in rows],
        out=options.out,
        width=160,
    )
    return 0 if all(row.met for row in rows if row.curve.way.ours) else 1


if __name__ == "__main__":
    sys.exit(main())
