"""What devices can do, from their makers' publications, and the time that a cost takes on them.

Rates are peaks: real programs reach a part of them. The planner compares times with each other, so what
matters is the ratio of matrix, vector and memory rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoremat._errors import TargetError
from autoremat.cost._model import Cost

_NARROW = ("float8_", "float6_", "float4_", "int8", "uint8", "int4", "uint4", "int2", "uint2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One chip, as the compiler sees a device.

    Bandwidths are bytes per second, one direction for links. `matrix_flops_per_s` maps a dtype to FLOPs per
    second of the matrix unit. `interconnect_bytes_per_s` is what one device sends along one axis of a ring.
    `source` says where each number is published, or how it was derived. `measured` maps operations to seconds that were measured
    (see `CostTable`).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    host_link_bytes_per_s: float
    interconnect_bytes_per_s: float
    source: str
    measured: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    def matrix_rate(self, dtype: str) -> float:
        """Return the FLOPs per second of a product of `dtype`.

        A narrow type without a rate of its own is computed as `bfloat16`; anything else by the vector unit.
        """
        rates = self.matrix_flops_per_s
        if dtype in rates:
            return rates[dtype]
        if dtype.startswith(_NARROW) and "bfloat16" in rates:
            return rates["bfloat16"]
        return self.vector_flops_per_s


def device(name: str) -> Device:
    """Return the device called `name`, such as `"tpu:v5e"`, from the table.

    **Raises:** `TargetError`, which lists the names, if it is not there.
    """
    found = DEVICES.get(name.strip().lower())
    if found is None:
        raise TargetError(f"no device is called {name!r}; known are {', '.join(sorted(DEVICES))}")
    return found


_TYPICAL = {"gpu": "gpu:h100", "cuda": "gpu:h100", "rocm": "gpu:h100", "tpu": "tpu:v5e"}


def device_for_backend(backend: str) -> Device:
    """Return the device whose rates stand for a JAX backend (`"cpu"`, `"gpu"`, `"tpu"`) of which no more is known."""
    return device(_TYPICAL.get(backend, backend))


def seconds(cost: Cost, device: Device, dtype: str = "float32", *, fusible: bool = False) -> float:
    """Return the seconds that `cost` takes on `device`: a roofline.

    **Arguments:** `dtype` is the type of the operands of its products. `fusible` work reads and writes
    nothing of its own, so that of the two its arithmetic alone counts; otherwise the slower of arithmetic and
    memory does. Communication is added.
    """
    arithmetic = cost.matrix_flops / device.matrix_rate(dtype) + cost.vector_flops / device.vector_flops_per_s
    communication = cost.collective_bytes / device.interconnect_bytes_per_s
    if fusible:
        return arithmetic + communication
    memory = cost.bytes_moved / device.memory_bandwidth
    return max(arithmetic, memory) + communication


def picoseconds(
    cost: Cost, device: Device, dtype: str = "float32", *, fusible: bool = False, least: int = 1
) -> int:
    """Return `seconds(...)` in picoseconds, rounded up, and at least `least`.

    The least is 1 for an operation with output elements, so that a solver never finds a rerun free.
    """
    return max(math.ceil(seconds(cost, device, dtype, fusible=fusible) * 1e12), least)


_CPU_RATE = 1e11
_CPU_TYPES = ("float64", "float32", "bfloat16", "float16", "int32", "int8")


def _tpu_rates(bfloat16: float, int8: float) -> dict[str, float]:
    """At JAX's default precision a product of float32 takes one pass in bfloat16."""
    return {"bfloat16": bfloat16, "float16": bfloat16, "float32": bfloat16, "int8": int8, "uint8": int8}


_V5E = Device(
    name="tpu:v5e",
    memory_bytes=int(15.75 * 2**30),
    memory_bandwidth=819e9,
    matrix_flops_per_s=_tpu_rates(197e12, 393e12),
    vector_flops_per_s=6.1e12,
    host_link_bytes_per_s=15e9,
    interconnect_bytes_per_s=100e9,
    source=(
        "cloud.google.com/tpu/docs/v5e: 197 TFLOPs bf16, 393 TOPs int8, 16 GB HBM2, 819 GB/s, ICI "
        "400 GB/s over 4 ports in both directions. Memory: what XLA allots of the 16 ('available HBM "
        "15.75G'). Vector, derived: 8x128 lanes, 4 ALUs, 1.5 GHz. Host link and ICI of a ring: "
        "jax-ml.github.io/scaling-book/tpus. float32 products take one bfloat16 pass at JAX's "
        "default precision."
    ),
)

_V5P = Device(
    name="tpu:v5p",
    memory_bytes=int(95e9),
    memory_bandwidth=2765e9,
    matrix_flops_per_s=_tpu_rates(459e12, 918e12),
    vector_flops_per_s=14e12,
    host_link_bytes_per_s=15e9,
    interconnect_bytes_per_s=200e9,
    source=(
        "cloud.google.com/tpu/docs/v5p: 459 TFLOPs bf16, 918 TOPs int8, 95 GB HBM, 2765 GB/s, ICI "
        "1200 GB/s over 6 ports in both directions. Vector: jax-ml.github.io/scaling-book/tpus (2 "
        "cores, 8x128 lanes, 4 ALUs, 1.75 GHz); host link and ICI of a ring: the same."
    ),
)

_V6E = Device(
    name="tpu:v6e",
    memory_bytes=int(32e9),
    memory_bandwidth=1638e9,
    matrix_flops_per_s=_tpu_rates(918e12, 1836e12),
    vector_flops_per_s=7.2e12,
    host_link_bytes_per_s=32e9,
    interconnect_bytes_per_s=200e9,
    source=(
        "cloud.google.com/tpu/docs/v6e: 918 TFLOPs bf16, 1836 TOPs int8, 32 GB HBM, 1638 GB/s, ICI "
        "800 GB/s over 4 ports in both directions, a 128x8 vector unit. Vector, derived: 4 ALUs and "
        "1.75 GHz as in v5p, which is not published. Host link: jax-ml.github.io/scaling-book/tpus."
    ),
)

_A100_MATRIX = {
    "bfloat16": 312e12,
    "float16": 312e12,
    "float32": 156e12,
    "float64": 19.5e12,
    "int8": 624e12,
    "uint8": 624e12,
}
_A100_SOURCE = (
    "NVIDIA A100 datasheet (nvidia.com/en-us/data-center/a100, dense): 312 TFLOPS bf16, 156 TF32 "
    "(JAX's default for float32), 19.5 FP64 tensor core, 624 TOPS int8, 19.5 FP32; memory 40 GB at "
    "1555 GB/s (SXM) or 80 GB at 2039 GB/s (SXM); PCIe gen 4 64 GB/s and NVLink 600 GB/s, both "
    "directions together."
)

_HOPPER_MATRIX = {
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "float32": 494.7e12,
    "float64": 67e12,
    "int8": 1979e12,
    "uint8": 1979e12,
    "float8_e4m3fn": 1979e12,
    "float8_e5m2": 1979e12,
}
_HOPPER_SOURCE = (
    "NVIDIA H100 and H200 datasheets (nvidia.com/en-us/data-center/h100, /h200; SXM, dense = half of "
    "the sparse figures): 989.4 TFLOPS bf16, 494.7 TF32 (JAX's default for float32), 67 FP64 tensor "
    "core, 1979 FP8 and int8, 67 FP32; memory 80 GB at 3.35 TB/s (H100) or 141 GB at 4.8 TB/s "
    "(H200); PCIe gen 5 128 GB/s and NVLink 900 GB/s, both directions together."
)


def _gpu(name: str, memory: float, bandwidth: float, *, hopper: bool) -> Device:
    return Device(
        name=name,
        memory_bytes=int(memory),
        memory_bandwidth=bandwidth,
        matrix_flops_per_s=_HOPPER_MATRIX if hopper else _A100_MATRIX,
        vector_flops_per_s=67e12 if hopper else 19.5e12,
        host_link_bytes_per_s=64e9 if hopper else 32e9,
        interconnect_bytes_per_s=450e9 if hopper else 300e9,
        source=_HOPPER_SOURCE if hopper else _A100_SOURCE,
    )


_CPU = Device(
    name="cpu",
    memory_bytes=16 * 2**30,
    memory_bandwidth=4 * _CPU_RATE,
    matrix_flops_per_s=dict.fromkeys(_CPU_TYPES, _CPU_RATE),
    vector_flops_per_s=_CPU_RATE,
    host_link_bytes_per_s=4 * _CPU_RATE,
    interconnect_bytes_per_s=_CPU_RATE,
    source=(
        "A convention, not a machine: one rate for all arithmetic and four bytes a FLOP, so that "
        "time is proportional to FLOPs and a float32 reduction costs what it adds up; 16 GiB."
    ),
)

DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        _CPU,
        _V5E,
        _V5P,
        _V6E,
        _gpu("gpu:a100-40gb", 40e9, 1555e9, hopper=False),
        _gpu("gpu:a100-80gb", 80e9, 2039e9, hopper=False),
        _gpu("gpu:h100", 80e9, 3.35e12, hopper=True),
        _gpu("gpu:h200", 141e9, 4.8e12, hopper=True),
    )
}
"""All devices by name. Capacities in decimal gigabytes as printed: never more than the device has."""
