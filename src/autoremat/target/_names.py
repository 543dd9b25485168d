"""The names of targets: `"cpu"`, `"tpu:v5e"`, `"tpu:v5p:2x2x1"`, `"gpu:h100"`, `"gpu:h100:8"`. No JAX here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autoremat._errors import TargetError
from autoremat.cost import DEVICES, Device

_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*)*")


@dataclass(frozen=True, slots=True)
class Name:
    """A name in its parts: the device, and how many there are along each axis of its network."""

    device: Device
    shape: tuple[int, ...]

    @property
    def family(self) -> str:
        """`"cpu"`, `"tpu"` or `"gpu"`."""
        return self.device.name.partition(":")[0]

    @property
    def count(self) -> int:
        """How many chips there are."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        suffix = "x".join(map(str, self.shape))
        return self.device.name if self.count == 1 else f"{self.device.name}:{suffix}"


def parse(name: str) -> Name:
    """Read a name. Raises `TargetError`, with the names that there are, if it is none."""
    text = name.strip().lower()
    family, _, rest = text.partition(":")
    model, _, shape = rest.partition(":")
    device = DEVICES.get(f"{family}:{model}" if model else family)
    if device is None:
        raise TargetError(
            f"no target is called {name!r}. Known are {', '.join(sorted(DEVICES))}, each of the accelerators also with how many there "
            'are, such as "tpu:v5p:2x2x1" or "gpu:h100:8". `autoremat targets` lists them. Cheapest fix: one of these names.'
        )
    if not shape:
        return Name(device, (1,))
    if family == "cpu" or _SHAPE.fullmatch(shape) is None:
        raise TargetError(
            f"target {name!r}: {shape!r} is no number of devices. Needed is a shape such as 2x2 or 4x4x4 for a TPU, a number such as 8 for "
            "GPUs, and none for a CPU. Cheapest fix: leave it out for one device."
        )
    sizes = tuple(map(int, shape.split("x")))
    if family == "gpu" and len(sizes) > 1:
        raise TargetError(
            f"target {name!r}: GPUs are counted, they have no shape. Cheapest fix: "
            f'"{device.name}:{math.prod(sizes)}".'
        )
    return Name(device, sizes if math.prod(sizes) > 1 else (1,))
