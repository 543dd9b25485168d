"""The transformer of the policy benchmark: plain JAX, unrolled or under `scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYERS, BATCH, SEQUENCE, WIDTH, HEADS = 6, 4, 256, 256, 8


def init(key: Any, layers: int = LAYERS, width: int = WIDTH) -> dict[str, Any]:
    """Stacked parameters, leading axis the layer."""
    keys = jax.random.split(key, 4)

    def normal(k: Any, *shape: int) -> Any:
        return jax.random.normal(k, (layers, *shape)) * shape[0] ** -0.5

    return {
        "qkv": normal(keys[0], width, 3 * width),
        "out": normal(keys[1], width, width),
        "up": normal(keys[2], width, 4 * width),
        "down": normal(keys[3], 4 * width, width),
        "scale1": jnp.ones((layers, width)),
        "scale2": jnp.ones((layers, width)),
    }


def layer_norm(x: Any, scale: Any) -> Any:
    """Layer normalization without bias."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale


def block(x: Any, p: dict[str, Any]) -> Any:
    """One pre-norm layer: causal attention and a GELU MLP."""
    batch, sequence, width = x.shape
    qkv = checkpoint_name(layer_norm(x, p["scale1"]) @ p["qkv"], "qkv")
    q, k, v = (
        t.reshape(batch, sequence, HEADS, width // HEADS).transpose(0, 2, 1, 3) for t in jnp.split(qkv, 3, -1)
    )
    scores = (q @ k.swapaxes(-1, -2)) * (width // HEADS) ** -0.5
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    attended = checkpoint_name((weights @ v).transpose(0, 2, 1, 3).reshape(batch, sequence, width), "context")
    x = x + checkpoint_name(attended @ p["out"], "out_proj")
    hidden = checkpoint_name(layer_norm(x, p["scale2"]) @ p["up"], "mlp")
    return x + jax.nn.gelu(hidden) @ p["down"]


def unrolled(wrap: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
    """The loss with a Python loop over layers; `wrap` is applied to the block."""
    wrapped = wrap(block)

    def loss(params: list[dict[str, Any]], x: Any) -> Any:
        for p in params:
            x = wrapped(x, p)
        return (x**2).mean()

    return loss


def scanned(wrap: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
    """The loss with `scan` over layers; `wrap` is applied to the block."""
    wrapped = wrap(block)

    def loss(params: dict[str, Any], x: Any) -> Any:
        y, _ = jax.lax.scan(lambda carry, p: (wrapped(carry, p), None), x, params)
        return (y**2).mean()

    return loss


def example(*, unrolled: bool) -> tuple[Any, Any]:
    """Parameters (a list of layers, or stacked for `scan`) and a batch of activations."""
    params = init(jax.random.key(0))
    if unrolled:
        params = [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(LAYERS)]
    return params, jax.random.normal(jax.random.key(1), (BATCH, SEQUENCE, WIDTH))
