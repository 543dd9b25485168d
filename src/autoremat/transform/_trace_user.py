"""Tracing the user's function: static arguments, keyword arguments, pytrees, closed-over tracers, caching."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import (
    ConcretizationTypeError,
    Jaxpr,
    Tracer,
    debug_info,
    flatten,
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
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> tuple[set[int], set[str]]:
    """Which positions and which keywords of this call are static.

    An argument that is named static is so by position as well, and the other way round, as in `jax.jit`.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for n in argnums:
        if not -len(args) <= n < max(len(args), len(positional)):
            raise ValueError(
                "the `static_argnums` argument to `autoremat.checkpoint` can only take integer values greater than or "
                f"equal to `-len(args)` and less than `len(args)`, but got {argnums}, while `len(args)` = {len(args)}"
            )
    accepts_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [n for n in argnames if n not in {p.name for p in parameters} and not accepts_any]:
        raise ValueError(
            f"the `static_argnames` argument to `autoremat.checkpoint` names {unknown}, which {fun} does not take; its "
            f"parameters are {[p.name for p in parameters]}."
        )
    positions = {n % len(args) for n in argnums if -len(args) <= n < len(args)}
    positions |= {i for i, name in enumerate(positional[: len(args)]) if name in argnames}
    names = {*argnames, *(positional[n] for n in argnums if 0 <= n < len(positional))}
    return positions, names


def bind_call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> Call:
    """Separate static from traced arguments and flatten the latter."""
    positions, names = (
        (set(), set()) if not (argnums or argnames) else resolve_statics(fun, args, kwargs, argnums, argnames)
    )
    static_args = tuple((i, Static(a)) for i, a in enumerate(args) if i in positions)
    static_kwargs = tuple(
        sorted(((k, Static(v)) for k, v in kwargs.items() if k in names), key=lambda kv: kv[0])
    )
    dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
    leaves, tree = flatten((dynamic, {k: v for k, v in kwargs.items() if k not in names}))
    return Call(tuple(leaves), tree, static_args, static_kwargs, len(args))


def _check_outputs(outs: Sequence[Any], tree: Any, debug: Any) -> None:
    for i, x in enumerate(outs):
        try:
            typeof(x)
        except TypeError:
            path, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(len(outs))))[0][i]
            raise TypeError(
                f"function {debug.func_src_info} traced for {debug.traced_for} returned a value of type {type(x)} at "
                f"output component {jax.tree_util.keystr(path) or 'result'}, which is not a valid JAX type"
            ) from None


def _trace_call(
    fun: Callable[..., Any],
    tree: Any,
    static_args: Any,
    static_kwargs: Any,
    num_args: int,
    avals: Any,
    what: str,
) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    out_tree = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        args, kwargs = _rebuild(tree, static_args, static_kwargs, num_args, leaves)
        outs, out_tree = flatten(fun(*args, **kwargs))
        _check_outputs(outs, out_tree, debug)
        return outs

    statics = dict(static_args)
    args, kwargs = _rebuild(tree, static_args, static_kwargs, num_args, avals)
    debug = debug_info(
        what,
        fun,
        args,
        kwargs,
        static_argnums=tuple(statics),
        static_argnames=tuple(k for k, _ in static_kwargs),
    )
    try:
        jaxpr, consts = trace_user(flat, avals, debug)
    except ConcretizationTypeError as error:
        (message,) = error.args
        if f"for {what}" in message:
            error.args = (message + _STATIC_HINT,)
        raise
    return jaxpr, tuple(consts), out_tree


def _trace_call_weakly(*args: Any) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    """As `_trace_call`, without a hold on the tracers that `fun` closes over: no cache may keep a trace alive."""
    jaxpr, consts, out_tree = _trace_call(*args)
    return jaxpr, tuple(weakref.ref(c) if isinstance(c, Tracer) else c for c in consts), out_tree


_trace_call_cached = weakref_lru_cache(_trace_call_weakly)


def _avals_of(fun: Callable[..., Any], call: Call, what: str) -> tuple[Any, ...]:
    """The types of the leaves. Raises `TypeError` for one that is no array, by its place among the arguments."""
    avals = []
    for i, x in enumerate(call.leaves):
        try:
            avals.append(typeof(x))
        except TypeError:
            marked = call.rebuild([j == i for j in range(len(call.leaves))])
            path = next(p for p, here in jax.tree_util.tree_leaves_with_path(marked) if here is True)
            where = ("args" if path[0] == jax.tree_util.SequenceKey(0) else "kwargs") + jax.tree_util.keystr(
                path[1:]
            )
            raise TypeError(
                f"`{what}`: {where} of `{getattr(fun, '__name__', type(fun).__name__)}` is {x!r} of type {type(x).__name__}, which "
                "is not a valid JAX type. Cheapest fix: close over what is no array (functools.partial), or split it off (in Equinox: "
                "eqx.partition(model, eqx.is_array))."
            ) from None
    return tuple(avals)


def trace_call(fun: Callable[..., Any], call: Call, what: str) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    """Trace `fun` for the avals of a call.

    Returns a jaxpr `(constants, leaves) -> outs`, the values of the constants, and the tree of the output. The
    trace is cached on the identity of `fun`, for as long as `fun` lives, and so does what it closes over.
    """
    avals = _avals_of(fun, call, what)
    key = (call.tree, call.static_args, call.static_kwargs, call.num_args, avals, what)
    if not _can_be_cached(fun, key):
        return _trace_call(fun, *key)
    for _ in range(2):
        jaxpr, weak_consts, out_tree = _trace_call_cached(fun, *key)
        consts = tuple(c() if isinstance(c, weakref.ref) else c for c in weak_consts)
        if all(c is not None for c in consts):
            return jaxpr, consts, out_tree
        _trace_call_cached.evict_weakref(fun)  # it closed over a tracer of a trace that has ended
    return _trace_call(fun, *key)


def _can_be_cached(fun: Callable[..., Any], key: tuple[Any, ...]) -> bool:
    _, static_args, static_kwargs, *_ = key
    if any(isinstance(s.value, Tracer) for _, s in (*static_args, *static_kwargs)):
        return False
    try:
        weakref.ref(fun)
        hash((fun, key))
    except TypeError:
        return False
    return True
