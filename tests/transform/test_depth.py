"""Checkpoints that lie in each other, as deeply as a plan near the floor has them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoremat as ar
from autoremat._depth import one_level_deeper

DEPTH = 100
"""More than Python's default limit leaves room for: JAX's own derivation of nested checkpoints ends between 48 and 100."""


def nested(depth: int, wrap: Callable[..., Any]) -> Callable[[Any], Any]:
    fun: Callable[[Any], Any] = jnp.sin
    for _ in range(depth):

        def outer(x: Any, inner: Callable[[Any], Any] = fun) -> Any:
            return jnp.sin(inner(x)) * 1.1

        fun = wrap(outer)
    return fun


def test_many_levels() -> None:
    before = sys.getrecursionlimit()
    x = jnp.array([0.3, 0.7])
    found = jax.jit(jax.grad(lambda x: nested(DEPTH, ar.checkpoint)(x).sum()))(x)
    assert jnp.allclose(found, jax.grad(lambda x: nested(DEPTH, lambda f: f)(x).sum())(x))
    assert sys.getrecursionlimit() == before


def test_the_limit_is_raised_by_level_and_given_back() -> None:
    before = sys.getrecursionlimit()
    with one_level_deeper():
        first = sys.getrecursionlimit()
        with one_level_deeper():
            assert sys.getrecursionlimit() > first > before
        with pytest.raises(KeyError), one_level_deeper():
            raise KeyError
    assert sys.getrecursionlimit() == before


def test_a_thread_that_ends_leaves_others_their_room() -> None:
    before = sys.getrecursionlimit()
    inside, done = threading.Event(), threading.Event()

    def deep() -> None:
        with one_level_deeper(), one_level_deeper():
            inside.set()
            done.wait(10)

    other = threading.Thread(target=deep)
    other.start()
    inside.wait(10)
    raised = sys.getrecursionlimit()
    with one_level_deeper():
        pass
    assert sys.getrecursionlimit() == raised
    done.set()
    other.join()
    assert sys.getrecursionlimit() == before
