"""Derivatives of a program `(vec, mat, ints) -> (scalar, rest)`, for comparisons of two ways to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def value_and_grads(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(fun, argnums=(0, 1), has_aux=True)


def grad_of_vmap(fun: Callable[..., Any]) -> Callable[..., Any]:
    def summed(vec: Any, mat: Any, ints: Any) -> Any:
        mats = jnp.stack([mat, mat.T], axis=1)
        several = jnp.stack([ints, ints[::-1]])
        return jax.grad(lambda v, ms: jax.vmap(fun, (None, 1, 0))(v, ms, several)[0].sum(), (0, 1))(vec, mats)

    return summed


def forward_over_reverse(fun: Callable[..., Any]) -> Callable[..., Any]:
    def second(vec: Any, mat: Any, ints: Any) -> Any:
        return jax.jvp(jax.grad(lambda v: fun(v, mat, ints)[0]), (vec,), (jnp.cos(vec),))

    return second


def reverse_over_reverse(fun: Callable[..., Any]) -> Callable[..., Any]:
    def second(vec: Any, mat: Any, ints: Any) -> Any:
        def along(v: Any, m: Any) -> Any:
            return jnp.vdot(jax.grad(lambda v: fun(v, m, ints)[0])(v), jnp.sin(v))

        return jax.grad(along, (0, 1))(vec, mat)

    return second
