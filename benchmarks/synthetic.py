"""Synthetic problems that look like the joint graph of a transformer: layers of about 30 equations.

No JAX: these are for measuring solvers at sizes that would take long to trace.
"""

from __future__ import annotations

import random

from autoremat.graph import Graph, Op, Value, check
from autoremat.solve import Problem, Storage

# One layer: name, inputs (names; "x" is the residual stream), relative bytes, relative time, and whether the
# backward pass demands it. `drsqrt`, `dtanh` and `dgelu` are derivative-only.
_LAYER: tuple[tuple[str, tuple[str, ...], int, int, bool], ...] = (
    ("mean", ("x",), 1, 4, False),
    ("centre", ("x", "mean"), 256, 4, True),
    ("variance", ("centre",), 1, 4, False),
    ("rsqrt", ("variance",), 1, 1, True),
    ("drsqrt", ("rsqrt", "variance"), 1, 1, True),
    ("normal", ("centre", "rsqrt"), 256, 4, True),
    ("affine", ("normal",), 256, 4, True),
    ("qkv", ("affine",), 768, 600, False),
    ("q", ("qkv",), 256, 2, True),
    ("k", ("qkv",), 256, 2, True),
    ("v", ("qkv",), 256, 2, True),
    ("scores", ("q", "k"), 2048, 300, False),
    ("max", ("scores",), 8, 16, False),
    ("shift", ("scores", "max"), 2048, 16, False),
    ("exp", ("shift",), 2048, 16, True),
    ("sum", ("exp",), 8, 16, True),
    ("softmax", ("exp", "sum"), 2048, 16, True),
    ("mix", ("softmax", "v"), 256, 300, True),
    ("project", ("mix",), 256, 200, False),
    ("y", ("x", "project"), 256, 4, False),
    ("mean2", ("y",), 1, 4, False),
    ("centre2", ("y", "mean2"), 256, 4, True),
    ("variance2", ("centre2",), 1, 4, False),
    ("rsqrt2", ("variance2",), 1, 1, True),
    ("normal2", ("centre2", "rsqrt2"), 256, 4, True),
    ("up", ("normal2",), 1024, 800, False),
    ("cube", ("up",), 1024, 12, False),
    ("tanh", ("cube",), 1024, 12, False),
    ("dtanh", ("tanh",), 1024, 8, True),
    ("gelu", ("up", "tanh"), 1024, 12, True),
    ("dgelu", ("up", "tanh", "dtanh"), 1024, 12, True),
    ("down", ("gelu",), 256, 800, False),
    ("x", ("y", "down"), 256, 4, False),
)


def layered(
    ops: int, *, seed: int = 0, jitter: float = 0.5, unit_bytes: int = 4096, thin: int = 1
) -> Problem:
    """A transformer-like problem with about `ops` ops.

    `jitter` spreads bytes and times of each layer at random (0: identical layers, few breakpoints).
    `thin` leaves only every so manieth demanded value, counted from the last: the flow gets deep. Bytes
    are multiples of `unit_bytes`, times are nanoseconds.
    """
    rng = random.Random(seed)
    values = [Value(id=0, shape=(), dtype="f32", nbytes=256 * unit_bytes, free=True)]
    made: list[Op] = []
    cost: list[int] = []
    demanded: list[int] = []
    x = 0
    for _ in range(max(1, round(ops / len(_LAYER)))):
        names = {"x": x}
        spread = 1 + jitter * rng.random()
        for name, inputs, size, time, wanted in _LAYER:
            v, j = len(values), len(made)
            nbytes = unit_bytes * max(1, round(size * spread))
            values.append(Value(id=v, shape=(), dtype="f32", nbytes=nbytes, producer=j, name=name))
            made.append(Op(id=j, primitive=name, inputs=tuple(names[i] for i in inputs), outputs=(v,)))
            cost.append(max(1, round(1000 * time * spread * (1 + jitter * rng.random()))))
            if wanted:
                demanded.append(v)
            names[name] = v
        x = names["x"]
    graph = Graph(
        values=tuple(values),
        ops=tuple(made),
        inputs=(0,),
        outputs=(x,),
        demanded=tuple(demanded[::-1][::thin]),
    )
    storages = tuple((Storage("keep", v.nbytes),) if not v.free else () for v in values)
    return Problem(graph=check(graph), op_cost=tuple(cost), storages=storages)
