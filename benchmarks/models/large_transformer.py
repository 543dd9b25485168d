"""A transformer of a size for accelerators, of shapes alone: no array is made.

Layers of width 1024 in bfloat16 with 16 heads, unfused causal attention whose scores are float32, over 1,024 tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.model import Loss, Model, Wrap, stacked, unwrapped

SEQUENCE, WIDTH, HEADS = 1024, 1024, 16


def layer_norm(x: Any, scale: Any) -> Any:
    """Layer normalization in float32 without bias."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normal = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return (normal * scale).astype(x.dtype)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, operation by operation; arrays are (batch, heads, sequence, width of a head)."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)


def block(x: Any, p: dict[str, Any]) -> Any:
    """One pre-norm layer: attention and a GELU MLP."""
    batch, sequence, width = x.shape
    qkv = checkpoint_name(layer_norm(x, p["scale1"]) @ p["qkv"], "qkv")
    q, k, v = (
        t.reshape(batch, sequence, HEADS, width // HEADS).transpose(0, 2, 1, 3) for t in jnp.split(qkv, 3, -1)
    )
    attended = attention(q, k, v).transpose(0, 2, 1, 3).reshape(batch, sequence, width)
    x = x + checkpoint_name(attended, "context") @ p["out"]
    hidden = checkpoint_name(layer_norm(x, p["scale2"]) @ p["up"], "mlp")
    return x + jax.nn.gelu(hidden) @ p["down"]


def _shapes(layers: tuple[int, ...]) -> dict[str, Any]:
    matrices = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    shapes = {name: jax.ShapeDtypeStruct((*layers, *s), jnp.bfloat16) for name, s in matrices.items()}
    scales = {name: jax.ShapeDtypeStruct((*layers, WIDTH), jnp.float32) for name in ("scale1", "scale2")}
    return shapes | scales


def _scanned(wrap: Wrap = unwrapped) -> Loss:
    wrapped = wrap(block)

    def loss(params: dict[str, Any], x: Any) -> Any:
        y, _ = jax.lax.scan(lambda carry, p: (wrapped(carry, p), None), x, params)
        return (y.astype(jnp.float32) ** 2).mean()

    return loss


def model(*, scan: bool, layers: int, batch: int) -> Model:
    """The transformer, unrolled or under `scan`."""
    params = _shapes((layers,)) if scan else [_shapes(()) for _ in range(layers)]
    return Model(
        make=_scanned if scan else lambda wrap: stacked(wrap(partial(block))),
        args=(params, jax.ShapeDtypeStruct((batch, SEQUENCE, WIDTH), jnp.bfloat16)),
        about=f"{layers} layers {'under `scan`' if scan else 'unrolled'}, width {WIDTH}, {HEADS} heads, bfloat16 with scores in float32, "
        f"batch {batch} of {SEQUENCE} tokens",
        saved=(("context",), ("qkv", "context", "mlp")),
        left_out=("mlp",),
    )
