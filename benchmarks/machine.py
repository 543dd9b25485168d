"""What a result was measured on, in words for its table."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import jax


def processor() -> str:
    """The processor's model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def describe() -> str:
    """One sentence: processor, cores, Python, JAX."""
    return (
        f"{processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, JAX {jax.__version__}, "
        f"backend {jax.default_backend()}"
    )
