"""A scan of 1,000 steps, differentiated in the memory of a few states: time, memory and steps beside other ways.

    python -m benchmarks.long_scan [--length 1000] [--repeats 9] [--out benchmarks/results]

An ODE (Runge-Kutta steps of 4,096 Lorenz systems) and an RNN (a gated recurrent unit), each through JAX's plain scan, a scan of a
checkpointed step, two nested scans of checkpoints (about sqrt(length) each), Equinox's checkpointed loop, and `autoremat.scan`, the last two
with 20 and with 10 snapshots. Target: at most 1.05 times the time of Equinox's loop with as many checkpoints, and as many steps advanced as
the binomial optimum.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import autoremat as ar
from autoremat.solve import forward_steps
from benchmarks.pages import publish
from benchmarks.timing import median_seconds

TARGET = 1.05
SNAPSHOTS = (20, 10)
OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

Scan = Callable[[Any, Any, Any, int], Any]


# ----------------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Problem:
    """A loss `(scan, *args)` and what it is differentiated at; the bytes of its carry."""

    name: str
    loss: Callable[..., Any]
    args: tuple[Any, ...]
    state_bytes: int


def lorenz_step(p: Any, y: Any) -> Any:
    """A Runge-Kutta step of order 4."""

    def slope(y: Any) -> Any:
        a, b, c = y
        return jnp.stack([p[0] * (b - a), a * (p[1] - c) - b, a * b - p[2] * c])

    h = 0.002
    k1 = slope(y)
    k2 = slope(y + h / 2 * k1)
    k3 = slope(y + h / 2 * k2)
    k4 = slope(y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def ode(length: int) -> Problem:
    """4,096 systems; derivatives in the three parameters and the initial state."""

    def loss(scan: Scan, p: Any, y: Any) -> Any:
        y, _ = scan(lambda y, _: (lorenz_step(p, y), None), y, None, length)
        return (y**2).mean()

    y = jax.random.normal(jax.random.key(0), (3, 4096))
    return Problem("ODE", loss, (jnp.array([10.0, 28.0, 8 / 3]), y), y.nbytes)


def rnn(length: int, batch: int = 32, width: int = 128) -> Problem:
    """A gated recurrent unit; derivatives in its weights and the inputs."""

    def cell(w: Any, h: Any, x: Any) -> Any:
        r, z = jnp.split(jax.nn.sigmoid(x @ w["gates_x"] + h @ w["gates_h"]), 2, -1)
        n = jnp.tanh(x @ w["new_x"] + (r * h) @ w["new_h"])
        return (1 - z) * n + z * h

    def loss(scan: Scan, w: Any, xs: Any) -> Any:
        h, _ = scan(lambda h, x: (cell(w, h, x), None), jnp.zeros((batch, width)), xs, length)
        return (h**2).mean()

    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {
        "gates_x": (width, 2 * width),
        "gates_h": (width, 2 * width),
        "new_x": (width, width),
        "new_h": (width, width),
    }
    w = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return Problem("RNN", loss, (w, jax.random.normal(next(keys), (length, batch, width))), 4 * batch * width)


# --------------------------------------------------------------------------------------------------------------- the ways


def plain(f: Any, init: Any, xs: Any, length: int) -> Any:
    """JAX's scan."""
    return lax.scan(f, init, xs, length)


def of_checkpoints(f: Any, init: Any, xs: Any, length: int) -> Any:
    """A scan of a checkpointed step."""
    return lax.scan(jax.checkpoint(f, prevent_cse=False), init, xs, length)


def nested(f: Any, init: Any, xs: Any, length: int) -> Any:
    """A scan of checkpointed scans of a checkpointed step, as long as the divisor of the length next to its square root."""
    inner = min(
        (d for d in range(1, length + 1) if length % d == 0), key=lambda d: abs(d - math.sqrt(length))
    )
    blocks = jax.tree.map(lambda x: x.reshape(length // inner, inner, *x.shape[1:]), xs)
    block = jax.checkpoint(lambda c, x: of_checkpoints(f, c, x, inner), prevent_cse=False)
    return lax.scan(block, init, blocks, length // inner)


def equinox(snapshots: int, f: Any, init: Any, xs: Any, length: int) -> Any:
    """Equinox's loop."""
    return eqxi.scan(f, init, xs, length, kind="checkpointed", checkpoints=snapshots)


def ours(snapshots: int, f: Any, init: Any, xs: Any, length: int) -> Any:
    """autoremat's."""
    return ar.scan(f, init, xs, length, snapshots=snapshots)


WAYS: dict[str, tuple[Scan, int | None]] = {
    "`jax.lax.scan`": (plain, None),
    "the same of a `jax.checkpoint`": (of_checkpoints, None),
    "nested, of `jax.checkpoint`s": (nested, None),
    **{f"Equinox, {s} checkpoints": (functools.partial(equinox, s), s) for s in SNAPSHOTS},
    **{f"`autoremat.scan`, {s} snapshots": (functools.partial(ours, s), s) for s in SNAPSHOTS},
}


# ----------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way through one problem. Only our rows have an optimum of `runs`, and a `ratio` over Equinox with as many checkpoints."""

    problem: str
    way: str
    temp_bytes: int
    states: float
    runs: int
    seconds: float
    error: float
    optimum: int | None = None
    ratio: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met, of our rows."""
        if self.ratio is None:
            return None
        return self.ratio <= TARGET and self.runs == self.optimum


def executions(scan: Scan, length: int) -> int:
    """How often the step runs in a gradient, counted while it runs: advances and linearizations."""
    count = 0

    def one(c: Any) -> None:
        nonlocal count
        count += 1

    def step(c: Any, _: Any) -> Any:
        jax.debug.callback(
            one, c
        )  # with an operand: what does not depend on the carry is moved out of a scan
        return jnp.sin(c), None

    jax.block_until_ready(jax.jit(jax.grad(lambda c: scan(step, c, None, length)[0]))(1.0))
    jax.effects_barrier()
    return count


def difference(found: Any, expected: Any) -> float:
    """The largest difference of an array, over the largest of its elements."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - e).max() / jnp.abs(e).max()) for a, e in pairs)


def measure(problem: Problem, length: int, repeats: int) -> list[Row]:
    """All ways through a problem, timed in turn."""
    compiled = {}
    for name, (scan, _) in WAYS.items():
        grad = jax.grad(functools.partial(problem.loss, scan), tuple(range(len(problem.args))))
        compiled[name] = jax.jit(grad).lower(*problem.args).compile(compiler_options=OPTIONS)
    grads = {name: run(*problem.args) for name, run in compiled.items()}
    times = median_seconds(
        [functools.partial(run, *problem.args) for run in compiled.values()], repeats=repeats
    )
    seconds = dict(zip(compiled, times, strict=True))
    rows = []
    for name, (scan, snapshots) in WAYS.items():
        temp = compiled[name].memory_analysis().temp_size_in_bytes
        row = Row(
            problem=problem.name,
            way=name,
            temp_bytes=temp,
            states=temp / problem.state_bytes,
            runs=executions(scan, length),
            seconds=seconds[name],
            error=difference(grads[name], grads[next(iter(WAYS))]),
        )
        if snapshots is not None and name.startswith("`autoremat"):
            # Beside what is advanced: one linearization a step, and the last step of the forward pass, for its value.
            optimum = forward_steps(length, snapshots) + length + 1
            ratio = row.seconds / seconds[f"Equinox, {snapshots} checkpoints"]
            row = replace(row, optimum=optimum, ratio=ratio)
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------------------- report

HEADER = (
    "problem",
    "scan",
    "temporaries MB",
    "in states",
    "steps run",
    "advances (optimum)",
    "ms",
    "ratio to Equinox",
    "gradient, difference",
    "",
)


def cells(row: Row, length: int) -> list[str]:
    """A row in words."""
    advances = "" if row.optimum is None else f"{row.runs - length - 1} ({row.optimum - length - 1})"
    return [
        row.problem,
        row.way,
        f"{row.temp_bytes / 1e6:.2f}",
        f"{row.states:.0f}",
        str(row.runs),
        advances,
        f"{1e3 * row.seconds:.0f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.error:.0e}",
        {None: "", True: "met", False: "missed"}[row.met],
    ]


def text(length: int) -> str:
    """What the page says of the table."""
    return (
        f"Gradients of scans of {length:,} steps, compiled under the memory-minimizing scheduler; medians of interleaved runs. "
        "The state of the ODE has 12,288 numbers, that of the RNN 4,096. *Temporaries* also hold what one step needs "
        "besides; *steps run* counts every execution of the step while the program runs: those advanced, one linearization of "
        "each, and, in a forward pass that returns the final state, the last step. Gradients are compared with the plain "
        f"scan's. Target: a ratio of at most {TARGET}, and as many advances as the binomial optimum."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    rows = [
        row
        for problem in (ode(options.length), rnn(options.length))
        for row in measure(problem, options.length, options.repeats)
    ]
    publish(
        "long_scan",
        "A long scan in the memory of a few states",
        text(options.length),
        HEADER,
        [cells(row, options.length) for row in rows],
        out=options.out,
        width=180,
    )
    return 0 if all(r.met is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
