"""Random executions of a program with recomputation: an oracle for bounds on what must be computed again.

It knows nothing of cuts and turns. Operations run when something needs them, in any order, and results are forgotten at will. Of what
a compiler can fuse, a random choice is computed where it is read and takes no memory, as in a compiled program; none of it takes time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autoremat._compat import hoist_constants, open_jaxpr
from autoremat.cost import Device, graph_costs, is_fusible
from autoremat.graph._trace import aval_size, trace_graph
from autoremat.transform._jaxpr import inline_calls, is_var, live_eqns

PATIENCE = 20
"""An execution that has run its operations so many times forgets no more: else it might take forever."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operation that is not fused, or a result: `inputs` are nodes whose results it reads, directly or after fused operations."""

    inputs: frozenset[int]
    nbytes: int
    cost: int


class Program:
    """A function of arrays, to be executed."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], device: Device) -> None:
        opened, _ = open_jaxpr(jax.make_jaxpr(fun)(*args))
        self.jaxpr, _ = inline_calls(
            hoist_constants(opened), dissolve_checkpoints=True, dissolve_derivatives=True
        )
        self.eqns = live_eqns(self.jaxpr.eqns, self.jaxpr.outvars)
        graph, _ = trace_graph(self.jaxpr.replace(eqns=self.eqns), source_of=lambda eqn: "")
        times = graph_costs(graph, device)
        self.costs = [0 if is_fusible(op.primitive) else t for op, t in zip(graph.ops, times, strict=True)]

    def execute(self, seed: int) -> Execution:
        """A random execution within a random number of bytes, if it can."""
        rng = random.Random(seed)
        names = sorted({e.primitive.name for e in self.eqns})
        # Sums are the values that many readers share: without them stored, hardly anything can be forgotten.
        stored = {n for n in names if rng.random() < 0.3} if rng.random() < 0.5 else {"add", "add_any"}
        nodes, results = self._nodes(stored)
        limit = int(sum(n.nbytes for n in nodes) * rng.random() ** 2)
        return Execution(nodes, results, rng, limit).run()

    def as_written(self) -> tuple[int, int]:
        """Bytes at the peak and picoseconds of running each operation once, in program order, whatever is no longer needed forgotten."""
        peaks = []
        for stored in (set[str](), {"add", "add_any"}):
            nodes, results = self._nodes(stored)
            peaks.append(Execution(nodes, results, random.Random(0), sum(n.nbytes for n in nodes)).run_once())
        return min(peaks), sum(self.costs)

    def _nodes(self, stored: set[str]) -> tuple[list[Node], frozenset[int]]:
        """The nodes, results last, if of the operations that can be fused those of the names `stored` are not."""
        nodes: list[Node] = []
        sources: dict[Any, frozenset[int]] = {}
        for eqn, cost in zip(self.eqns, self.costs, strict=True):
            if eqn.primitive.name == "optimization_barrier":
                sources.update((v, _read([a], sources)) for v, a in zip(eqn.outvars, eqn.invars, strict=True))
                continue
            made = _read(eqn.invars, sources)
            if cost or eqn.primitive.name in stored:
                nodes.append(Node(made, sum(aval_size(v.aval)[2] for v in eqn.outvars), cost))
                made = frozenset([len(nodes) - 1])
            sources.update((v, made) for v in eqn.outvars)
        first = len(nodes)
        for v in {v for v in self.jaxpr.outvars if is_var(v) and sources.get(v)}:
            nodes.append(Node(sources[v], aval_size(v.aval)[2], 0))
        return nodes, frozenset(range(first, len(nodes)))


def _read(atoms: Sequence[Any], sources: dict[Any, frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*(sources.get(v, frozenset()) for v in atoms if is_var(v)))


@dataclass
class Execution:
    """One execution of a program. `peak`: bytes that were alive at most; `cost`: picoseconds of all runs of a node but its first."""

    nodes: list[Node]
    results: frozenset[int]
    rng: random.Random
    limit: int
    alive: set[int] = field(default_factory=set[int])
    runs: dict[int, int] = field(default_factory=dict[int, int])
    total: int = 0
    peak: int = 0
    cost: int = 0

    def __post_init__(self) -> None:
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in node.inputs:
                self.readers[j].append(i)
        self.far_first, self.random_share = self.rng.random() < 0.5, self.rng.random() ** 3

    def run(self) -> Execution:
        """Run every node, in program order or as early as its inputs allow, and have all results in the end."""
        order = list(range(len(self.nodes)))
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        for i in order:
            if i not in self.runs:
                self._run(i, frozenset())
        for i in self.results:
            if i not in self.alive:
                self._run(i, self.results)
        return self

    def run_once(self) -> int:
        """Run every node in program order; returns the peak."""
        for i in range(len(self.nodes)):
            self._run(i, frozenset())
        return self.peak

    def _run(self, i: int, pinned: frozenset[int]) -> None:
        node = self.nodes[i]
        held = pinned | node.inputs
        while missing := [
            j for j in node.inputs if j not in self.alive
        ]:  # what one needs may push out another
            self._run(missing[0], held)
        self.alive.add(i)
        self.total += node.nbytes
        self.peak = max(self.peak, self.total)
        self.runs[i] = self.runs.get(i, 0) + 1
        self.cost += node.cost * (self.runs[i] > 1)
        if sum(self.runs.values()) > PATIENCE * len(self.nodes):
            self.limit = sum(n.nbytes for n in self.nodes)
        self._forget(held | {i})

    def _forget(self, pinned: frozenset[int]) -> None:
        for j in [j for j in self.alive if j not in pinned and j not in self.results]:
            if all(k in self.runs for k in self.readers[j]):
                self._drop(j)
        while self.total > self.limit and (free := sorted(self.alive - pinned)):
            self._drop(
                self.rng.choice(free)
                if self.rng.random() < self.random_share
                else max(free, key=self._worth_dropping)
            )

    def _worth_dropping(self, j: int) -> float:
        """How far its next use is, or the bytes for a picosecond."""
        node = self.nodes[j]
        next_use = min((k for k in self.readers[j] if k not in self.runs), default=0)
        return next_use if self.far_first else node.nbytes / (1 + node.cost)

    def _drop(self, j: int) -> None:
        self.alive.remove(j)
        self.total -= self.nodes[j].nbytes
