"""Describe an NVIDIA GPU to XLA, which asks the driver where there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoremat.cost import Device

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What XLA wants to know of a GPU beside its memory and bandwidth.

    `capability` is the compute capability; sizes are bytes. Sources: NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities"
    (limits by capability), and the architecture papers of A100 and H100 (multiprocessors, second-level cache, clock).
    """

    title: str
    capability: tuple[int, int]
    multiprocessors: int
    float32_units: int
    shared_per_multiprocessor: int
    shared_per_block: int
    l2_bytes: int
    clock_ghz: float


_AMPERE = Gpu(
    title="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    multiprocessors=108,
    float32_units=64,
    shared_per_multiprocessor=164 * _KIB,
    shared_per_block=163 * _KIB,
    l2_bytes=40 * _MIB,
    clock_ghz=1.41,
)

_HOPPER = Gpu(
    title="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    multiprocessors=132,
    float32_units=128,
    shared_per_multiprocessor=228 * _KIB,
    shared_per_block=227 * _KIB,
    l2_bytes=50 * _MIB,
    clock_ghz=1.98,
)

GPUS = {
    "gpu:a100-40gb": _AMPERE,
    "gpu:a100-80gb": replace(_AMPERE, title="NVIDIA A100-SXM4-80GB"),
    "gpu:h100": _HOPPER,
    "gpu:h200": replace(_HOPPER, title="NVIDIA H200"),
}
"""By the names of `autoremat.cost.DEVICES`."""


def target_config(device: Device) -> str:
    """The text of XLA's `GpuTargetConfigProto` for a device of the table."""
    gpu = GPUS[device.name]
    major, minor = gpu.capability
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 64 * _KIB,
        "registers_per_block_limit": 64 * _KIB,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_block_optin": gpu.shared_per_block,
        "shared_memory_per_core": gpu.shared_per_multiprocessor,
        "core_count": gpu.multiprocessors,
        "fpus_per_core": gpu.float32_units,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "memory_bandwidth": int(device.memory_bandwidth),
        "device_memory_size": device.memory_bytes,
    }
    fields = "\n".join(f"  {name}: {value}" for name, value in limits.items())
    return (
        f"gpu_device_info {{\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n{fields}\n}}\n"
        f'platform_name: "CUDA"\ndevice_description_str: "{gpu.title}"\n'
        # The version of cuDNN: no kernels of it are chosen without a device, but some passes ask whether it is new enough.
        "dnn_version_info { major: 9 minor: 8 patch: 0 }\n"
    )
