"""A name for the structure of a graph: equal structure, equal name, on every machine and in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from autoremat.graph._ir import Graph


def fingerprint(graph: Graph) -> str:
    """Return 16 hexadecimal digits that depend on ops, shapes, dtypes, wiring and roles, not on sources or names of values."""
    digest = hashlib.sha256()
    for line in _lines(graph):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def _lines(graph: Graph) -> Iterable[str]:
    yield f"inputs {_typed(graph, graph.inputs)}"
    for op in graph.ops:
        params = sorted((k, str(v)) for k, v in op.params.items())
        yield f"{op.primitive} {op.inputs} -> {_typed(graph, op.outputs)} {params} {op.trips} {op.repeatable}"
        for inner in op.inner:
            yield "{"
            yield from _lines(inner)
            yield "}"
    yield f"outputs {graph.outputs} demanded {graph.demanded}"


def _typed(graph: Graph, ids: Iterable[int]) -> str:
    return " ".join(f"{i}:{graph.values[i].dtype}{list(graph.values[i].shape)}" for i in ids)
