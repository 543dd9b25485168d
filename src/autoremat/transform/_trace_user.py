"""Tracing the user's function: static arguments, keyword arguments, pytrees, closed-over tracers, caching."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import (
    ConcretizationTypeError,
    Jaxpr,
    debug_info,
    hoist_constants,
    trace_user,
    typeof,
    weakref_lru_cache,
)

_STATIC_HINT = (
    "\n\nConsider using the `static_argnums` or `static_argnames` parameter for `autoremat.checkpoint`: a value that "
    "decides Python control flow, or a shape, must be static.\n"
)


@dataclass(frozen=True, slots=True)
class Static:
    """A static argument. Hashed by value where it can be, by identity where it cannot."""

    value: Any

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        try:
            hash(self.value)
            hash(other.value)
        except TypeError:
            return self.value is other.value
        return type(self.value) is type(other.value) and bool(self.value == other.value)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call, the static ones taken out: `leaves` are the rest, flat."""

    leaves: tuple[Any, ...]
    tree: Any
    static_args: tuple[tuple[int, Static], ...]
    static_kwargs: tuple[tuple[str, Static], ...]
    num_args: int

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments with other leaves."""
        return _rebuild(self.tree, self.static_args, self.static_kwargs, self.num_args, leaves)


def _rebuild(tree: Any, static_args: Any, static_kwargs: Any, num_args: int, leaves: Sequence[Any]) -> Any:
    dynamic, kwargs = jax.tree.unflatten(tree, list(leaves))
    statics = dict(static_args)
    rest = iter(dynamic)
    args = tuple(statics[i].value if i in statics else next(rest) for i in range(num_args))
    return args, {**kwargs, **{k: s.value for k, s in static_kwargs}}


def ensure_tuple(x: Any, kind: type, what: str) -> tuple[Any, ...]:
    """`x` as a tuple of `kind`."""
    values = (x,) if isinstance(x, kind) else tuple(x) if isinstance(x, (tuple, list)) else None
    if values is None or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
        raise TypeError(
            f"the `{what}` argument to `autoremat.checkpoint` must be {kind.__name__} or a tuple of them, but got {x!r}."
        )
    return values


def resolve_statics(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Any, argnums: tuple[int, ...], argnames: tuple[str, ...]
) -> tuple[set[int], set[str]]:
    """Which positions and which keywords of this call are static.

    An argument that is named static is so by position as well, and the other way round, as in `jax.jit`.
    """
    for n in argnums:
        if not -len(args) <= n < len(args) and not kwargs:
            raise ValueError(
                "the `static_argnums` argument to `autoremat.checkpoint` can only take integer values greater than or "
                f"equal to `-len(args)` and less than `len(args)`, but got {argnums}, while `len(args)` = {len(args)}"
            )
    positions = {n % len(args) for n in argnums if args and -len(args) <= n < len(args)}
    names = set(argnames)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return positions, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [n for n in argnames if n not in {p.name for p in parameters} and not accepts_any]:
        raise ValueError(
            f"the `static_argnames` argument to `autoremat.checkpoint` names {unknown}, which {fun} does not take; its "
            f"parameters are {[p.name for p in parameters]}."
        )
    names |= {positional[n] for n in argnums if -len(positional) <= n < len(positional) and n >= 0}
    positions |= {i for i, name in enumerate(positional[: len(args)]) if name in argnames}
    return positions, names


def bind_call(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...], argnames: tuple[str, ...]
) -> Call:
    """Separate static from traced arguments and flatten the latter."""
    positions, names = (set(), set()) if not (argnums or argnames) else resolve_statics(fun, args, kwargs, argnums, argnames)
    static_args = tuple((i, Static(a)) for i, a in enumerate(args) if i in positions)
    static_kwargs = tuple(sorted(((k, Static(v)) for k, v in kwargs.items() if k in names), key=lambda kv: kv[0]))
    dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
    leaves, tree = jax.tree.flatten((dynamic, {k: v for k, v in kwargs.items() if k not in names}))
    return Call(tuple(leaves), tree, static_args, static_kwargs, len(args))


def _trace_call(
    fun: Callable[..., Any], tree: Any, static_args: Any, static_kwargs: Any, num_args: int, avals: Any, what: str
) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    out_tree = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        args, kwargs = _rebuild(tree, static_args, static_kwargs, num_args, leaves)
        outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        return outs

    statics = dict(static_args)
    args, kwargs = _rebuild(tree, static_args, static_kwargs, num_args, avals)
    debug = debug_info(
        what, fun, args, kwargs, static_argnums=tuple(statics), static_argnames=tuple(k for k, _ in static_kwargs)
    )
    try:
        jaxpr, consts = trace_user(flat, avals, debug)
    except ConcretizationTypeError as error:
        (message,) = error.args
        if f"for {what}" in message:
            error.args = (message + _STATIC_HINT,)
        raise
    return hoist_constants(jaxpr), tuple(consts), out_tree


_trace_call_cached = weakref_lru_cache(_trace_call)


def trace_call(fun: Callable[..., Any], call: Call, what: str) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    """Trace `fun` for the avals of a call.

    Returns a jaxpr `(constants, leaves) -> outs`, the values of the constants, and the tree of the output. The
    trace is cached on the identity of `fun`, for as long as `fun` lives.
    """
    avals = tuple(typeof(x) for x in call.leaves)
    key = (call.tree, call.static_args, call.static_kwargs, call.num_args, avals, what)
    try:
        return _trace_call_cached(fun, *key)
    except TypeError as error:
        if "weak reference" not in str(error) and "unhashable" not in str(error):
            raise
        return _trace_call(fun, *key)
