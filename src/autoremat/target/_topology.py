"""Devices that are not there: JAX calls them topologies, and compiles for them."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
from jax.experimental import topologies

from autoremat._errors import TargetError
from autoremat.target._gpu import target_config
from autoremat.target._installed import compiler_of
from autoremat.target._names import Name, parse
from autoremat.target._start import has_accelerator

_TPU_ENVIRONMENT = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
"""What libtpu asks the machine about when it is loaded: any machine there is will do, since none is used."""


@functools.cache
def devices(name: str) -> tuple[Any, ...]:
    """The devices of a target that is elsewhere, in the order in which JAX lists them.

    Raises `TargetError` if the compiler is missing, or has no devices of this shape.
    """
    found = parse(name)
    compiler = compiler_of(found.family)
    if compiler is None:
        return tuple(jax.devices("cpu")[:1])
    compiler.check(name)
    try:
        made = _tpus(found) if found.family == "tpu" else _gpus(found)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].strip()
        raise TargetError(
            f"target {name!r}: its compiler knows no such devices ({reason}). Needed is a shape that is built, such as 2x2 or 4x4 for v5e and "
            f'v6e, 2x2x1 or 4x4x4 for v5p. Cheapest fix: "{found.device.name}" for one device.'
        ) from error
    return tuple(made)


def _tpus(name: Name) -> Any:
    model = name.device.name.partition(":")[2]
    for key, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not has_accelerator():
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a lock that is for those who run on a TPU
    # One chip is a part of a host's: not every version of libtpu knows hosts with one.
    shape = name.shape if name.count > 1 else HOST[model]
    title = f"{model}:{'x'.join(map(str, shape))}"
    found = topologies.get_topology_desc(topology_name=title, platform="tpu").devices
    return found if name.count > 1 else found[:1]


HOST = {"v5e": (2, 2), "v5p": (2, 2, 1), "v6e": (2, 2)}
"""The chips of one host, by model."""


def _gpus(name: Name) -> Any:
    return topologies.get_topology_desc(
        topology_name=name.device.name.partition(":")[2],
        platform="cuda",
        target_config=target_config(name.device),
        topology=f"1x1x{name.count}",
    ).devices
