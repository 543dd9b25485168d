"""Minimum s-t cuts with integer capacities of any size.

**Problem.** A directed graph whose topology is fixed and whose capacities change from call to call. Wanted:
the value of a minimum cut, exactly, and its *least* source side: what can be reached from the source in the
residual graph of a maximum flow. That set is the same for every maximum flow, so results depend neither on
the library nor on its version.

**Libraries.** OR-Tools `SimpleMaxFlow` (push-relabel, Goldberg and Tarjan, J. ACM 35, 1988; int64;
Apache-2.0) where it is installed, else SciPy `maximum_flow` (Dinic 1970; int32; BSD), which JAX needs anyway.
Both give the same cuts; `docs/maxflow.md` has the measurements, igraph, HiGHS and networkx included.

**Capacities above the library's integers.** A price with numerator and denominator near 2^40 gives capacities
near 2^80. They are not rounded: the flow is found from the high bits down (Gabow, Scaling algorithms for
network problems, J. Comput. Syst. Sci. 31, 1985). Each round solves the residual graph at one scale, then
the scale gets finer by some bits. What is missing from a maximum flow at the new scale crosses the old
minimum cut, and is at most the new bits of the arcs there. Hence two rules that keep all numbers small:

- capacities are clipped just above what is missing: a cut that crosses a clipped arc is no minimum cut;
- an arc with more than twice the number of arcs left after a round crosses no minimum cut of any later
  round (all that will be missing is less), and is infinite from then on.

OR-Tools covers 61 bits in one round and some 30 more with each further one, SciPy 30 and 13.

**Complexity.** A round is O(n² √m) (OR-Tools) or O(n² m) (SciPy) in the worst case, near linear on layered
graphs (measured); SciPy becomes quadratic on deep graphs with few demanded values at high prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Neither library has usable type stubs: both are `Any` here, and everything above this file is typed.
_sparse: Any = import_module("scipy.sparse")
_csgraph: Any = import_module("scipy.sparse.csgraph")
try:
    _ortools: Any = import_module("ortools.graph.python.max_flow")
except ImportError:
    _ortools = None

SOURCE = 0
SINK = 1

_Ints = NDArray[np.int64]
_Marks = NDArray[np.bool_]
_Numbers = NDArray[Any]  # int64, or Python integers in an object array
# (nodes, tails, heads, capacities) -> (flow on each arc, marks of the least source side)
_Run = Callable[[int, _Ints, _Ints, _Ints], tuple[_Ints, _Marks]]


@dataclass(frozen=True, slots=True)
class Library:
    """A maximum-flow code: `bits` that a total flow may have, and whether it adds up a node's capacities."""

    name: str
    run: _Run
    bits: int
    sums: bool


def libraries() -> tuple[Library, ...]:
    """The installed libraries, the preferred one first."""
    scipy = Library("scipy", _run_scipy, bits=30, sums=False)
    if _ortools is None:
        return (scipy,)
    return Library("ortools", _run_ortools, bits=61, sums=True), scipy


class MinCut:
    """A fixed topology, to be cut under many capacities. Node 0 is the source, node 1 the sink.

    **Arguments:**

    - `nodes`: number of nodes, terminals included.
    - `tails`, `heads`: the arcs, in any order, parallel and opposite ones allowed.
    - `infinite`: which arcs may never be cut. None may leave the source or enter the sink (merge the
        node with the terminal instead), or there would be no finite cut to start from.
    - `library`: one of `libraries()`; the first of them if left out.
    """

    def __init__(
        self, nodes: int, tails: _Ints, heads: _Ints, *, infinite: _Marks, library: Library | None = None
    ) -> None:
        assert not np.any(infinite & ((tails == SOURCE) | (heads == SINK)))
        self.nodes = nodes
        self.library = library or libraries()[0]
        # Parallel arcs become one, and each has its opposite: arc i's opposite is `self._opposite[i]`.
        keys = np.concatenate([tails * nodes + heads, heads * nodes + tails])
        merged, place = np.unique(keys, return_inverse=True)
        self._tails, self._heads = merged // nodes, merged % nodes
        self._opposite = np.searchsorted(merged, self._heads * nodes + self._tails)
        self._order = np.argsort(place[: len(tails)], kind="stable")
        self._place, self._starts = np.unique(place[: len(tails)][self._order], return_index=True)
        self._infinite = np.zeros(len(merged), dtype=bool)
        self._infinite[place[: len(tails)][infinite]] = True
        self._fan_out = int(np.count_nonzero(self._tails == SOURCE))

    def solve(self, capacities: _Numbers) -> tuple[int, _Marks]:
        """Return the value of a minimum cut and the marks of its least source side.

        `capacities` are non-negative, int64 (all of them together below 2^62) or Python integers in an
        object array; those of infinite arcs are ignored.
        """
        side = np.zeros(self.nodes, dtype=bool)
        side[SOURCE] = True
        if len(self._tails) == 0:
            return 0, side
        whole = self._merge(capacities)
        total = self._crossing(whole, side)
        shift = max(0, total.bit_length() - self.library.bits)
        rest, infinite = self._first(whole, side, shift)
        while True:
            side = self._round(rest, infinite, side)
            if shift == 0:
                return self._crossing(whole, side), side
            infinite |= rest > 2 * len(rest)
            rest[infinite] = 0
            step = min(shift, self._step(side))
            shift -= step
            bits = (whole >> shift) & ((1 << step) - 1)
            rest = (rest << step) + bits.astype(np.int64)

    def _merge(self, capacities: _Numbers) -> _Numbers:
        merged = np.zeros(len(self._tails), dtype=capacities.dtype)
        if len(self._starts):
            merged[self._place] = np.add.reduceat(capacities[self._order], self._starts)
        merged[self._infinite] = 0
        return merged

    def _first(self, whole: _Numbers, side: _Marks, shift: int) -> tuple[_Ints, _Marks]:
        """Capacities at the first scale. Those above the trivial cut round the source are infinite."""
        scaled = whole >> shift
        limit = self._crossing(scaled, side) + len(scaled)
        infinite = self._infinite | (scaled > limit).astype(bool)
        return np.where(infinite, 0, scaled).astype(np.int64), infinite

    def _round(self, rest: _Ints, infinite: _Marks, side: _Marks) -> _Marks:
        """Make the flow maximal at this scale: update the residual capacities `rest`, return the new side."""
        missing = self._crossing(rest, side)
        clipped = np.where(infinite, missing + 1, np.minimum(rest, missing + 1))
        arcs = np.flatnonzero(clipped)
        flow = np.zeros(len(rest), dtype=np.int64)
        flow[arcs], side = self.library.run(self.nodes, self._tails[arcs], self._heads[arcs], clipped[arcs])
        rest += flow[self._opposite] - flow
        return side

    def _crossing(self, amounts: _Numbers, side: _Marks) -> int:
        return int(amounts[side[self._tails] & ~side[self._heads]].sum())

    def _step(self, side: _Marks) -> int:
        """Bits to take next: what they can add across the cut must fit, and all arcs of the source too."""
        crossing = int(np.count_nonzero(side[self._tails] & ~side[self._heads]))
        spare = self._fan_out.bit_length() if self.library.sums else 0
        return max(1, self.library.bits - 1 - crossing.bit_length() - spare)


def _run_ortools(nodes: int, tails: _Ints, heads: _Ints, capacities: _Ints) -> tuple[_Ints, _Marks]:
    side = np.zeros(nodes, dtype=bool)
    side[SOURCE] = True
    solver = _ortools.SimpleMaxFlow()
    arcs = solver.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), capacities)
    status = solver.solve(SOURCE, SINK)
    if status != solver.OPTIMAL:
        raise RuntimeError(f"OR-Tools SimpleMaxFlow ended with {status} on {len(tails)} arcs")
    # A terminal that no arc touches is unknown to the library: there is no flow then, and no list either.
    side[solver.get_source_side_min_cut()] = True
    return solver.flows(arcs), side


def _run_scipy(nodes: int, tails: _Ints, heads: _Ints, capacities: _Ints) -> tuple[_Ints, _Marks]:
    side = np.zeros(nodes, dtype=bool)
    side[SOURCE] = True
    if len(tails) == 0:
        return np.zeros(0, dtype=np.int64), side
    # `tails` come sorted, and `heads` within a tail: the arrays are the CSR form already.
    starts = np.searchsorted(tails, np.arange(nodes + 1)).astype(np.int32)
    graph = _sparse.csr_array(
        (capacities.astype(np.int32), heads.astype(np.int32), starts), shape=(nodes, nodes)
    )
    result = _csgraph.maximum_flow(graph, SOURCE, SINK)
    # The library's flow is antisymmetric: an arc's negative flow is its opposite's, and room on the arc.
    flow = np.maximum(np.asarray(result.flow[tails, heads]).ravel(), 0).astype(np.int64)
    room = graph - result.flow
    room.data = (room.data > 0).astype(np.int8)
    room.eliminate_zeros()
    side[_csgraph.breadth_first_order(room, SOURCE, return_predecessors=False)] = True
    return flow, side
