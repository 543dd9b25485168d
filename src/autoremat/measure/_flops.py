"""FLOPs of a program, counted one way for every program: loops times their trip counts.

The compiler's own analysis counts the body of a loop once, and is absent on GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autoremat._compat import dce, open_jaxpr
from autoremat.cost import graph_flops
from autoremat.graph._trace import trace_graph


def jaxpr_flops(fun: Callable[..., Any] | Any, *args: Any) -> int:
    """Return the FLOPs of one execution of the program that `fun` emits for `args`.

    **Arguments:** `fun` is a function, traced for the shapes of `args` (arrays or `jax.ShapeDtypeStruct`s), or a `Jaxpr` or
    `ClosedJaxpr`, and then there are no `args`. Dead code is removed first: equations whose results nothing reads do not count.

    Loops count all their trips, a `while` one (its number of trips is unknown), a `cond` its costliest branch, a `shard_map`
    one shard.
    """
    traced = jax.make_jaxpr(fun)(*args) if callable(fun) else fun
    jaxpr, _ = open_jaxpr(traced)
    live, _ = dce(jaxpr, [True] * len(jaxpr.outvars))
    graph, _ = trace_graph(live, source_of=lambda eqn: "")
    return graph_flops(graph)
