"""The fence of a stage: its reruns must not start before its cotangent has arrived.

Two kinds. A *barrier* (`optimization_barrier` over everything that the stage reads) costs nothing, but some compilers drop it before
they schedule, and common-subexpression elimination then undoes reruns. A *dependence* is true data flow: reruns read `x - z`
in place of `x`, where `z` is a zero that the compiler cannot know to be one, computed from an element of the cotangent.

    z = |0 · s| if s is finite, else 0        s: one element of the cotangent

So `x - z` is `x`, bit for bit: not a number, infinities and negative zero included, whatever the cotangent is. Only as many
leaves as needed are treated so: every rerun must have one among its ancestors, and small ones are preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoremat._compat import Jaxpr, JaxprEqn, Var
from autoremat.graph._trace import aval_size
from autoremat.transform._jaxpr import is_var


def fence_points(jaxpr: Jaxpr, num_leaves: int) -> list[bool]:
    """Which leaves of a linear part to make depend on the cotangent.

    `jaxpr: (leaves, tangents) -> tangents out`. The reruns are its equations that depend on no tangent.
    """
    leaves = jaxpr.invars[:num_leaves]
    reruns = _reruns(jaxpr, num_leaves)
    fenced: set[Var] = set()
    for eqn in reruns:
        reads = [v for v in eqn.invars if is_var(v)]
        if not reads or any(_depends(v, fenced, reruns) for v in reads):
            continue
        candidates = [v for v in reads if v in set(leaves) and _can_carry(v.aval)]
        if candidates:
            fenced.add(min(candidates, key=lambda v: aval_size(v.aval)[2]))
    return [v in fenced for v in leaves]


def _reruns(jaxpr: Jaxpr, num_leaves: int) -> list[JaxprEqn]:
    linear: set[Any] = set(jaxpr.invars[num_leaves:])
    reruns = []
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in linear for v in eqn.invars):
            linear.update(eqn.outvars)
        else:
            reruns.append(eqn)
    return reruns


def _depends(v: Any, fenced: set[Var], reruns: Sequence[JaxprEqn]) -> bool:
    reached: set[Any] = set(fenced)
    for eqn in reruns:
        if any(is_var(x) and x in reached for x in eqn.invars):
            reached.update(eqn.outvars)
    return v in reached


def _can_carry(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == bool)


def hidden_zero(cotangents: Sequence[Any]) -> Any:
    """A float32 zero, never negative, that depends on an element of each floating-point cotangent."""
    zero = None
    for ct in cotangents:
        if not jnp.issubdtype(ct.dtype, jnp.floating) or ct.size == 0:
            continue
        element = lax.slice(ct, (0,) * ct.ndim, (1,) * ct.ndim).reshape(()).astype(jnp.float32)
        own = jnp.where(jnp.isfinite(element), jnp.abs(element * 0.0), 0.0)
        zero = own if zero is None else zero + own
    return zero


def depend_on(x: Any, zero: Any) -> Any:
    """`x`, unchanged, but computed from the hidden zero as well."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x - zero.astype(x.dtype)
    if x.dtype == bool:
        return x ^ (zero != 0)
    return x ^ zero.astype(x.dtype)
