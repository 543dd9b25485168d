"""The checker of the graph's invariants, run by tests and after every tracing."""

from __future__ import annotations

from autoremat.graph._ir import Graph


def check(graph: Graph) -> Graph:
    """Return `graph` if it is well formed; raise `ValueError` that names the first fault otherwise."""
    for i, value in enumerate(graph.values):
        if value.id != i:
            raise ValueError(f"value at position {i} has id {value.id}; ids must be dense")
    seen = set(graph.inputs)
    for j, op in enumerate(graph.ops):
        if op.id != j:
            raise ValueError(f"op at position {j} has id {op.id}; ids must be dense")
        for v in op.inputs:
            if v not in seen:
                raise ValueError(f"op {j} ({op.primitive}) reads value {v} before it is made")
        for v in op.outputs:
            if v in seen:
                raise ValueError(f"op {j} ({op.primitive}) makes value {v} a second time")
            if graph.values[v].producer != j:
                raise ValueError(f"value {v} names producer {graph.values[v].producer}, but op {j} makes it")
            seen.add(v)
        for inner in op.inner:
            check(inner)
    for role, ids in (("output", graph.outputs), ("demanded value", graph.demanded)):
        for v in ids:
            if v not in seen:
                raise ValueError(f"{role} {v} is never made")
    return graph
