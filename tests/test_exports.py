"""The public surface is what `__all__` says."""

from __future__ import annotations

from types import ModuleType

import autoremat


def public_names() -> set[str]:
    """Names without an underscore; of modules only those that are offered, not the folders of the package."""
    return {
        name
        for name in dir(autoremat)
        if not name.startswith("_")
        and name != "annotations"  # of `from __future__ import annotations`
        and (name in autoremat.__all__ or not isinstance(getattr(autoremat, name), ModuleType))
    }


def test_all_is_the_public_names():
    assert {name for name in autoremat.__all__ if not name.startswith("__")} == public_names()


def test_all_is_sorted():
    assert list(autoremat.__all__) == sorted(autoremat.__all__)


def test_all_names_exist():
    missing = [name for name in autoremat.__all__ if not hasattr(autoremat, name)]
    assert missing == []
