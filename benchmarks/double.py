"""A program in double precision, whatever the library that wrote it rounds to.

In single precision a deep network with batch normalization amplifies rounding so much that two correct programs disagree in the
second digit of the gradient. Keras casts to float32 inside batch normalization even where all else is float64, so the traced
program is run with every float32 replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


def widen(x: Any) -> Any:
    """An array or a shape in float64 if it was float32."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.float64) if x.dtype == jnp.float32 else x
    return jnp.asarray(x, jnp.float64) if jnp.result_type(x) == jnp.float32 else x


def in_double(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fun` in double precision, and its arguments. Call it, and use both, under `jax.enable_x64(True)`.

    `fun` may call JAX's primitives directly, under `jit` and under `custom_jvp`, whose rule is replaced by the derivative of its
    function.
    """
    with jax.enable_x64(False):
        closed = jax.make_jaxpr(fun)(*args)
        structure = jax.tree.structure(jax.eval_shape(fun, *args))

    def doubled(*wide: Any) -> Any:
        outs = _run(closed.jaxpr, [widen(c) for c in closed.consts], jax.tree.leaves(wide))
        return jax.tree.unflatten(structure, outs)

    return doubled, tuple(jax.tree.map(widen, a) for a in args)


def _run(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return widen(atom.val) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive.name]]
            outs = _run(inner.jaxpr, [widen(c) for c in inner.consts], inputs)
        else:
            params = {k: _wide_parameter(v) for k, v in eqn.params.items()}
            outs = eqn.primitive.bind(*inputs, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _wide_parameter(value: Any) -> Any:
    try:
        return jnp.dtype("float64") if value is not None and jnp.dtype(value) == jnp.float32 else value
    except TypeError:
        return value
