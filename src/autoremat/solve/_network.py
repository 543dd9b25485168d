"""The flow network of a problem: topology once, capacities per price.

**Encoding** (design, section 3). For an op `e` that a demanded value depends on there are two nodes, and
one for each value `v` that the backward pass may read:

    f(e) -> r(e)    time(e), infinite if e is not repeatable   paid if e runs in both passes
    r(e) -> v       min over storages of λ·bytes + cost        paid if v is kept
    v    -> r(e')   infinite, for each reader e' of v          running again needs its inputs
    r(e) -> f(e)    infinite                                   e runs in at least one pass
    f(e) -> f(p)    infinite, for each producer p of an input  running needs its inputs
    v    -> sink    infinite, for each demanded v
    source -> f(e)  infinite, for each e that a primal output needs
    source -> v     min over storages, for each input v that is not free

`f(e)` on the source side: `e` runs in the forward pass. `r(e)` on the sink side: `e` runs in the backward
pass. `v` on the sink side: `v` is there in the backward pass. Free inputs are always there and have no node.

**Presolve.** What infinite arcs tie to the source or to the sink is merged with it. So no infinite arc
touches a terminal (their sum could not overflow a flow), and infeasibility shows at once: the source is tied
to the sink. Ops that no demanded value depends on never run again and have no node; without this rule
`r(e) -> f(e)` would force dead derivative-only ops to run.

**Units.** Bytes and times are divided by their greatest common divisors (sizes are mostly multiples of a page
or so), which is exact and saves bits.

Building is O(values + arcs) in plain Python, once per problem; a price costs one vectorised pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat.solve._maxflow import SINK, SOURCE, Library, MinCut
from autoremat.solve._problem import Problem, cheapest

_INT64_SAFE = 1 << 62


class _Arcs:
    """Arcs between raw node ids while the network is built. `op` and `value` say what an arc's price is."""

    def __init__(self) -> None:
        self.tails: list[int] = []
        self.heads: list[int] = []
        self.op: list[int] = []
        self.value: list[int] = []

    def add(self, tail: int, head: int, *, op: int = -1, value: int = -1) -> None:
        """An arc that costs one run of `op`, or keeping `value`, or (neither given) is infinite."""
        self.tails.append(tail)
        self.heads.append(head)
        self.op.append(op)
        self.value.append(value)


@dataclass(frozen=True, slots=True)
class Network:
    """A problem as a flow network, ready for any price. Made by `build`."""

    problem: Problem
    flow: MinCut
    time_arcs: NDArray[np.int64]
    times: NDArray[np.object_]
    keep_arcs: NDArray[np.int64]
    keep_values: NDArray[np.int64]
    storage_bytes: NDArray[np.object_]
    storage_costs: NDArray[np.object_]
    tails: NDArray[np.int64]
    heads: NDArray[np.int64]
    byte_unit: int
    time_unit: int
    total_bytes: int
    total_time: int
    _small: dict[str, NDArray[np.int64]]

    def capacities(self, price: Fraction) -> tuple[NDArray[Any], Fraction]:
        """Integer capacities at `price` (time units per byte), and the time units that one of them is worth.

        int64 where all of them together stay below 2^62, Python integers otherwise. Infinite arcs hold 0.
        """
        scaled = price * self.byte_unit / self.time_unit
        p, q = scaled.numerator, scaled.denominator
        small = bool(self._small) and p * max(1, self.total_bytes) + q * max(1, self.total_time) < _INT64_SAFE
        dtype = np.int64 if small else object
        times, sizes, costs = (
            (self._small["times"], self._small["bytes"], self._small["costs"])
            if small
            else (self.times, self.storage_bytes, self.storage_costs)
        )
        capacities = np.zeros(len(self.tails), dtype=dtype)
        capacities[self.time_arcs] = q * times
        keep = p * sizes[0] + q * costs[0]
        for s in range(1, len(sizes)):
            keep = np.minimum(keep, p * sizes[s] + q * costs[s])
        capacities[self.keep_arcs] = keep
        return capacities, Fraction(self.time_unit, q)

    def kept(self, source_side: NDArray[np.bool_], price: Fraction) -> dict[int, int]:
        """The values that a cut keeps, each by its cheapest storage at `price` (ties: fewest bytes, first)."""
        crosses = source_side[self.tails[self.keep_arcs]] & ~source_side[self.heads[self.keep_arcs]]
        values = self.keep_values[crosses].tolist()
        return {v: cheapest(self.problem, v, price) for v in values}


def build(problem: Problem, *, library: Library | None = None) -> Network:
    """Build the network of `problem`, to be cut by `library`. Raises `ValueError` if no plan exists."""
    arcs, sources, sinks, nodes = _raw(problem)
    infinite = [o < 0 and v < 0 for o, v in zip(arcs.op, arcs.value, strict=True)]
    forced = [i for i, inf in enumerate(infinite) if inf]
    pairs = [(arcs.tails[i], arcs.heads[i]) for i in forced]
    source = _closure(sources, pairs, nodes)
    sink = _closure(sinks, [(h, t) for t, h in pairs], nodes)
    _check_feasible(problem, source, sink)
    label, count = _labels(arcs, source, sink)
    tails = label[np.array(arcs.tails, dtype=np.int64)]
    heads = label[np.array(arcs.heads, dtype=np.int64)]
    live = (tails != heads) & (heads != SOURCE) & (tails != SINK)
    return _pack(problem, arcs, tails[live], heads[live], np.flatnonzero(live), count, library)


def _ancestors(problem: Problem, values: Iterable[int]) -> bytearray:
    """Marks the ops that `values` depend on."""
    graph = problem.graph
    needed = bytearray(len(graph.ops))
    producer = [v.producer for v in graph.values]
    for v in values:
        if (p := producer[v]) is not None:
            needed[p] = 1
    for op in reversed(graph.ops):
        if needed[op.id]:
            for v in op.inputs:
                if (p := producer[v]) is not None:
                    needed[p] = 1
    return needed


def _raw(problem: Problem) -> tuple[_Arcs, list[int], list[int], int]:
    """Arcs between raw nodes, the nodes tied to source and sink, and the number of raw nodes.

    Raw nodes: f(e) = e, r(e) = ops + e, v = 2·ops + v; source and sink are the last two.
    """
    graph, n = problem.graph, len(problem.graph.ops)
    base, source = 2 * n, 2 * n + len(graph.values)
    backward = _ancestors(problem, graph.demanded)
    primal = _ancestors(problem, graph.outputs)
    wanted = bytearray(len(graph.values))
    for v in graph.demanded:
        wanted[v] = 1
    arcs = _Arcs()
    for op in graph.ops:
        if not backward[op.id]:
            continue
        j = op.id
        arcs.add(j, n + j, op=j if op.repeatable else -1)
        arcs.add(n + j, j)
        for v in dict.fromkeys(op.inputs):
            value = graph.values[v]
            if value.producer is not None:
                arcs.add(j, value.producer)
            elif value.free:
                continue
            wanted[v] = 1
            arcs.add(base + v, n + j)
    for value in graph.values:
        v = value.id
        if wanted[v] and not (value.free and value.producer is None):
            tail = source if value.producer is None else n + value.producer
            arcs.add(tail, base + v, value=v if problem.storages[v] else -1)
    sources = [source, *(j for j in range(n) if primal[j])]
    sinks = [source + 1, *(base + v for v in dict.fromkeys(graph.demanded) if not _free(problem, v))]
    return arcs, sources, sinks, source + 2


def _free(problem: Problem, value: int) -> bool:
    v = problem.graph.values[value]
    return v.free and v.producer is None


def _closure(start: list[int], pairs: list[tuple[int, int]], nodes: int) -> bytearray:
    """Marks what can be reached from `start` along `pairs`."""
    following: dict[int, list[int]] = {}
    for tail, head in pairs:
        following.setdefault(tail, []).append(head)
    reached = bytearray(nodes)
    stack = list(start)
    while stack:
        node = stack.pop()
        if not reached[node]:
            reached[node] = 1
            stack.extend(following.get(node, ()))
    return reached


def _check_feasible(problem: Problem, source: bytearray, sink: bytearray) -> None:
    if not any(a and b for a, b in zip(source, sink, strict=True)):
        return
    base = 2 * len(problem.graph.ops)
    stuck = [v for v in range(len(problem.graph.values)) if source[base + v] and sink[base + v]]
    graph, v = problem.graph, stuck[0]
    producer = graph.values[v].producer
    origin = (
        "an input that is not free"
        if producer is None
        else f"op {producer} ({graph.ops[producer].primitive})"
    )
    raise ValueError(
        f"no plan exists at any budget: the backward pass needs value {v}, made by {origin}, which can be "
        f"neither kept (it has no storage) nor computed again"
    )


def _labels(arcs: _Arcs, source: bytearray, sink: bytearray) -> tuple[NDArray[np.int64], int]:
    """Dense labels of the nodes that arcs touch, merged ones being `SOURCE` or `SINK`."""
    label = np.full(len(source), -1, dtype=np.int64)
    used = np.zeros(len(source), dtype=bool)
    used[arcs.tails] = True
    used[arcs.heads] = True
    tied_source = np.frombuffer(source, dtype=np.uint8) != 0
    tied_sink = np.frombuffer(sink, dtype=np.uint8) != 0
    inner = np.flatnonzero(used & ~tied_source & ~tied_sink)
    label[inner] = np.arange(2, 2 + len(inner))
    label[tied_source] = SOURCE
    label[tied_sink] = SINK
    return label, 2 + len(inner)


def _pack(
    problem: Problem,
    arcs: _Arcs,
    tails: NDArray[np.int64],
    heads: NDArray[np.int64],
    live: NDArray[np.int64],
    count: int,
    library: Library | None,
) -> Network:
    """Arrays of the arcs that survived, in units of the greatest common divisors."""
    op = np.array(arcs.op, dtype=np.int64)[live]
    value = np.array(arcs.value, dtype=np.int64)[live]
    time_arcs, keep_arcs = np.flatnonzero(op >= 0), np.flatnonzero(value >= 0)
    times = [problem.op_cost[int(j)] for j in op[time_arcs]]
    options = [problem.storages[int(v)] for v in value[keep_arcs]]
    width = max((len(o) for o in options), default=1)
    # A value with fewer storages repeats its first one: a minimum does not mind.
    rows = [[o[s] if s < len(o) else o[0] for o in options] for s in range(width)]
    byte_unit = gcd(*(s.nbytes for row in rows for s in row)) or 1
    time_unit = gcd(*times, *(s.cost for row in rows for s in row)) or 1
    scaled_times = _objects([t // time_unit for t in times])
    sizes = _table([[s.nbytes // byte_unit for s in row] for row in rows])
    costs = _table([[s.cost // time_unit for s in row] for row in rows])
    total_bytes = int(sizes.max(axis=0).sum()) if sizes.size else 0
    total_time = int(scaled_times.sum()) + (int(costs.max(axis=0).sum()) if costs.size else 0)
    small: dict[str, NDArray[np.int64]] = {}
    if max(total_bytes, total_time) < _INT64_SAFE:
        small = {
            "times": scaled_times.astype(np.int64),
            "bytes": sizes.astype(np.int64),
            "costs": costs.astype(np.int64),
        }
    return Network(
        problem=problem,
        flow=MinCut(count, tails, heads, infinite=(op < 0) & (value < 0), library=library),
        time_arcs=time_arcs,
        times=scaled_times,
        keep_arcs=keep_arcs,
        keep_values=value[keep_arcs],
        storage_bytes=sizes,
        storage_costs=costs,
        tails=tails,
        heads=heads,
        byte_unit=byte_unit,
        time_unit=time_unit,
        total_bytes=total_bytes,
        total_time=total_time,
        _small=small,
    )


def _objects(numbers: list[int]) -> NDArray[np.object_]:
    """Python integers of any size in an array."""
    array = np.empty(len(numbers), dtype=object)
    array[:] = numbers
    return array


def _table(rows: list[list[int]]) -> NDArray[np.object_]:
    table = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(rows):
        table[i, :] = row
    return table
