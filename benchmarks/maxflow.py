"""Maximum-flow libraries on networks like ours: speed, exactness, size, licence.

    PYTHONPATH=src python -m benchmarks.maxflow

Prints the tables of `docs/maxflow.md`. Networks come from `benchmarks.synthetic.layered` through the package's
own encoding; every library gets the same arcs. A library is not asked at a size where ten times what it took
at the size before exceeds `LIMIT_S`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np

from autoremat.solve._maxflow import SINK, SOURCE, MinCut, libraries
from autoremat.solve._network import Network, build
from benchmarks.synthetic import layered

SIZES = (1_000, 10_000, 100_000)
REPEATS = 3
LIMIT_S = 20.0

Solve = Callable[[Network, Any], tuple[float, int]]
"""(network, capacities) -> (seconds of the call, value of the cut; -1 for an unknown one)."""


@dataclass(frozen=True)
class Candidate:
    """A library: how to solve with it, and what cannot be measured here."""

    name: str
    package: str
    solve: Solve
    capacities: str
    licence: str


def _infinite(network: Network) -> Any:
    marks = np.ones(len(network.tails), dtype=bool)
    marks[network.time_arcs] = False
    marks[network.keep_arcs] = False
    return marks


def _filled(network: Network, capacities: Any) -> Any:
    """Capacities with a sum of all of them on the infinite arcs."""
    return np.where(_infinite(network), sum(capacities.tolist()) + 1, capacities)


def _package(name: str) -> Solve:
    """The package's own wrapper, by the library of that name: what is timed is what is used."""

    def solve(network: Network, capacities: Any) -> tuple[float, int]:
        library = next(x for x in libraries() if x.name == name)
        cut = MinCut(
            network.flow.nodes, network.tails, network.heads, infinite=_infinite(network), library=library
        )
        start = time.perf_counter()
        value, _ = cut.solve(capacities)
        return time.perf_counter() - start, value

    return solve


def _igraph(network: Network, capacities: Any) -> tuple[float, int]:
    igraph = import_module("igraph")
    arcs = np.stack([network.tails, network.heads], axis=1)
    graph = igraph.Graph(n=network.flow.nodes, edges=arcs, directed=True)
    filled = _filled(network, capacities).astype(float).tolist()
    start = time.perf_counter()
    cut = graph.mincut(SOURCE, SINK, capacity=filled)
    return time.perf_counter() - start, round(cut.value)


def _highs(network: Network, capacities: Any) -> tuple[float, int]:
    """The dual linear program: a potential per node, 1 at the source, 0 at the sink; an arc pays its drop."""
    optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
    m, n = len(network.tails), network.flow.nodes
    infinite = _infinite(network)
    row = np.arange(m)
    drop = sparse.csr_array(
        (
            np.concatenate([np.ones(m), -np.ones(m), -np.ones(m)]),
            (np.concatenate([row] * 3), np.concatenate([network.tails, network.heads, n + row])),
        ),
        shape=(m, n + m),
    )
    objective = np.concatenate([np.zeros(n), np.where(infinite, 0, capacities).astype(float)])
    upper = np.concatenate([np.ones(n), np.where(infinite, 0.0, 1.0)])
    lower = np.zeros(n + m)
    lower[SOURCE], upper[SINK] = 1.0, 0.0
    start = time.perf_counter()
    result = optimize.linprog(
        objective / max(1.0, objective.max()),
        A_ub=drop,
        b_ub=np.zeros(m),
        bounds=np.stack([lower, upper], axis=1),
        method="highs",
        options={"time_limit": 2 * LIMIT_S},
    )
    seconds = time.perf_counter() - start
    return seconds, -1 if result.fun is None else round(result.fun * max(1.0, objective.max()))


def _networkx(network: Network, capacities: Any) -> tuple[float, int]:
    nx = import_module("networkx")
    graph = nx.DiGraph()
    rows = zip(
        network.tails.tolist(), network.heads.tolist(), _filled(network, capacities).tolist(), strict=True
    )
    for tail, head, capacity in rows:
        old = graph.edges[tail, head]["capacity"] if graph.has_edge(tail, head) else 0
        graph.add_edge(tail, head, capacity=old + capacity)
    start = time.perf_counter()
    value = nx.minimum_cut_value(graph, SOURCE, SINK)
    return time.perf_counter() - start, value


CANDIDATES = (
    Candidate("OR-Tools SimpleMaxFlow", "ortools", _package("ortools"), "int64, any by rounds", "Apache-2.0"),
    Candidate("SciPy maximum_flow", "scipy", _package("scipy"), "int32, any by rounds", "BSD-3-Clause"),
    Candidate("igraph", "igraph", _igraph, "double", "GPL-2.0-or-later"),
    Candidate("SciPy HiGHS, linear program", "scipy", _highs, "double, tolerances", "BSD-3-Clause"),
    Candidate("networkx preflow_push", "networkx", _networkx, "any", "BSD-3-Clause"),
)

CASES = (
    ("typical", 1, Fraction(1, 2)),
    ("one value in 50 demanded", 50, Fraction(1, 2)),
    ("deep: only the last demanded, high price", 10**9, Fraction(10_000)),
    ("typical, price of 2 x 60 bits", 1, Fraction(123456789012345678, 987654321098765432)),
)


def _installed(package: str) -> tuple[str, str]:
    """Version and size in MB of an installed package."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return "not installed", ""
    return found.version, f"{sum(f.size or 0 for f in found.files or ()) / 1e6:.0f}"


def _time(solve: Solve, network: Network, capacities: Any) -> tuple[float, int]:
    seconds, value = solve(network, capacities)
    for _ in range(REPEATS - 1 if seconds < 1 else 0):
        seconds = min(seconds, solve(network, capacities)[0])
    return seconds, value


def _cell(seconds: float, value: int, exact: int) -> str:
    text = f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
    if value < 0:
        return f"> {text}"
    return text if value == exact else f"{text} (off by {abs(value - exact) / max(1, exact):.0e})"


def print_case(title: str, thin: int, price: Fraction) -> None:
    """One table: milliseconds a cut, by library and number of ops."""
    print(f"\n**{title}** (milliseconds a cut)\n")
    networks = [build(layered(n, thin=thin)) for n in SIZES]
    print(
        "| library | "
        + " | ".join(f"{n:,} ops, {len(w.tails):,} arcs" for n, w in zip(SIZES, networks, strict=True))
        + " |"
    )
    print("|---" * (len(SIZES) + 1) + "|")
    exact: list[int] = []
    for candidate in CANDIDATES:
        cells: list[str] = []
        slow = False
        for i, network in enumerate(networks):
            if slow or not _installed(candidate.package)[1]:
                cells.append("–")
                continue
            seconds, value = _time(candidate.solve, network, network.capacities(price)[0])
            if len(exact) == i:
                exact.append(value)
            cells.append(_cell(seconds, value, exact[i]))
            # Ten times the size takes ten times as long at the very least.
            slow = seconds * 10 > LIMIT_S
        print(f"| {candidate.name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the machine, the table of libraries and the tables of times."""
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores\n")
    print("| library | version | installed MB | capacities | licence |")
    print("|---|---|---|---|---|")
    for c in CANDIDATES:
        version, size = _installed(c.package)
        print(f"| {c.name} | {version} | {size} | {c.capacities} | {c.licence} |")
    for title, thin, price in CASES:
        print_case(title, thin, price)


if __name__ == "__main__":
    main()
