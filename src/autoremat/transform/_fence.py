"""The fence of a stage: its reruns must not start before its cotangent has arrived.

Two kinds. A *barrier* (`optimization_barrier` over everything that the stage reads) costs nothing, but some compilers
drop it before they schedule, and common-subexpression elimination then undoes reruns. A *dependence* is true data flow:
reruns read `x - z` in place of `x`, where `z` is a zero that the compiler cannot know to be one, computed from an element
of the cotangent.

    z = |0 · s| if s is finite, else 0        s: one element of the cotangent

So `x - z` is `x` to every operation that reads it: not a number, infinities and negative zero included, whatever the
cotangent is. Only as many leaves as needed are treated so: every rerun must have one among its ancestors, and small ones
are preferred.

Of the bits of `x` two things may change, as in any arithmetic: a signaling NaN becomes a quiet one, and a device that
flushes subnormal numbers to zero (XLA's CPU threads do) flushes them here, before the operation that would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoremat._compat import FUSES_INTO_READERS, Jaxpr, Var
from autoremat.graph._trace import aval_size
from autoremat.transform._jaxpr import is_var


def fence_points(jaxpr: Jaxpr, num_leaves: int) -> list[bool]:
    """Which leaves of a linear part to make depend on the cotangent.

    `jaxpr: (leaves, tangents) -> tangents out`. The reruns are its equations that depend on no tangent. After this each
    of them depends on the cotangent, unless it reads constants alone.

    One pass: an equation that is reached when another leaf is chosen later would have chosen that leaf itself.
    """
    leaves = set(jaxpr.invars[:num_leaves])
    linear: set[Any] = set(jaxpr.invars[num_leaves:])
    fenced: set[Var] = set()
    reached: set[Any] = set()
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if is_var(v)]
        if any(v in linear for v in reads):
            linear.update(eqn.outvars)
            continue
        if not any(v in reached for v in reads):
            candidates = [v for v in reads if v in leaves and _can_carry(v.aval)]
            if not candidates:
                continue
            chosen = min(candidates, key=lambda v: aval_size(v.aval)[2])
            fenced.add(chosen)
            reached.add(chosen)
        reached.update(eqn.outvars)
    return [v in fenced for v in jaxpr.invars[:num_leaves]]


def _can_carry(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.prng_key))


def hidden_zero(cotangents: Sequence[Any], start: Any = None) -> Any:
    """A float32 zero, never negative, that depends on an element of each floating-point cotangent; `None` without any.

    With `start`, another such zero, the elements are looked up at an index that is computed from it: a compiler that knows the
    index computes the one element by itself, and puts off the rest.
    """
    zero = None
    for ct in cotangents:
        if not jnp.issubdtype(ct.dtype, jnp.inexact) or ct.size == 0:
            continue
        # It is a constant to higher derivatives: the derivative of a `where` can spread what its value does not.
        element = jnp.real(lax.stop_gradient(_element(ct, start))).astype(jnp.float32)
        own = jnp.where(jnp.isfinite(element), jnp.abs(element * 0.0), 0.0)
        zero = own if zero is None else zero + own
    return zero


def _element(x: Any, start: Any) -> Any:
    if start is None:
        return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    index = (start != 0).astype(jnp.int32)
    return lax.dynamic_slice(x, (index,) * x.ndim, (1,) * x.ndim).reshape(())


def depend_on(x: Any, zero: Any) -> Any:
    """`x`, unchanged, but computed from the hidden zero as well."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(depend_on(jax.random.key_data(x), zero), impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x - zero.astype(x.dtype)
    if x.dtype == bool:
        return x ^ (zero != 0)
    return x ^ zero.astype(x.dtype)


def finish_before(outs: Sequence[Any], carried: Sequence[bool]) -> list[Any]:
    """Let the carried outputs, for which earlier stages wait, depend on all the others.

    Otherwise a scheduler may put off the gradients of parameters, and with them what they read, until all stages have run.
    The barrier keeps the compiler from computing the one element that is looked at by itself.
    """
    others = [o for o, c in zip(outs, carried, strict=True) if not c]
    if not others or not any(carried):
        return list(outs)
    zero = hidden_zero(
        lax.optimization_barrier(others), hidden_zero([o for o, c in zip(outs, carried, strict=True) if c])
    )
    if zero is None:
        return list(outs)
    tie = _touch if FUSES_INTO_READERS else depend_on
    return [tie(o, zero) if c else o for o, c in zip(outs, carried, strict=True)]


def _touch(x: Any, zero: Any) -> Any:
    """As `depend_on`, by writing one element of `x` again: what it is written into is an array that is there.

    Some compilers compute `x - z` anew in each of its readers, and keep all that `x` is computed from until the last.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.size == 0 or not x.ndim:
        return depend_on(x, zero)
    index = ((zero != 0).astype(jnp.int32),) * x.ndim
    element = lax.dynamic_slice(x, index, (1,) * x.ndim)
    return lax.dynamic_update_slice(x, depend_on(element, zero), index)


def policy_for_linear(policy: Any, nonzero: Sequence[bool]) -> Any:
    """A planned policy knows its borders, inputs that earlier stages make, by position; a linear part has a tangent for each
    input that `nonzero` marks."""
    borders = getattr(policy, "borders", ())
    if not borders:
        return policy
    rank = {i: sum(nonzero[:i]) for i, nz in enumerate(nonzero) if nz}
    return replace(policy, carried=tuple(rank[i] for i in borders if i in rank))


def policy_without_tangents(policy: Any, used: Sequence[bool]) -> Any:
    """The policy of a linear part after dead-code elimination has dropped some of its tangents."""
    carried = getattr(policy, "carried", ())
    if not carried or all(used):
        return policy
    return replace(policy, carried=tuple(sum(used[:i]) for i in carried if used[i]))
