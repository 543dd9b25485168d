"""Values, operations and the joint graph of a differentiated function.

    Graph  = inputs, ops in program order, outputs, demanded
    Op     = primitive, inputs -> outputs          (one equation of a jaxpr)
    Value  = shape, dtype, bytes                   (one variable of a jaxpr)

The ops are the *forward* equations: those that depend on no tangent or cotangent. The backward pass
appears only through `Graph.demanded`, the values that it reads. Ids are dense integers: value `i` is
`graph.values[i]`, op `j` is `graph.ops[j]`, and ops are in a topological order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array of the program.

    `nbytes` is the size in bytes of the array kept as it is, on one device. `producer` is the id of
    the op that makes it, or `None` for an input of the graph. `free` marks an input that is alive
    until the end of the backward pass whatever is decided (an argument of the outermost call): to
    keep it costs nothing.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    producer: int | None = None
    free: bool = False
    name: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One equation: `outputs = primitive(inputs)`.

    `params` holds plain Python data only. `inner` are the graphs of sub-programs (the body of a
    `scan`, the branches of a `cond`), each executed `trips` times by one execution of the op (for a
    `cond` one branch of them is). `repeatable` is false for what may not run a second time: effects that
    JAX refuses to repeat, random bits that depend on the partitioning. Its work is divided evenly among `devices`; for that each of them
    sends `sent_bytes` to others.
    """

    id: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    inner: tuple[Graph, ...] = ()
    trips: int = 1
    repeatable: bool = True
    source: str = ""
    devices: int = 1
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A program: `inputs` and `outputs` are value ids, `demanded` the values that the backward pass reads."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    demanded: tuple[int, ...] = ()
