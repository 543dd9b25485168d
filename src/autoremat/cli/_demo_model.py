"""The demo's model and data: a small GPT over bytes, in plain JAX, on text that ships with Python.

Nothing here knows of autoremat. `loss` is an ordinary function of parameters and a batch; the only thing that the
three ways of the demo differ in is what is wrapped round it, or round its `block`.
"""

# pyright: basic
# JAX is typed in part only.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
Block = Callable[[jax.Array, Params], jax.Array]
BYTES = 256
"""Size of the vocabulary: a token is a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model and of a batch. `sequence` is in bytes of text."""

    layers: int = 6
    width: int = 192
    heads: int = 6
    batch: int = 4
    sequence: int = 256


# ---------------------------------------------------------------------------------------------------------------- model


def init(key: jax.Array, size: Size) -> Params:
    """Parameters, in float32. Those of the layers are stacked: their first axis is the layer."""
    keys = iter(jax.random.split(key, 6))
    width, layers = size.width, size.layers

    def normal(*shape: int, scale: float) -> jax.Array:
        return jax.random.normal(next(keys), shape) * scale

    # Both matrices that write to the residual stream start smaller, as many layers add up there.
    last = (width * 2 * layers) ** -0.5
    return {
        "embed": normal(BYTES, width, scale=0.02),
        "position": normal(size.sequence, width, scale=0.02),
        "layers": {
            "qkv": normal(layers, width, 3 * width, scale=width**-0.5),
            "out": normal(layers, width, width, scale=last),
            "up": normal(layers, width, 4 * width, scale=width**-0.5),
            "down": normal(layers, 4 * width, width, scale=last / 2),
            "norm1": jnp.ones((layers, width)),
            "norm2": jnp.ones((layers, width)),
        },
        "norm": jnp.ones(width),
    }


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalization without a bias."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale


def attention(x: jax.Array, p: Params, heads: int) -> jax.Array:
    """Causal self-attention: each byte looks at those before it."""
    batch, sequence, width = x.shape
    qkv = (x @ p["qkv"]).reshape(batch, sequence, 3, heads, width // heads)
    query, key, value = jnp.moveaxis(qkv, (2, 3), (0, 2))
    scores = query @ key.mT * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return jnp.moveaxis(weights @ value, 1, 2).reshape(batch, sequence, width) @ p["out"]


def make_block(heads: int) -> Block:
    """One layer, `(x, its parameters) -> x`."""

    def block(x: jax.Array, p: Params) -> jax.Array:
        x = x + attention(layer_norm(x, p["norm1"]), p, heads)
        return x + jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    return block


def make_loss(block: Block) -> Callable[..., jax.Array]:
    """The mean cross-entropy of the next byte, in nats: `loss(params, batch)`, a batch being (batch, sequence + 1) bytes."""

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = params["embed"][inputs] + params["position"]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        logits = layer_norm(x, params["norm"]) @ params["embed"].T
        # By a sum over a one-hot row, so that the derivative is no scatter.
        right = (logits * jax.nn.one_hot(targets, BYTES)).sum(-1)
        return (jax.nn.logsumexp(logits, axis=-1) - right).mean()

    return loss


# ----------------------------------------------------------------------------------------------------------------- data


def read_text() -> np.ndarray:
    """The manual that `help()` shows, some 700 kB of English and Python, as bytes."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batches(text: np.ndarray, size: Size, seed: int = 0) -> Iterator[np.ndarray]:
    """Random pieces of the text, (batch, sequence + 1) bytes as int32; the same ones for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(len(text) - size.sequence - 1, size=size.batch)
        yield np.stack([text[s : s + size.sequence + 1] for s in starts]).astype(np.int32)
