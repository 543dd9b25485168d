"""A Mamba-like model: layers with a gated, selective state-space recurrence, computed by an associative scan.

Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023; its short convolution is left out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.model import Loss, Model, Wrap, stacked

LAYERS, BATCH, SEQUENCE, WIDTH, INNER, STATES = 4, 2, 256, 128, 256, 8


def init(key: Any) -> list[dict[str, Any]]:
    """Parameters of each layer."""

    def layer(key: Any) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 4))

        def normal(rows: int, columns: int) -> Any:
            return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

        return {
            "into": normal(WIDTH, 2 * INNER),
            "select": normal(INNER, 2 * STATES),
            "pace": normal(INNER, INNER),
            "out": normal(INNER, WIDTH),
            "decay": jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATES + 1), (INNER, STATES))),
            "skip": jnp.ones(INNER),
            "scale": jnp.ones(WIDTH),
        }

    return [layer(k) for k in jax.random.split(key, LAYERS)]


def recurrence(decay: Any, into: Any) -> Any:
    """`h[t] = decay[t] * h[t - 1] + into[t]` along axis 1."""

    def combine(early: tuple[Any, Any], late: tuple[Any, Any]) -> tuple[Any, Any]:
        return early[0] * late[0], early[1] * late[0] + late[1]

    return jax.lax.associative_scan(combine, (decay, into), axis=1)[1]


def block(x: Any, p: dict[str, Any]) -> Any:
    """One layer: what a channel remembers, and for how long, depends on the input."""
    normed = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    u, gate = jnp.split(checkpoint_name(normed @ p["into"], "into"), 2, -1)
    u = jax.nn.silu(u)
    pace = jax.nn.softplus(checkpoint_name(u @ p["pace"], "pace"))
    write, read = jnp.split(checkpoint_name(u @ p["select"], "select"), 2, -1)
    decay = jnp.exp(-pace[..., None] * jnp.exp(p["decay"]))
    states = recurrence(decay, (pace * u)[..., None] * write[..., None, :])
    states = checkpoint_name(states, "states")
    y = (states * read[..., None, :]).sum(-1) + u * p["skip"]
    return x + (y * jax.nn.silu(gate)) @ p["out"]


def make(wrap: Wrap) -> Loss:
    """The mean square of the output; `wrap` is applied to the block."""
    return stacked(wrap(block))


def model() -> Model:
    """The model with a random batch."""
    keys = jax.random.split(jax.random.key(0))
    return Model(
        make=make,
        args=(init(keys[0]), jax.random.normal(keys[1], (BATCH, SEQUENCE, WIDTH))),
        about=f"{LAYERS} layers, width {WIDTH}, {INNER} channels of {STATES} states, batch {BATCH} of {SEQUENCE} tokens, `associative_scan` over "
        "time; a block is a layer",
        saved=(("into", "pace", "select"), ("into", "pace", "select", "states")),
        left_out=("states",),
    )
