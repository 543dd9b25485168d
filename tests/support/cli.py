"""What the tests of the command line share: the result of a call, a file to point it at."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What a call left behind."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """stderr with every run of spaces as one: messages may be wrapped anywhere."""
        return " ".join(self.err.split())


Call = Callable[..., Result]

MODEL = """
import jax.numpy as jnp

def block(x, w):
    return jnp.sin(jnp.sin(x @ w))

def loss(w, x):
    for _ in range(6):
        x = block(x, w)
    return x.sum()

def example():
    return loss, (jnp.eye(16), jnp.ones((4096, 16)))

def as_dict():
    def with_aux(x, w):
        return loss(w, x), {"x": x}
    return {"fun": with_aux, "args": [jnp.ones((4096, 16)), jnp.eye(16)], "argnums": 1, "has_aux": True}

def chatty():
    print("a word from the example")
    def noisy(w, x):
        print("a word from the trace")
        return loss(w, x)
    return noisy, (jnp.eye(16), jnp.ones((4096, 16)))

def step():
    import jax

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)
    return jax.jit(step, donate_argnums=0), (jnp.eye(16), jnp.ones((4096, 16)))

number = 3
"""
