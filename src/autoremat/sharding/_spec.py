"""How one array is divided: for each of its dimensions the axes of a mesh, as in `jax.sharding.PartitionSpec`.

()            whole on every device
(("x",), ())  two dimensions, the first divided along axis "x"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
Mesh = Mapping[str, int]
"""The sizes of the axes by name."""


def spec_of(sharding: Any, ndim: int) -> Spec:
    """The specification of a `NamedSharding`, or of an array's type; of any other sharding that of a whole array."""
    entries = tuple(getattr(sharding, "spec", None) or ())
    axes = [_axes(entry) for entry in entries[:ndim]]
    return trimmed((*axes, *((),) * (ndim - len(axes))))


def _axes(entry: Any) -> Axes:
    if isinstance(entry, str):
        return (entry,)
    return tuple(a for a in entry if isinstance(a, str)) if isinstance(entry, (tuple, list)) else ()


def mesh_of(sharding: Any) -> dict[str, int]:
    """The axes of the mesh of a sharding, or of an array's type; none of any other."""
    shape = getattr(getattr(sharding, "mesh", None), "shape", None)
    return {str(name): int(size) for name, size in dict(shape or {}).items()}


def trimmed(spec: Spec) -> Spec:
    """`()` for a specification that divides nothing."""
    return spec if any(spec) else ()


def axes_in(spec: Iterable[Axes]) -> frozenset[str]:
    """All axes that a specification names."""
    return frozenset(a for axes in spec for a in axes)


def ways(axes: Iterable[str], mesh: Mesh) -> int:
    """Among how many devices these axes divide."""
    return math.prod(mesh.get(a, 1) for a in axes)


def filled(spec: Spec, more: Spec, shape: Sequence[int], mesh: Mesh) -> Spec:
    """A specification in which dimensions that are whole are divided as in `more`, by axes not used yet."""
    if not more:
        return spec
    result = list(spec or ((),) * len(shape))
    used = set(axes_in(spec))
    for i, axes in enumerate(more):
        new = tuple(a for a in axes if a not in used)
        if not result[i] and new and shape[i] >= ways(new, mesh) > 1:
            result[i] = new
            used.update(new)
    return trimmed(tuple(result))


def shard_size(shape: Sequence[int], spec: Spec, mesh: Mesh) -> int:
    """The elements of the largest shard."""
    if not spec:
        return math.prod(shape)
    return math.prod(-(-n // ways(axes, mesh)) for n, axes in zip(shape, spec, strict=True))
