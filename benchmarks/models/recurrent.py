"""An LSTM of several layers: a `scan` over time in each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.model import Loss, Model, Wrap

LAYERS, BATCH, STEPS, WIDTH = 3, 32, 128, 192


def init(key: Any) -> list[dict[str, Any]]:
    """Parameters of each layer."""

    def layer(key: Any) -> dict[str, Any]:
        into, hidden = jax.random.normal(key, (2, WIDTH, 4 * WIDTH)) * WIDTH**-0.5
        return {"into": into, "hidden": hidden, "bias": jnp.zeros(4 * WIDTH)}

    return [layer(k) for k in jax.random.split(key, LAYERS)]


def cell(state: tuple[Any, Any], x: Any, hidden: Any) -> tuple[tuple[Any, Any], Any]:
    """One step of one layer. `x` is what comes from the layer below, multiplied already."""
    before, memory = state
    gates = checkpoint_name(x + before @ hidden, "gates")
    into, forget, new, out = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
    memory = checkpoint_name(memory, "memory")
    after = jax.nn.sigmoid(out) * jnp.tanh(memory)
    return (after, memory), after


def make(wrap: Wrap) -> Loss:
    """The mean square of the last layer's outputs; `wrap` is applied to the cell."""
    wrapped = wrap(cell)

    def loss(params: list[dict[str, Any]], x: Any) -> Any:
        for p in params:
            zero = jnp.zeros(x.shape[1:])
            xs = x @ p["into"] + p["bias"]
            _, x = jax.lax.scan(lambda state, x, p=p: wrapped(state, x, p["hidden"]), (zero, zero), xs)
        return (x**2).mean()

    return loss


def model() -> Model:
    """The LSTM with a random batch, time first."""
    keys = jax.random.split(jax.random.key(0))
    return Model(
        make=make,
        args=(init(keys[0]), jax.random.normal(keys[1], (STEPS, BATCH, WIDTH))),
        about=f"{LAYERS} layers, width {WIDTH}, batch {BATCH}, `scan` over {STEPS} steps in each layer; a block is the cell",
        saved=(("memory",), ("gates", "memory")),
        left_out=("gates",),
    )
