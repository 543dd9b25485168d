"""JAX on a machine whose accelerators are elsewhere."""

from __future__ import annotations

import glob
import os

import jax

from autoremat._compat import backends_are_initialized, chosen_platforms

_DEVICE_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/*")
"""Of NVIDIA's driver, of that of WSL, of AMD's, of TPUs."""


def has_accelerator() -> bool:
    """Whether the driver of an accelerator is there."""
    return any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def start_without_accelerators() -> None:
    """Let JAX start with the CPU alone where there is nothing else and nobody chose.

    With a compiler for GPUs installed and no GPU there, JAX would try to use one, and log at length that it cannot. A choice of the
    user (`JAX_PLATFORMS`, `jax.config`) and a JAX that has started stay as they are.
    """
    chosen = os.environ.get("JAX_PLATFORMS") or chosen_platforms()
    if chosen or backends_are_initialized() or has_accelerator():
        return
    jax.config.update("jax_platforms", "cpu")
