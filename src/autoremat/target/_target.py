"""`Target`: a device to compile for, and `resolve`, which finds it by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autoremat._errors import TargetError
from autoremat.cost import DEVICES, Device, device_for_backend
from autoremat.target._installed import compiler_of
from autoremat.target._names import parse
from autoremat.target._start import start_without_accelerators
from autoremat.target._topology import devices

_KINDS = (
    (r"TPU v5 lite|TPU v5e", "tpu:v5e"),
    (r"TPU v5p?$", "tpu:v5p"),
    (r"TPU v6 lite|TPU v6e", "tpu:v6e"),
    (r"A100.*80GB", "gpu:a100-80gb"),
    (r"A100", "gpu:a100-40gb"),
    (r"H200", "gpu:h200"),
    (r"H100", "gpu:h100"),
)
"""What JAX calls devices (`device_kind`), and their names in the table."""

_BACKENDS = frozenset({"cpu", "gpu", "tpu", "cuda", "rocm"})


@dataclass(frozen=True, slots=True)
class Target:
    """A device, or several alike, that programs are compiled for.

    - `name`: as in `autoremat.plan(target=...)`; of this machine's backend the name of its device, if the table has it.
    - `platform`: what JAX lowers for: `"cpu"`, `"tpu"`, `"cuda"`.
    - `device`: its memory and rates.
    - `attached`: whether it is this machine's backend. Otherwise nothing can run, and programs are only compiled.
    - `compiler`: which compiler, and its version: compiled memory depends on it.
    """

    name: str
    platform: str
    device: Device
    attached: bool
    compiler: str

    @property
    def devices(self) -> tuple[Any, ...]:
        """JAX's devices, in the order in which it lists them."""
        return tuple(jax.devices()) if self.attached else devices(self.name)

    def mesh(self, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
        """A mesh of the target's devices, for the shardings of example arguments.

        Raises `TargetError` if there are not so many devices.
        """
        need, have = int(np.prod(shape)), len(self.devices)
        if need != have:
            raise TargetError(
                f"a mesh of {'x'.join(map(str, shape))} needs {need} devices, and target {self.name!r} has {have}. Cheapest fix: a target "
                "of that many, or another mesh."
            )
        return Mesh(np.array(self.devices).reshape(tuple(shape)), tuple(axis_names))


def resolve(name: str | Target | None) -> Target:
    """The target called `name`; left out, this machine's backend.

    Raises `TargetError` for a name that is unknown, a compiler that is missing, or a topology that does not exist.
    """
    if isinstance(name, Target):
        return name
    start_without_accelerators()
    here = attached()
    text = here.name if name is None else name.strip().lower()
    if text in (here.name, jax.default_backend(), here.platform):
        return here
    if text in _BACKENDS and text != "cpu":
        models = ", ".join(d for d in sorted(DEVICES) if d.startswith("tpu" if text == "tpu" else "gpu"))
        raise TargetError(
            f"target {name!r} is not there: this machine's backend is {jax.default_backend()!r}. A device that is elsewhere has a model. "
            f"Cheapest fix: one of {models}."
        )
    found = parse(text)
    devices(str(found))
    compiler = compiler_of(found.family)
    return Target(
        name=str(found),
        platform="cuda" if found.family == "gpu" else found.family,
        device=found.device,
        attached=False,
        compiler=compiler.installed if compiler else "",
    )


def attached() -> Target:
    """This machine's backend. A device that the table does not have has the rates of a typical one of its kind."""
    first = jax.devices()[0]
    backend = jax.default_backend()
    known = next((d for pattern, d in _KINDS if re.search(pattern, first.device_kind)), None)
    return Target(
        name=known or backend,
        platform="cuda" if backend == "gpu" else backend,
        device=DEVICES[known] if known else device_for_backend(backend),
        attached=True,
        compiler=f"jaxlib {version('jaxlib')}",
    )
