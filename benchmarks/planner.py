"""Planning time without compilations, for joint graphs of about 1e3, 1e4 and 5e4 equations.

    python -m benchmarks.planner [--sizes 1000,10000,50000] [--out benchmarks/results]

Unrolled transformers, once with equal layers (which share their solution) and once with a width of its own in each layer (so that
nothing is shared). Planning is tracing, cutting into stages in each promising way, and solving every stage to its frontier.
Targets: 1 s, 10 s, 60 s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autoremat as ar
from benchmarks.machine import describe
from benchmarks.models import transformer

TARGETS = {1_000: 1.0, 10_000: 10.0, 50_000: 60.0}
WIDTH = 64


def example(layers: int, *, equal: bool) -> tuple[Any, Any]:
    """Shapes of parameters for `layers` layers; if not `equal`, each has an MLP of another width."""
    f32 = jnp.float32
    params = []
    for i in range(layers):
        hidden = 4 * WIDTH if equal else 4 * WIDTH + 8 * i
        params.append(
            {
                "qkv": jax.ShapeDtypeStruct((WIDTH, 3 * WIDTH), f32),
                "out": jax.ShapeDtypeStruct((WIDTH, WIDTH), f32),
                "up": jax.ShapeDtypeStruct((WIDTH, hidden), f32),
                "down": jax.ShapeDtypeStruct((hidden, WIDTH), f32),
                "scale1": jax.ShapeDtypeStruct((WIDTH,), f32),
                "scale2": jax.ShapeDtypeStruct((WIDTH,), f32),
            }
        )
    return params, jax.ShapeDtypeStruct((4, 128, WIDTH), f32)


def layers_for(equations: int) -> int:
    """How many layers make a joint graph of about so many equations."""
    few, more = (_joint_equations(n) for n in (2, 4))
    per_layer = (more - few) // 2
    return max(2, round(equations / per_layer))


def _joint_equations(layers: int) -> int:
    return ar.frontier(transformer.unrolled(), *example(layers, equal=True)).ops


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000,50000")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    table = Table(
        "joint equations", "layers", "kind", "plans", "trace s", "solve s", "total s", "target s", ""
    )
    lines = [
        "# Planning time without compilations",
        "",
        f"Made by `python -m benchmarks.planner` on {describe()}.",
        "",
        "| joint equations | layers | kind | plans on the path | tracing s | staging and solving s | total s | target s | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in map(int, options.sizes.split(",")):
        layers = layers_for(size)
        for kind in ("equal layers", "all layers differ"):
            found = ar.frontier(transformer.unrolled(), *example(layers, equal=kind == "equal layers"))
            target = TARGETS.get(size, float("nan"))
            row = [
                f"{found.ops:,}",
                str(layers),
                kind,
                str(len(found)),
                f"{found.trace_seconds:.2f}",
                f"{found.seconds - found.trace_seconds:.2f}",
                f"{found.seconds:.2f}",
                f"{target:g}",
                "met" if found.seconds <= target else "**missed**",
            ]
            table.add_row(*row)
            lines.append("| " + " | ".join(row) + " |")
    Console(width=120).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    target_file = options.out / f"planner_jax{jax.__version__}.md"
    target_file.write_text("\n".join(lines) + "\n")
    print(f"Wrote {target_file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
