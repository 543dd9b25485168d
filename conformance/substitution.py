"""autoremat's functions in the place of JAX's, wherever a module of JAX holds or hands out the latter."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.core import ShapedArray

import autoremat

# The tests import JAX's private module, so the substitution has to reach it. Not by an import statement: outside
# src/autoremat/_compat.py the package itself never uses private names, and the linter sees to that.
_PRIVATE = "jax._src.ad_checkpoint"


def residuals_as_jax(fun: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """`autoremat.saved_residuals` in the form of JAX's: pairs of an aval and where it comes from."""
    found = autoremat.saved_residuals(fun, *args, **kwargs)
    return [(ShapedArray(r.shape, jax.numpy.dtype(r.dtype)), r.description) for r in found]


def substitutes() -> list[tuple[Any, Any]]:
    """`(JAX's, ours)` for every public function of `jax.checkpoint` and its surroundings."""
    private = importlib.import_module(_PRIVATE)
    pairs = [
        (jax.checkpoint, autoremat.checkpoint),
        (jax.remat, autoremat.remat),
        (private.checkpoint, autoremat.checkpoint),
        (private.remat, autoremat.remat),
        (private.checkpoint_name, autoremat.checkpoint_name),
        (private.saved_residuals, residuals_as_jax),
        (private.print_saved_residuals, autoremat.print_saved_residuals),
        (private.checkpoint_policies, autoremat.checkpoint_policies),
    ]
    for name, theirs in vars(private.checkpoint_policies).items():
        pairs.append((theirs, getattr(autoremat.checkpoint_policies, name)))
    return pairs


def substitute() -> None:
    """Put ours in place of JAX's in all loaded modules of JAX.

    What is loaded later takes the names from modules that have changed already.
    """
    ours = {id(theirs): ours for theirs, ours in substitutes()}
    for module in _modules_of_jax():
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                setattr(module, name, ours[id(value)])


def _modules_of_jax() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "jax" and m is not None]


class Missing:
    """Stands for a name that the tests import and this JAX lacks: what uses it fails, for JAX as for us."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which this version of JAX lacks>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(f"JAX {jax.__version__} has no {self._name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class that derives from it can be defined and made, and no more."""
        del bases
        return (_Base,)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"JAX {jax.__version__} has no {self._name}, wanted for its attribute {name}")


class _Base:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


def supply(module_name: str, name: str, checkout: Path) -> None:
    """See that `from module_name import name` works, as far as the installed JAX goes.

    A module that its wheel leaves out (helpers of tests) is read from the checkout; any other name becomes a `Missing`.
    """
    module = _module(module_name, checkout)
    if module is None or hasattr(module, name):
        return
    found = _module(f"{module_name}.{name}", checkout)
    setattr(module, name, Missing(f"{module_name}.{name}") if found is None else found)


def _module(name: str, checkout: Path) -> ModuleType | None:
    """The installed module, or else that of the checkout."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        path = (checkout / name.replace(".", "/")).with_suffix(".py")
        if error.name != name or not path.is_file():
            return None
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
