"""What a verified peak depends on, beside the program and the compiler options."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def environment() -> dict[str, str]:
    """The versions and flags of this process that a compiled program depends on."""
    return {
        "autoremat": package_version("autoremat"),
        "jax": package_version("jax"),
        "jaxlib": package_version("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def package_version(package: str) -> str:
    """The version of an installed package, or `"0.0.0"` for a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "0.0.0"
