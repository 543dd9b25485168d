"""A transformer: plain JAX, unrolled or under `scan`, with unfused or fused attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.attention import CORE, fused, unfused
from benchmarks.models.model import Loss, Model, Wrap, stacked, unwrapped

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


Attention = Callable[[Any, Any, Any], Any]


def block(x: Any, p: dict[str, Any], attention: Attention = unfused) -> Any:
    """One pre-norm layer: causal attention and a GELU MLP."""
    batch, sequence, width = x.shape
    qkv = checkpoint_name(layer_norm(x, p["scale1"]) @ p["qkv"], "qkv")
    q, k, v = (
        t.reshape(batch, sequence, HEADS, width // HEADS).transpose(0, 2, 1, 3) for t in jnp.split(qkv, 3, -1)
    )
    attended = checkpoint_name(
        attention(q, k, v).transpose(0, 2, 1, 3).reshape(batch, sequence, width), "context"
    )
    x = x + checkpoint_name(attended @ p["out"], "out_proj")
    hidden = checkpoint_name(layer_norm(x, p["scale2"]) @ p["up"], "mlp")
    return x + jax.nn.gelu(hidden) @ p["down"]


def unrolled(wrap: Wrap = unwrapped, attention: Attention = unfused) -> Loss:
    """The loss with a Python loop over layers; `wrap` is applied to the block."""
    return stacked(wrap(partial(block, attention=attention)))


def scanned(wrap: Wrap = unwrapped, attention: Attention = unfused) -> Loss:
    """The loss with `scan` over layers; `wrap` is applied to the block."""
    wrapped = wrap(partial(block, attention=attention))

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


def model(*, scan: bool, fuse: bool) -> Model:
    """The transformer in one of its four forms."""
    attention = fused if fuse else unfused
    form = scanned if scan else unrolled
    kernel = (("attended", "log_sum"),) if fuse else ()
    return Model(
        make=lambda wrap: form(wrap, attention),
        args=example(unrolled=not scan),
        about=f"{LAYERS} layers {'under `scan`' if scan else 'unrolled'}, width {WIDTH}, {HEADS} heads, batch {BATCH} of {SEQUENCE} tokens, "
        f"{'fused' if fuse else 'unfused'} attention; a block is a layer",
        saved=(("context",), *kernel, ("qkv", "context", "mlp")),
        left_out=("mlp",),
        attention=CORE,
        fused=fuse,
    )
