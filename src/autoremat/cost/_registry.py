"""Which rule belongs to which primitive, and what happens when there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoremat._errors import UnknownPrimitiveWarning
from autoremat.cost._model import Cost, CostRule, elements, nbytes, total
from autoremat.graph import Graph, Op, Value

Rule = TypeVar("Rule", bound=CostRule)


@dataclass(frozen=True, slots=True)
class _Entry:
    rule: CostRule
    fusible: bool


_ENTRIES: dict[str, _Entry] = {}
_WARNED: set[str] = set()

_UNKNOWN = """\
No cost rule for the primitive '{name}': ({inputs}) -> ({outputs}){source}.
A conservative default is used: one FLOP per output element{inner}, every operand and result moved through
memory, not fused. If that is wrong, register a rule before planning:

    @autoremat.register_cost("{name}")
    def cost(op, inputs, outputs):
        return autoremat.Cost(vector_flops=..., bytes_moved=...)
"""


def register_cost(*names: str, fusible: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated function as the cost rule of the primitives `names`; it replaces an older one.

    **Arguments:** `fusible` says that the compiler fuses the operation into its neighbours, so that it costs
    arithmetic but no memory traffic.

    **Returns:** a decorator that returns the rule unchanged. The rule is called as `rule(op, inputs,
    outputs)` and returns a `Cost`; see `CostRule`.
    """
    if not names or any(callable(n) for n in names):  # used as a bare decorator
        raise TypeError(f"register_cost takes names of primitives, such as 'my_kernel'; got {names!r}")

    def register(rule: Rule) -> Rule:
        for name in names:
            _ENTRIES[name] = _Entry(rule, fusible)
            _WARNED.discard(name)
        return rule

    return register


def registered_primitives() -> frozenset[str]:
    """Return the names of all primitives that have a rule."""
    return frozenset(_ENTRIES)


def cost_rule(primitive: str) -> CostRule | None:
    """Return the rule of `primitive`, or `None`."""
    entry = _ENTRIES.get(primitive)
    return entry.rule if entry else None


def is_fusible(primitive: str) -> bool:
    """Say whether the compiler fuses `primitive` into its neighbours: arithmetic, but no memory traffic."""
    entry = _ENTRIES.get(primitive)
    return entry.fusible if entry else False


def op_cost(graph: Graph, op: Op) -> Cost:
    """Return the cost of one execution of `op`, an op of `graph`, inner graphs times their trips included."""
    inputs = [graph.values[i] for i in op.inputs]
    outputs = [graph.values[i] for i in op.outputs]
    rule = cost_rule(op.primitive) or unknown_cost
    return rule(op, inputs, outputs)


def graph_cost(graph: Graph) -> Cost:
    """Return the cost of executing every op of `graph` once."""
    return total(op_cost(graph, op) for op in graph.ops)


def inner_cost(op: Op) -> Cost:
    """Return the cost of all inner graphs of `op`, times its trips."""
    return total(graph_cost(g) for g in op.inner) * op.trips


def unknown_cost(op: Op, inputs: Sequence[Value], outputs: Sequence[Value]) -> Cost:
    """Return the conservative default, and warn once per primitive."""
    if op.primitive not in _WARNED:
        _WARNED.add(op.primitive)
        warnings.warn(_unknown_text(op, inputs, outputs), UnknownPrimitiveWarning, stacklevel=2)
    own = Cost(vector_flops=elements(outputs), bytes_moved=nbytes(inputs) + nbytes(outputs))
    return own + inner_cost(op)


def _unknown_text(op: Op, inputs: Sequence[Value], outputs: Sequence[Value]) -> str:
    return _UNKNOWN.format(
        name=op.primitive,
        inputs=", ".join(map(_typed, inputs)),
        outputs=", ".join(map(_typed, outputs)),
        source=f" at {op.source}" if op.source else "",
        inner=" and what its inner programs cost" if op.inner else "",
    )


def _typed(value: Value) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
