"""A Llama-like decoder: plain JAX, unrolled or under `scan`.

The shape of pytorch/pytorch#197838: 32 layers, width 256, a gated MLP of 688, 8 heads, 1,000 tokens, float32, two sequences of 1,024;
its loss is the sum of the last hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch."""

    layers: int = 32
    width: int = 256
    mlp: int = 688
    heads: int = 8
    vocabulary: int = 1000
    batch: int = 2
    sequence: int = 1024


def init(key: Any, shape: Shape) -> dict[str, Any]:
    """Stacked parameters, leading axis the layer."""
    keys = iter(jax.random.split(key, 8))

    def normal(rows: int, columns: int) -> Any:
        return jax.random.normal(next(keys), (shape.layers, rows, columns)) * rows**-0.5

    return {
        "embed": jax.random.normal(next(keys), (shape.vocabulary, shape.width)),
        "layers": {
            "q": normal(shape.width, shape.width),
            "k": normal(shape.width, shape.width),
            "v": normal(shape.width, shape.width),
            "o": normal(shape.width, shape.width),
            "gate": normal(shape.width, shape.mlp),
            "up": normal(shape.width, shape.mlp),
            "down": normal(shape.mlp, shape.width),
            "norm1": jnp.ones((shape.layers, shape.width)),
            "norm2": jnp.ones((shape.layers, shape.width)),
        },
        "norm": jnp.ones(shape.width),
    }


def rms_norm(x: Any, scale: Any) -> Any:
    """Root-mean-square normalization."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x: Any) -> Any:
    """Rotary position embedding of (batch, heads, sequence, width of a head)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def block(x: Any, p: dict[str, Any], heads: int) -> Any:
    """One layer: causal attention with rotary positions, and a gated MLP."""
    batch, sequence, width = x.shape
    h = rms_norm(x, p["norm1"])
    q, k, v = (
        (h @ p[name]).reshape(batch, sequence, heads, width // heads).swapaxes(1, 2)
        for name in ("q", "k", "v")
    )
    scores = rotate(q) @ rotate(k).swapaxes(-1, -2) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    x = x + (weights @ v).swapaxes(1, 2).reshape(batch, sequence, width) @ p["o"]
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def make_loss(shape: Shape, *, scan: bool) -> Any:
    """`loss(params, tokens)`: the sum of the last hidden state. Under `scan` the parameters of all layers are stacked, else each has its own."""

    def loss(params: dict[str, Any], tokens: Any) -> Any:
        x = params["embed"][tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p, shape.heads), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(x, p, shape.heads)
        return rms_norm(x, params["norm"]).sum()

    return loss


def example(shape: Shape, *, scan: bool) -> tuple[Any, Any]:
    """Shapes of parameters and tokens; nothing is computed."""
    params = jax.eval_shape(lambda: init(jax.random.key(0), shape))
    if not scan:
        params["layers"] = [jax.tree.map(_of_one, params["layers"])] * shape.layers
    return params, jax.ShapeDtypeStruct((shape.batch, shape.sequence), jnp.int32)


def _of_one(stacked: Any) -> Any:
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
