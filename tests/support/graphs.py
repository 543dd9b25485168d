"""Small problems, random ones, and an oracle that enumerates every plan.

The oracle follows the definition and shares nothing with the package: a plan is a set of ops that run
forward, a set that runs backward, and a storage for each value that the backward pass needs and does not make.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import networkx as nx
from hypothesis import strategies as st

from autoremat.graph import Graph, Op, Value, check
from autoremat.solve import Problem, Storage

Pair = tuple[int, int]
"""Kept bytes and extra cost of a plan."""


def problem(
    ops: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]],
    *,
    storages: Mapping[int, tuple[Storage, ...]],
    inputs: tuple[int, ...] = (0,),
    open_inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    demanded: tuple[int, ...] = (),
    once: tuple[int, ...] = (),
) -> Problem:
    """A problem from rows (inputs, outputs, cost). `open_inputs` are not free, ops in `once` not repeatable."""
    rows = list(ops)
    producer = {v: j for j, (_, made, _) in enumerate(rows) for v in made}
    count = max([*inputs, *producer], default=-1) + 1
    values = tuple(
        Value(
            id=v,
            shape=(),
            dtype="f32",
            nbytes=4,
            producer=producer.get(v),
            free=v in inputs and v not in open_inputs,
        )
        for v in range(count)
    )
    made = tuple(
        Op(id=j, primitive=f"op{j}", inputs=i, outputs=o, repeatable=j not in once)
        for j, (i, o, _) in enumerate(rows)
    )
    graph = Graph(values=values, ops=made, inputs=inputs, outputs=outputs, demanded=demanded)
    return Problem(
        graph=check(graph),
        op_cost=tuple(c for _, _, c in rows),
        storages=tuple(storages.get(v, ()) for v in range(count)),
    )


def random_problem(rng: random.Random, *, ops: int = 7, top: int = 12) -> Problem:
    """A random joint graph with up to `ops` ops; sizes and times are 0 to `top`."""
    inputs = tuple(range(rng.randint(1, 3)))
    open_inputs = tuple(v for v in inputs if rng.random() < 0.25)
    values = list(inputs)
    rows: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for _ in range(rng.randint(0, ops)):
        read = tuple(rng.choice(values[-5:]) for _ in range(rng.choice((1, 1, 2, 3))))
        made = tuple(range(len(values), len(values) + rng.choice((1, 1, 1, 2))))
        values += made
        rows.append((read, made, rng.choice((0, rng.randint(0, top), rng.randint(1, top)))))
    # Few outputs: what only demanded values depend on is derivative-only then.
    pick = [v for v in values if rng.random() < 0.2]
    demanded = tuple(v for v in values if rng.random() < 0.45)
    once = tuple(j for j in range(len(rows)) if rng.random() < 0.15)
    storages = {v: _random_storages(rng, top) for v in values if v not in inputs or v in open_inputs}
    return problem(
        rows,
        storages=storages,
        inputs=inputs,
        open_inputs=open_inputs,
        outputs=tuple(pick),
        demanded=demanded,
        once=once,
    )


def _random_storages(rng: random.Random, top: int) -> tuple[Storage, ...]:
    rows = [Storage("keep", rng.randint(0, top), 0)]
    if rng.random() < 0.4:
        rows.append(Storage("pack", rng.randint(0, top), rng.randint(0, top)))
    if rng.random() < 0.15:
        rows.append(Storage("offload", 0, rng.randint(0, top)))
    return () if rng.random() < 0.08 else tuple(rows)


@st.composite
def problems(draw: st.DrawFn, *, ops: int = 7, top: int = 12) -> Problem:
    """A strategy for `random_problem`."""
    return random_problem(draw(st.randoms(use_true_random=False)), ops=ops, top=top)


def _subsets(items: list[int]) -> Iterator[frozenset[int]]:
    for mask in range(1 << len(items)):
        yield frozenset(x for i, x in enumerate(items) if mask >> i & 1)


def _ancestors(p: Problem, values: Iterable[int]) -> frozenset[int]:
    found: set[int] = set()
    stack = [p.graph.values[v].producer for v in values]
    while stack:
        j = stack.pop()
        if j is not None and j not in found:
            found.add(j)
            stack += [p.graph.values[v].producer for v in p.graph.ops[j].inputs]
    return frozenset(found)


def schedules(p: Problem) -> Iterator[tuple[frozenset[int], frozenset[int], frozenset[int]]]:
    """All (forward, backward, values that must be kept) that the definition allows."""
    graph, every = p.graph, range(len(p.graph.ops))
    primal = _ancestors(p, graph.outputs)
    forwards = [
        f
        for f in (primal | extra for extra in _subsets([j for j in every if j not in primal]))
        if _ancestors(p, [v for j in f for v in graph.ops[j].inputs]) <= f
    ]
    once = {j for j in every if not graph.ops[j].repeatable}
    for backward in _subsets(sorted(_ancestors(p, graph.demanded))):
        needed = {*graph.demanded, *(v for j in backward for v in graph.ops[j].inputs)}
        keep = frozenset(
            v for v in needed if not graph.values[v].free and graph.values[v].producer not in backward
        )
        if any(not p.storages[v] for v in keep):
            continue
        makers = {graph.values[v].producer for v in keep} - {None}
        for forward in forwards:
            if makers <= forward and not (forward & backward & once):
                yield forward, backward, keep


def every_plan(p: Problem) -> set[Pair]:
    """(bytes, cost) of every plan, dominated storages' sums left out."""
    found: set[Pair] = set()
    for forward, backward, keep in schedules(p):
        sums = {(0, sum(p.op_cost[j] for j in forward & backward))}
        for v in keep:
            sums = set(staircase({(b + s.nbytes, c + s.cost) for b, c in sums for s in p.storages[v]}))
        found |= sums
    return found


def cost_of(p: Problem, keep: Mapping[int, int]) -> Pair | None:
    """(bytes, cost) of exactly this keep-set by enumeration; `None` if no schedule allows it."""
    makers = {p.graph.values[v].producer for v in keep} - {None}
    costs = [
        sum(p.op_cost[j] for j in forward & backward)
        for forward, backward, needed in schedules(p)
        if needed <= set(keep) and makers <= forward
    ]
    if not costs:
        return None
    stored = [p.storages[v][s] for v, s in keep.items()]
    return sum(s.nbytes for s in stored), min(costs) + sum(s.cost for s in stored)


def staircase(pairs: Iterable[Pair]) -> list[Pair]:
    """What no other pair dominates, by rising bytes."""
    best: list[Pair] = []
    for b, c in sorted(pairs):
        if not best or c < best[-1][1]:
            best.append((b, c))
    return best


def hull(pairs: Iterable[Pair]) -> list[Pair]:
    """Vertices of the lower left convex hull, by falling bytes."""
    found: list[Pair] = []
    for b, c in staircase(pairs):
        while len(found) > 1 and _turns(found[-2], found[-1], (b, c)):
            found.pop()
        found.append((b, c))
    return found[::-1]


def _turns(a: Pair, b: Pair, c: Pair) -> bool:
    """Whether `b` is on or above the line from `a` to `c`."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def networkx_value(p: Problem, price: Fraction) -> Fraction:
    """Value of the design's network at `price`, built literally and cut by networkx; no presolve."""
    graph, g = p.graph, nx.DiGraph()
    backward, primal = _ancestors(p, graph.demanded), _ancestors(p, graph.outputs)
    scale = price.denominator

    def arc(tail: object, head: object, capacity: int | None = None) -> None:
        g.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))

    def keeping(v: int) -> int | None:
        return min((price.numerator * s.nbytes + scale * s.cost for s in p.storages[v]), default=None)

    g.add_nodes_from(["source", "sink"])
    for j in sorted(backward):
        op = graph.ops[j]
        arc(("f", j), ("r", j), scale * p.op_cost[j] if op.repeatable else None)
        arc(("r", j), ("f", j))
        for v in op.outputs:
            arc(("r", j), ("v", v), keeping(v))
        for v in op.inputs:
            if (producer := graph.values[v].producer) is not None:
                arc(("f", j), ("f", producer))
            if not graph.values[v].free:
                arc(("v", v), ("r", j))
    for v in graph.values:
        if v.producer is None and not v.free:
            arc("source", ("v", v.id), keeping(v.id))
    for j in primal:
        arc("source", ("f", j))
    for v in graph.demanded:
        if not graph.values[v].free:
            arc(("v", v), "sink")
    return Fraction(nx.minimum_cut_value(g, "source", "sink"), scale)
