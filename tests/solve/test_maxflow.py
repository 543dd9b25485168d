"""Minimum cuts against networkx, with every installed library and capacities of any size."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import numpy as np
import pytest

from autoremat.solve._maxflow import SINK, SOURCE, Library, MinCut, libraries

Rows = list[tuple[int, int, int | None]]


def random_rows(seed: int, top: int) -> tuple[int, Rows]:
    """A random network: node count and (tail, head, capacity or None for infinite)."""
    rng = random.Random(seed)
    nodes = rng.randint(2, 10)
    rows: Rows = []
    for _ in range(rng.randint(0, 4 * nodes)):
        tail, head = rng.randrange(nodes), rng.randrange(nodes)
        if tail in (head, SINK) or head == SOURCE:
            continue
        inner = tail != SOURCE and head != SINK
        infinite = inner and rng.random() < 0.3
        rows.append(
            (tail, head, None if infinite else rng.choice((0, rng.randint(0, 9), rng.randint(0, top))))
        )
    return nodes, rows


def min_cut(nodes: int, rows: Rows, library: Library) -> tuple[int, list[int]]:
    tails = np.array([r[0] for r in rows], dtype=np.int64)
    heads = np.array([r[1] for r in rows], dtype=np.int64)
    infinite = np.array([r[2] is None for r in rows], dtype=bool)
    capacities = np.array([r[2] or 0 for r in rows], dtype=object)
    value, side = MinCut(nodes, tails, heads, infinite=infinite, library=library).solve(capacities)
    return value, np.flatnonzero(side).tolist()


def networkx_cut(nodes: int, rows: Rows) -> tuple[int, list[int]]:
    """The value of the minimum cut, and its least source side."""
    g = nx.DiGraph()
    g.add_nodes_from(range(nodes))
    large = sum(c or 0 for *_, c in rows) + 1
    for tail, head, c in rows:
        old = g.edges[tail, head]["capacity"] if g.has_edge(tail, head) else 0
        g.add_edge(tail, head, capacity=old + (large if c is None else c))
    value, _ = nx.minimum_cut(g, SOURCE, SINK)
    residual = nx.algorithms.flow.preflow_push(g, SOURCE, SINK)
    room = nx.DiGraph()
    room.add_nodes_from(range(nodes))
    room.add_edges_from((a, b) for a, b, e in residual.edges(data=True) if e["flow"] < e["capacity"])
    return value, sorted({SOURCE, *nx.descendants(room, SOURCE)})


@pytest.fixture(params=libraries(), ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param


@pytest.mark.parametrize("top", [20, 10**6, 2**40, 2**62, 2**100, 2**500])
def test_value_and_side_equal_networkx(library: Library, top: int) -> None:
    for seed in range(120):
        nodes, rows = random_rows(seed, top)
        assert min_cut(nodes, rows, library) == networkx_cut(nodes, rows), f"seed {seed}"


@pytest.mark.parametrize("high", [2**35, 2**70, 2**150])
def test_near_ties_are_settled_by_the_low_bits(library: Library, high: int) -> None:
    for seed in range(150):
        nodes, rows = random_rows(seed, 3)
        rng = random.Random(seed)
        rows = [(a, b, None if c is None else high * rng.randint(0, 2) + c) for a, b, c in rows]
        assert min_cut(nodes, rows, library) == networkx_cut(nodes, rows), f"seed {seed}"


def test_low_bits_of_many_arcs_outweigh_a_unit_of_one(library: Library) -> None:
    # After the first round, at a scale of 2^40, the cut of three arcs is the least, by one unit. Their low
    # bits make up three.
    unit, high = 2**40, 2 ** (library.bits - 2)
    rows: Rows = [(SOURCE, n, high * unit + unit - 1) for n in (2, 3, 4)]
    rows += [(n, 5, None) for n in (2, 3, 4)]
    rows += [(5, SINK, (3 * high + 1) * unit)]
    assert min_cut(6, rows, library) == ((3 * high + 1) * unit, [0, 2, 3, 4, 5])


def test_no_arcs(library: Library) -> None:
    assert min_cut(2, [], library) == (0, [SOURCE])


def test_a_long_path_with_a_narrow_place(library: Library) -> None:
    nodes = 400
    path = [SOURCE, *range(2, nodes), SINK]
    rows: Rows = [(a, b, 2**70 + i) for i, (a, b) in enumerate(itertools.pairwise(path))]
    rows[200] = (*rows[200][:2], 2**70 - 1)
    assert min_cut(nodes, rows, library) == (2**70 - 1, sorted(path[:201]))


def test_small_capacities_may_come_as_int64(library: Library) -> None:
    cut = MinCut(3, np.array([0, 2]), np.array([2, 1]), infinite=np.zeros(2, dtype=bool), library=library)
    assert cut.solve(np.array([5, 3]))[0] == 3
    assert cut.solve(np.array([2, 3]))[0] == 2


def test_all_libraries_are_tested() -> None:
    # SciPy comes with JAX; where OR-Tools is installed it must come first.
    names = [library.name for library in libraries()]
    assert names in (["ortools", "scipy"], ["scipy"])
