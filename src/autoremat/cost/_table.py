"""Prices other than the published rates: times that were measured (`CostTable`), or FLOPs alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from autoremat._errors import CostTableError
from autoremat.cost._devices import Device
from autoremat.graph import Graph, Op

VERSION = 1


def op_key(graph: Graph, op: Op) -> str:
    """A name for what an operation does: its primitive, its parameters, the types of its operands and results."""
    operands, results = (
        " ".join(f"{graph.values[v].dtype}{list(graph.values[v].shape)}" for v in ids)
        for ids in (op.inputs, op.outputs)
    )
    params = " ".join(f"{name}={value}" for name, value in sorted(op.params.items()))
    return f"{op.primitive} {operands} -> {results} {params}".strip()


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds that operations take on a device, measured by `autoremat.calibrate`.

    - `target`: the name of the device. `seconds` by operation (`op_key`), each the median of its runs, alone and compiled.
    - `memory_bandwidth` in bytes per second, `vector_flops_per_s`, `matrix_flops_per_s` by dtype: measured rates, for operations that are
        not in the table: those that compilers fuse, and those of other shapes.
    - `skipped`: operations that do not run alone, and why. `environment`: versions under which it was made.
    """

    target: str
    seconds: Mapping[str, float]
    memory_bandwidth: float
    vector_flops_per_s: float
    matrix_flops_per_s: Mapping[str, float]
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def price(self, device: Device) -> Device:
        """The device with measured rates and times. Raises `CostTableError` if the table was made on another."""
        if device.name != self.target:
            raise CostTableError(
                f"the cost table was measured on {self.target!r}, and the plan is for {device.name!r}. Cheapest fix: calibrate there, or "
                "leave `costs` out for the published rates."
            )
        return replace(
            device,
            memory_bandwidth=self.memory_bandwidth,
            vector_flops_per_s=self.vector_flops_per_s,
            matrix_flops_per_s={**device.matrix_flops_per_s, **self.matrix_flops_per_s},
            measured=self.seconds,
        )

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table. Raises `CostTableError` if the file is none."""
        try:
            read: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CostTableError(f"cannot read the cost table {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise CostTableError(f"{path} is no cost table: it is not JSON ({error}).") from error
        data = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
        version = data.pop("version", None)
        if version != VERSION:
            raise CostTableError(
                f"{path} is no cost table of version {VERSION}: got {version!r}. Cheapest fix: make it again with `autoremat calibrate`."
            )
        try:
            table = cls(**data)
            rates = [table.memory_bandwidth, table.vector_flops_per_s, *table.matrix_flops_per_s.values()]
            valid = all(rate > 0 for rate in rates) and all(s >= 0 for s in table.seconds.values())
        except (TypeError, AttributeError) as error:
            raise CostTableError(f"{path} is no cost table: {error}.") from error
        if not valid:
            raise CostTableError(
                f"{path} is no cost table: times and rates must be positive. Cheapest fix: make it again."
            )
        return table


Costs: TypeAlias = CostTable | Literal["flops"] | None
"""What prices recomputation: measured times, FLOPs alone, or (`None`) the published rates of the device."""


def priced(device: Device, costs: Costs) -> Device:
    """The device with the prices that were asked for. Raises `CostTableError` for what is none, or is of another device."""
    if costs is None:
        return device
    if isinstance(costs, CostTable):
        return costs.price(device)
    if costs != "flops":
        raise CostTableError(
            f"`costs` must be a CostTable of `autoremat.calibrate`, or 'flops'; got {costs!r}. Cheapest fix: leave it out, for the published "
            "rates."
        )
    return _by_flops(device)


def _by_flops(device: Device) -> Device:
    """The device at one rate for all arithmetic, that of its products in bfloat16, to which memory and links add nothing."""
    rate = device.matrix_rate("bfloat16")
    return replace(
        device,
        memory_bandwidth=math.inf,
        vector_flops_per_s=rate,
        matrix_flops_per_s=dict.fromkeys(device.matrix_flops_per_s, rate),
        interconnect_bytes_per_s=math.inf,
    )
