"""Times and FLOPs of a whole graph."""

from __future__ import annotations

from collections.abc import Sequence

from autoremat.cost import _rules
from autoremat.cost._devices import Device, picoseconds
from autoremat.cost._registry import cost_rule, graph_cost, is_fusible, op_cost
from autoremat.graph import Graph, Op, Value


def graph_flops(graph: Graph) -> int:
    """Return the FLOPs of executing `graph` once, loops times their trip counts."""
    return graph_cost(graph).flops


def graph_costs(graph: Graph, device: Device) -> tuple[int, ...]:
    """Return the picoseconds that one execution of each op of `graph` takes on `device`.

    An op that runs inner graphs takes the time of their ops, each fused or not by itself, times its trips;
    a `cond` that of its slowest branch. Every op with output elements takes at least one picosecond.
    """
    return tuple(op_picoseconds(graph, op, device) for op in graph.ops)


def op_picoseconds(graph: Graph, op: Op, device: Device) -> int:
    """Return the picoseconds that one execution of `op`, an op of `graph`, takes on `device`."""
    least = int(any(graph.values[v].size for v in op.outputs))
    rule = cost_rule(op.primitive)
    if op.inner and rule in (_rules.call_cost, _rules.branch_cost):
        times = [sum(graph_costs(g, device)) for g in op.inner]
        once = max(times) if rule is _rules.branch_cost else sum(times)
        return max(once * op.trips, least)
    dtype = product_dtype([graph.values[v] for v in op.inputs])
    return picoseconds(op_cost(graph, op), device, dtype, fusible=is_fusible(op.primitive), least=least)


def product_dtype(inputs: Sequence[Value]) -> str:
    """Return the dtype in which a product of `inputs` is computed: the widest of the first two."""
    operands = [v for v in inputs[:2] if v.size]
    return max(operands, key=lambda v: v.nbytes / v.size).dtype if operands else "float32"
