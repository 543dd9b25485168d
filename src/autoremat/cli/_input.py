"""`FILE.py:NAME`: run the file, call the function, check what it returns. Each fault is an `InputError` that teaches."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click
import jax

from autoremat._errors import AutorematError
from autoremat.cli._errors import InputError

RETURNS = (
    "NAME is a function without arguments that returns the function to differentiate and its example arguments, "
    "`return loss, (params, batch)`, or a dict with the keys fun and args, and argnums and has_aux if you like"
)
_KEYS = {"fun", "args", "argnums", "has_aux"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Where the example is: a file and a name in it."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A function to differentiate, example arguments, and how, as in `jax.grad`."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False

    @property
    def title(self) -> str:
        """The name of the function."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)


def read_spec(ctx: click.Context, param: click.Parameter, value: str) -> Spec:
    """Click's callback for `FILE.py:NAME`. Splits at the last colon: there may be one in a Windows path."""
    path, colon, name = value.rpartition(":")
    if colon and path and name.isidentifier():
        return Spec(path=Path(path), name=name)
    file = value.rstrip(":")
    hint = f" Cheapest fix: {file}:example" if file.endswith(".py") else ""
    raise click.BadParameter(f"got {value!r}, need FILE.py:NAME. {RETURNS}.{hint}", ctx, param)


def read_argnums(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | tuple[int, ...] | None:
    """Click's callback for `--argnums`: `0`, or `0,2`. A number stays one: `jax.grad` then returns no tuple."""
    if value is None:
        return None
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"got {value!r}, need argument numbers such as 0 or 0,2.", ctx, param
        ) from error
    return numbers if "," in value else numbers[0]


def load_example(spec: Spec) -> Example:
    """Import the file and call the function. Raises `InputError` if anything about them is wrong."""
    example = _read_result(spec, _call(spec, _find(spec, _import(spec))))
    _check_runs(spec, example)
    return example


# ----------------------------------------------------------------------------------------------------------------- file


def _import(spec: Spec) -> ModuleType:
    path = spec.path
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(
            f"{path} {what}; need a Python file. Cheapest fix: check the path, from {Path.cwd()}."
        )
    name = f"_autoremat_input_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise InputError(f"{path} is no Python file: its name must end with .py.")
    module = importlib.util.module_from_spec(found)
    # As `python FILE.py` does: modules beside the file can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{path} is not valid Python: {error.msg}, line {error.lineno}.") from error
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path} does not import: {error}{_line(error, path)}. Cheapest fix: install that package for "
            f"{sys.executable}."
        ) from error
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise InputError(f"{path} does not import: {_say(error)}{_line(error, path)}.") from error
    return module


def _find(spec: Spec, module: ModuleType) -> Callable[..., Any]:
    if not hasattr(module, spec.name):
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        has = f"it defines {', '.join(own)}" if own else "it defines no function"
        raise InputError(f"{spec.path} has no `{spec.name}`; {has}. {RETURNS}.")
    found = getattr(module, spec.name)
    if not callable(found):
        raise InputError(f"{spec}: got {_what(found)}, which cannot be called. {RETURNS}.")
    return found


def _call(spec: Spec, function: Callable[..., Any]) -> Any:
    required = _required(function)
    if required:
        raise InputError(
            f"{spec} takes arguments ({', '.join(required)}). {RETURNS}. Cheapest fix: add to {spec.path.name}\n"
            f"    def example():\n        return {spec.name}, ({', '.join(required)},)"
        )
    try:
        return function()
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise InputError(f"{spec}() failed: {_say(error)}{_line(error, spec.path)}.") from error


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in objects have no signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


# --------------------------------------------------------------------------------------------------------------- result


def _read_result(spec: Spec, result: Any) -> Example:
    if isinstance(result, dict):
        fields = cast("dict[str, Any]", result)
        unknown = sorted(map(str, set(fields) - _KEYS))
        missing = sorted({"fun", "args"} - set(fields))
        if unknown or missing:
            faults = [f"lacks {missing}"] if missing else []
            faults += [f"has unknown keys {unknown}"] if unknown else []
            raise InputError(f"{spec}() returned a dict that {' and '.join(faults)}. {RETURNS}.")
        return _example(spec, **fields)
    if isinstance(result, tuple):
        parts = cast("tuple[Any, ...]", result)
        if len(parts) == 2 and callable(parts[0]):
            return _example(spec, *parts)
        if parts and callable(parts[0]):
            raise InputError(
                f"{spec}() returned {len(parts)} values. {RETURNS}. Cheapest fix: put the arguments into one tuple."
            )
    raise InputError(f"{spec}() returned {_what(result)}. {RETURNS}.")


def _example(spec: Spec, fun: Any, args: Any, argnums: Any = 0, has_aux: Any = False) -> Example:
    if not callable(fun):
        raise InputError(f"{spec}(): the function to differentiate is {_what(fun)}. {RETURNS}.")
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"{spec}(): the arguments are {_what(args)}, need a tuple. {RETURNS}. Cheapest fix: with one argument, (x,)."
        )
    values: list[Any] = [*cast("Sequence[Any]", argnums)] if isinstance(argnums, (tuple, list)) else [argnums]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in values):
        raise InputError(f"{spec}(): argnums is {argnums!r}, need an int or a tuple of them.")
    if not isinstance(has_aux, bool):
        raise InputError(f"{spec}(): has_aux is {has_aux!r}, need True or False.")
    numbers: int | tuple[int, ...] = argnums if isinstance(argnums, int) else tuple(values)
    return Example(fun=fun, args=tuple(cast("list[Any]", args)), argnums=numbers, has_aux=has_aux)


def _check_runs(spec: Spec, example: Example) -> None:
    """Trace the function for its arguments, without running it: what fails here is no fault of a plan."""
    try:
        jax.eval_shape(example.fun, *example.args)  # pyright: ignore[reportUnknownMemberType]
    except AutorematError:  # of a checkpoint inside: it says what is wrong itself
        raise
    except Exception as error:  # the user's function may raise anything
        raise InputError(
            f"{spec}: calling {example.title} with the example arguments failed: {_say(error)}"
            f"{_line(error, spec.path)}."
        ) from error


# ---------------------------------------------------------------------------------------------------------------- words


def _what(value: Any) -> str:
    """A value in few words."""
    text = repr(value)
    short = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{short} of type {type(value).__name__}"


def _say(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _line(error: BaseException, path: Path) -> str:
    """The innermost line of the file that the error came through."""
    file = str(path.resolve())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if str(Path(frame.filename).resolve()) == file]
    return f", line {lines[-1]} of {path.name}" if lines else ""
