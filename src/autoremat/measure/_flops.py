"""FLOPs of a jaxpr, counted one way for every program: loops times their trip counts.

The compiler's own analysis counts the body of a loop once, and is absent on GPU.
"""

from __future__ import annotations

from typing import Any

from autoremat.cost import graph_flops
from autoremat.graph._trace import trace_graph


def jaxpr_flops(jaxpr: Any) -> int:
    """Return the FLOPs of one execution of `jaxpr`, a `Jaxpr` or `ClosedJaxpr`.

    Loops count all their trips, a `while` one (its number of trips is unknown), a `cond` its costliest
    branch, a `shard_map` one shard. Equations whose results nothing reads are counted too: remove dead code
    first.
    """
    graph, _ = trace_graph(jaxpr, source_of=lambda eqn: "")
    return graph_flops(graph)
