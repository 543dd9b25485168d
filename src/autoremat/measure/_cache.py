"""Compiled memory on disk, by the lowered program, the target, the compiler and its options.

One small JSON file a program, in the user's cache folder; `AUTOREMAT_CACHE` names another folder, or is `off`. A file that cannot be
read is as good as none, and one that cannot be written is no error: a program is compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from autoremat.measure._environment import environment
from autoremat.target import Target

T = TypeVar("T")

_FORMAT = 1
"""Grows when what is stored changes."""


def cache_folder() -> Path | None:
    """Where compiled memory is kept, or `None` where it is not."""
    chosen = os.environ.get("AUTOREMAT_CACHE", "")
    if chosen.lower() == "off":
        return None
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("autoremat")) / "compiled"


def cached_use(
    kind: type[T], lowered: Any, target: Target, options: Mapping[str, Any]
) -> tuple[str, T | None]:
    """The key of a lowered program, and what is known of it, as a `kind`. The key is empty where nothing is kept."""
    folder = cache_folder()
    if folder is None:
        return "", None
    key = _key(lowered, target, options)
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = json.loads(_path(folder, key).read_text("utf-8"))
        return key, kind(**known | {"cached": True})
    return key, None


def store_use(key: str, use: Any) -> None:
    """Keep what was found out about the program of a key."""
    folder = cache_folder()
    if folder is None or not key:
        return
    path = _path(folder, key)
    fields = {f.name: getattr(use, f.name) for f in dataclasses.fields(use) if f.name != "cached"}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(fields), encoding="utf-8")
        partial.replace(path)


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _key(lowered: Any, target: Target, options: Mapping[str, Any]) -> str:
    about = {
        "format": _FORMAT,
        "target": target.name,
        "attached": target.attached,
        "compiler": target.compiler,
        "device": dataclasses.asdict(target.device),
        "options": {str(k): repr(v) for k, v in options.items()},
        "environment": environment(),
        # The code that a CPU runs depends on what it can do, and so may the buffers that it needs.
        "machine": (platform.machine(), platform.processor()),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=dict).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()
