"""Schedules under a budget, on the graphs on which Checkmate and MOCCASIN published results.

    python -m benchmarks.graphs --graphs FOLDER [--only NAMES] [--shares 0.9,0.8,0.7,0.5] [--limit 120] [--largest 400] [--out benchmarks/results]

FOLDER holds the graphs as node-link JSON; they are not part of this repository. A budget is a share of the peak without
recomputation, rounded up, and the input order is kept, as in MOCCASIN's protocol. Each budget is solved with
`effort="balanced"`; where that does not prove its schedule the best, again with `effort="optimal"` and
`--limit` seconds, up to `--largest` ops.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoremat import InfeasibleBudgetError
from autoremat.solve import NoScheduleFoundError, OpGraph, ScheduleResult, ScheduleStatus, schedule, simulate
from autoremat.solve._order import Effort
from benchmarks.machine import describe

GRAPHS = (
    "vgg16_train",
    "vgg19_train",
    "unet_train",
    "fcn8_train",
    "segnet_train",
    "mobilenet_train",
    "resnet50_train",
    "random_layered_n100",
    "random_layered_n250",
    "random_layered_n500",
    "random_layered_n1000",
)


@dataclass(frozen=True)
class Published:
    """Time added, in percent of the total, and seconds; as printed in a table of results."""

    checkmate: str
    rounding: str
    moccasin: str


# Bartan, Li, Teague, Lott, Dilkina: Moccasin, ICML 2023, the poster's table. At most two executions of an op, 16 workers.
# "over": the schedule's peak is above the budget.
PUBLISHED = {
    ("fcn8_train", "0.9"): Published("0.0 in 6.3 s", "0.0 in 6.8 s, over", "0.0 in 3.1 s"),
    ("fcn8_train", "0.8"): Published("0.1 in 5.6 s", "0.1 in 6.7 s, over", "0.1 in 3.1 s"),
    ("resnet50_train", "0.9"): Published("0.1 in 434 s", "0.1 in 505 s", "0.2 in 65 s"),
    ("resnet50_train", "0.8"): Published("0.3 in 485 s", "0.5 in 1065 s", "0.3 in 69 s"),
    ("random_layered_n250", "0.9"): Published("0.9 in 685 s", "93.0 in 402 s, over", "0.9 in 55 s"),
    ("random_layered_n250", "0.8"): Published("none", "328.6 in 697 s, over", "4.9 in 640 s"),
    ("random_layered_n1000", "0.9"): Published("none", "none", "0.7 in 3613 s"),
    ("random_layered_n1000", "0.8"): Published("none", "none", "3.4 in 3612 s"),
}

COLUMNS = (
    "graph",
    "ops",
    "budget",
    "effort",
    "overhead %",
    "bound %",
    "gap %",
    "s",
    "executions",
    "result",
    "Checkmate %",
    "LP rounding %",
    "MOCCASIN %",
)

NOTES = """\
Budget: share of the peak without recomputation, input order kept. Overhead: time added, in percent of the time of
one execution of each op. Bound: no schedule with this order of first executions, however often ops run, adds less.
Gap: by how much the total time may exceed the least possible, relative to the bound on it. Executions: the most
of one op; where it is 2, the schedule also obeys MOCCASIN's limit of two. Published: of the MOCCASIN poster (ICML 2023),
whose limit is two executions; overheads are rounded there to 0.1, and the seconds are those of its authors'
machine with 16 workers. Peaks, times and feasibility of our schedules are those of `autoremat.solve.simulate`.
"""


def load(path: Path) -> OpGraph:
    """Read a published graph, in its input order."""
    data = json.loads(path.read_text("utf-8"))
    if "order" in data["graph"]:
        nodes = {node["name"]: node for node in data["nodes"]}
        order = data["graph"]["order"]
        size, cost, ends = "out_cost", "duration", ("0", "1")
    else:
        nodes = {node["id"]: node for node in data["nodes"]}
        order = list(nodes)
        size, cost, ends = "cost_ram", "cost_cpu", ("source", "target")
    place = {node: i for i, node in enumerate(order)}
    inputs: list[set[int]] = [set() for _ in order]
    for link in data["links"]:
        inputs[place[link[ends[1]]]].add(place[link[ends[0]]])
    return OpGraph(
        nbytes=tuple(nodes[v][size] for v in order),
        cost=tuple(nodes[v][cost] for v in order),
        inputs=tuple(tuple(sorted(row)) for row in inputs),
        names=tuple(str(nodes[v]["name"]) for v in order),
    )


def percent(cost: int, base: int) -> str:
    """Time beyond `base`, in percent of it."""
    return f"{100 * (cost - base) / base:.3f}"


def row(name: str, graph: OpGraph, share: str, effort: str, found: ScheduleResult | Exception) -> list[str]:
    """One line of the table."""
    known = PUBLISHED.get((name, share), Published("", "", ""))
    published = [known.checkmate, known.rounding, known.moccasin]
    start = [name.removesuffix("_train"), f"{len(graph):,}", share, effort]
    if isinstance(found, InfeasibleBudgetError):
        reason = f"infeasible: floor {found.floor_bytes:,}, set by {found.op}"
        return [*start, "", "", "", "", "", reason, *published]
    if isinstance(found, NoScheduleFoundError):
        return [*start, "", "", "", "", "", f"none found; lowest peak {found.lowest_bytes:,}", *published]
    assert isinstance(found, ScheduleResult)
    assert simulate(graph, found.schedule).peak_bytes <= found.budget_bytes
    base = graph.base_cost
    return [
        *start,
        percent(found.cost, base),
        percent(found.lower_bound, base),
        f"{100 * found.gap:.3f}",
        f"{found.seconds:.1f}",
        str(max(found.timeline.executions)),
        "optimal" if found.status is ScheduleStatus.OPTIMAL else "best found",
        *published,
    ]


def attempt(graph: OpGraph, budget: int, effort: Effort, limit: float | None) -> ScheduleResult | Exception:
    """A schedule, or the error that says why there is none."""
    try:
        return schedule(graph, budget, effort=effort, time_limit_s=limit)
    except (InfeasibleBudgetError, NoScheduleFoundError) as error:
        return error


def settled(found: ScheduleResult | Exception) -> bool:
    """Whether more time cannot change the answer."""
    if isinstance(found, ScheduleResult):
        return found.status is ScheduleStatus.OPTIMAL
    return isinstance(found, InfeasibleBudgetError)


def rows(
    names: list[str], folder: Path, shares: list[str], limit: float, largest: int
) -> Iterator[list[str]]:
    """Solve everything, line by line."""
    for name in names:
        graph = load(folder / f"{name}.json")
        peak = simulate(graph, range(len(graph))).peak_bytes
        for share in shares:
            budget = math.ceil(Fraction(share) * peak)
            found = attempt(graph, budget, "balanced", None)
            yield row(name, graph, share, "balanced", found)
            if limit and len(graph) <= largest and not settled(found):
                yield row(
                    name, graph, share, f"optimal, {limit:g} s", attempt(graph, budget, "optimal", limit)
                )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=Path, required=True, help="folder with the published graphs")
    parser.add_argument("--only", default=",".join(GRAPHS), help="names of graphs, separated by commas")
    parser.add_argument("--shares", default="0.9,0.8,0.7,0.5")
    parser.add_argument(
        "--limit", type=float, default=120, help='seconds for effort="optimal"; 0: leave it out'
    )
    parser.add_argument("--largest", type=int, default=400, help='the most ops for effort="optimal"')
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    console = Console(width=200)
    table = Table(*COLUMNS)
    lines = [
        "# Schedules under a budget on the published graphs",
        "",
        f"Made by `python -m benchmarks.graphs --graphs FOLDER --limit {options.limit:g} --largest {options.largest}` on {describe()}.",
        "",
        NOTES,
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "graphs.md"
    names, shares = options.only.split(","), options.shares.split(",")
    for line in rows(names, options.graphs, shares, options.limit, options.largest):
        console.print(" ".join(line), highlight=False)
        table.add_row(*line)
        lines.append("| " + " | ".join(line) + " |")
        # Written line by line: the whole takes long.
        target.write_text("\n".join(lines) + "\n")
    console.print(table)
    print(f"Wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
