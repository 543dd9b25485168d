"""Trace and lower a function for the devices of a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autoremat._errors import TargetError
from autoremat.graph._trace import aval_size
from autoremat.target import Target


def abstract(x: Any) -> Any:
    """The shape of an array argument; anything else stays as it is."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    aval = jax.typeof(x)
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and len(x.devices()) > 1 else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def lower(fun: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Any:
    """`jit(fun)`, or `fun` if it can be lowered already, lowered for the shapes of `args` on a target, of which nothing need be there.

    Shardings over a mesh of other devices, or an abstract one, are moved to the devices of the target. Raises `TargetError` if it has
    not as many.
    """
    shapes = jax.tree.map(abstract, args)
    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    if target.attached:
        return jitted.lower(*shapes)
    placed = place(shapes, target)
    return jitted.trace(*placed).lower(lowering_platforms=(target.platform,))


def place(shapes: Any, target: Target) -> Any:
    """The same shapes on the devices of a target; on its first one if nothing is sharded."""
    leaves = jax.tree.leaves(shapes)
    sharded = any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves)
    here = None if sharded else SingleDeviceSharding(target.devices[0])

    def put(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        sharding = here if x.sharding is None else moved(x.sharding, target)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=sharding)

    return jax.tree.map(put, shapes)


def moved(sharding: Any, target: Target) -> Any:
    """A sharding over the devices of a target, its mesh and specification kept."""
    if not isinstance(sharding, NamedSharding):
        return SingleDeviceSharding(target.devices[0])
    mesh, devices = sharding.mesh, target.devices
    if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(devices):
        return sharding
    sizes = tuple(mesh.shape.values())
    if math.prod(sizes) != len(devices):
        raise TargetError(
            f"the arguments are sharded over {math.prod(sizes)} devices, and target {target.name!r} has {len(devices)}. Cheapest fix: a "
            'target of that many, such as "tpu:v5e:2x4" or "gpu:h100:8" for 8.'
        )
    new = Mesh(np.array(devices).reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(new, sharding.spec, memory_kind=sharding.memory_kind)


def nbytes(tree: Any) -> int:
    """Bytes on one device of the arrays of a tree of shapes."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def _shard_bytes(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    shape = sharding.shard_shape(tuple(x.shape)) if sharding is not None else x.shape
    return aval_size(jax.ShapeDtypeStruct(shape, x.dtype))[2]
