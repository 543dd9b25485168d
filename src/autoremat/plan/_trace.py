"""Trace the function to plan for, and check that there is something to plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import Jaxpr, JaxprEqn, Var, close_jaxpr, dce, has_tangent, new_jaxpr, open_jaxpr
from autoremat._errors import DifferentiationError
from autoremat.graph import Graph, fingerprint
from autoremat.graph._trace import trace_graph
from autoremat.transform._jaxpr import CHECKPOINTS, inline_calls, subjaxprs
from autoremat.transform._trace_user import bind_call, trace_call


@dataclass(frozen=True, eq=False)
class Traced:
    """A function as a program: `jaxpr: (constants, leaves) -> outs`, calls inlined, dead code removed.

    `differentiated` are the inputs that `argnums` selects, `graph` the forward graph, `fingerprint` its name. `dissolved` counts
    the checkpoints that the function had; `written: (constants, leaves) -> outs` is the program with them, as the user wrote it.
    """

    jaxpr: Jaxpr
    constants: tuple[Any, ...]
    leaves: tuple[Any, ...]
    out_tree: Any
    differentiated: frozenset[Var]
    graph: Graph
    fingerprint: str
    name: str
    dissolved: int
    written: Jaxpr
    written_constants: tuple[Any, ...]


def trace(
    fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], kwargs: dict[str, Any] | None = None
) -> Traced:
    """Trace `fun` for the shapes of `args`. Arguments may be `jax.ShapeDtypeStruct`s."""
    call = bind_call(fun, tuple(args), dict(kwargs or {}), (), ())
    leaf_argnum = [i for i, a in enumerate(args) for _ in jax.tree.leaves(a)]
    opened, constants, out_tree = trace_call(fun, call, "autoremat.plan")
    inlined, hoisted = inline_calls(opened, dissolve_checkpoints=True)
    inlined = flatten_bodies(inlined)
    pruned, _ = dce(inlined, [True] * len(inlined.outvars))
    # Dead-code elimination drops inputs; a plan keeps all of them, so that the arguments stay in place.
    kept = inlined.replace(eqns=pruned.eqns, effects=pruned.effects)
    leading = len(hoisted) + len(constants)
    chosen = frozenset(
        v
        for i, v in enumerate(kept.invars[leading:])
        if i < len(leaf_argnum) and leaf_argnum[i] in argnums and has_tangent(v.aval)
    )
    graph, _ = trace_graph(kept)
    return Traced(
        jaxpr=kept,
        constants=(*hoisted, *constants),
        leaves=call.leaves,
        out_tree=out_tree,
        differentiated=chosen,
        graph=graph,
        fingerprint=fingerprint(graph),
        name=getattr(fun, "__name__", type(fun).__name__),
        dissolved=count_checkpoints(opened),
        written=opened,
        written_constants=tuple(constants),
    )


def flatten_bodies(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls and dissolve checkpoints inside loops and branches, too."""
    return new_jaxpr(jaxpr.invars, jaxpr.outvars, [_flatten_eqn(e) for e in jaxpr.eqns], jaxpr)


def _flatten_eqn(eqn: JaxprEqn) -> JaxprEqn:
    key = {"scan": "jaxpr", "cond": "branches", "while": "body_jaxpr"}.get(eqn.primitive.name)
    if key is None:
        return eqn
    value = eqn.params[key]
    flat = tuple(map(_flatten_body, value)) if isinstance(value, tuple) else _flatten_body(value)
    return eqn.replace(params=dict(eqn.params, **{key: flat}))


def _flatten_body(body: Any) -> Any:
    opened, consts = open_jaxpr(body)
    if consts:
        return body
    inlined, hoisted = inline_calls(opened, dissolve_checkpoints=True)
    return body if hoisted else close_jaxpr(flatten_bodies(inlined))


def count_checkpoints(jaxpr: Jaxpr) -> int:
    """How many checkpoints the function has already; a plan replaces them."""
    return sum(
        (e.primitive.name in CHECKPOINTS) + sum(map(count_checkpoints, subjaxprs(e))) for e in jaxpr.eqns
    )


def argnum_tuple(argnums: int | Sequence[int], num_args: int) -> tuple[int, ...]:
    """`argnums` as in `jax.grad`, negatives resolved. Raises `DifferentiationError` if one is out of range."""
    given = (argnums,) if isinstance(argnums, int) else argnums
    valid = isinstance(given, (tuple, list)) and all(
        isinstance(n, int) and not isinstance(n, bool) and -num_args <= n < num_args for n in given
    )
    if not valid or not given or len({n % num_args for n in given}) < len(given):
        raise DifferentiationError(
            f"`autoremat.plan(argnums=...)`: got {argnums!r}, but the function was given {num_args} positional arguments. "
            f"Cheapest fix: an int, or a tuple of distinct ints, from 0 to {max(0, num_args - 1)}."
        )
    return tuple(n % num_args for n in given)


def check_differentiable(
    traced: Traced, args: Sequence[Any], argnums: tuple[int, ...], has_aux: bool
) -> None:
    """Raise `DifferentiationError` where `jax.value_and_grad` would fail, with what to do about it."""
    if not traced.differentiated:
        dtypes = sorted({str(v.aval.dtype) for v in traced.jaxpr.invars if hasattr(v.aval, "dtype")})
        raise DifferentiationError(
            f"`autoremat.plan({traced.name}, ...)`: argument(s) {argnums} hold no floating-point array, so there is nothing "
            f"to differentiate; dtypes found: {dtypes}. Cheapest fix: set `argnums` to the argument with the parameters."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path({n: args[n] for n in argnums}):
        dtype = jax.numpy.result_type(leaf)
        if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
            raise DifferentiationError(
                f"`autoremat.plan({traced.name}, ...)`: argument {path[0].key}{jax.tree_util.keystr(path[1:])} is {dtype}, and "  # type: ignore[attr-defined]
                "`jax.grad` differentiates floating-point arrays only. Cheapest fix: pass counters, keys and flags in an argument of "
                "their own."
            )
    out = jax.tree.unflatten(traced.out_tree, traced.jaxpr.outvars)
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise DifferentiationError(
                f"`autoremat.plan({traced.name}, has_aux=True)` needs a function that returns (loss, aux); it returns "
                f"{traced.out_tree}."
            )
        out = out[0]
    leaves = jax.tree.leaves(out)
    avals = [v.aval for v in leaves]
    if (
        len(avals) != 1
        or avals[0].shape != ()
        or not jax.numpy.issubdtype(avals[0].dtype, jax.numpy.floating)
    ):
        got = ", ".join(a.str_short(short_dtypes=True) for a in avals[:4])
        hint = (
            " If it returns (loss, aux), pass has_aux=True."
            if len(avals) > 1
            else " Cheapest fix: return its mean or sum."
        )
        raise DifferentiationError(
            f"`autoremat.plan({traced.name}, ...)` needs a function that returns one floating-point scalar, as "
            f"`jax.grad` does; it returns {len(avals)} array(s): {got}.{hint}"
        )
