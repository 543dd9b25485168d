"""Times and FLOPs of a whole graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoremat.cost import _rules
from autoremat.cost._devices import Device, picoseconds
from autoremat.cost._model import Cost
from autoremat.cost._registry import cost_rule, graph_cost, is_fusible, op_cost
from autoremat.cost._table import op_key
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
    if device.measured and (found := device.measured.get(op_key(graph, op))) is not None:
        sent = op.sent_bytes / device.interconnect_bytes_per_s
        return max(math.ceil((found / op.devices + sent) * 1e12), least)
    if runs_programs(op):
        times = [sum(graph_costs(g, device)) for g in op.inner]
        once = max(times) if rule is _rules.branch_cost else sum(times)
        return max(once * op.trips, least)
    dtype = product_dtype([graph.values[v] for v in op.inputs])
    return picoseconds(
        _on_one_device(op, op_cost(graph, op)), device, dtype, fusible=is_fusible(op.primitive), least=least
    )


def runs_programs(op: Op) -> bool:
    """Say whether the time of `op` is that of the programs which it runs: a call, a loop, a branch."""
    return bool(op.inner) and cost_rule(op.primitive) in (_rules.call_cost, _rules.branch_cost)


def _on_one_device(op: Op, cost: Cost) -> Cost:
    """A device's share of the arithmetic, and what it sends. Bytes are those of one device already; it receives as many as it sends,
    which are written and read."""
    return replace(
        cost,
        matrix_flops=-(-cost.matrix_flops // op.devices),
        vector_flops=-(-cost.vector_flops // op.devices),
        bytes_moved=cost.bytes_moved + 2 * op.sent_bytes,
        collective_bytes=cost.collective_bytes + op.sent_bytes,
    )


def product_dtype(inputs: Sequence[Value]) -> str:
    """Return the dtype in which a product of `inputs` is computed: the widest of the first two."""
    operands = [v for v in inputs[:2] if v.size]
    return max(operands, key=lambda v: v.nbytes / v.size).dtype if operands else "float32"
