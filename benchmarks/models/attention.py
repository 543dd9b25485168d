"""Causal attention, in two ways: every step a JAX operation of its own, or as one kernel with a derivative of its own.

Arrays are (batch, heads, sequence, width of a head). What lies between the projections is in the scope `CORE`, so that it can be told
apart in an emitted program.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

CORE = "attention_core"

BLOCK = 64
"""Keys that the fused kernel looks at in one step."""

_MASKED = -1e30


def unfused(q: Any, k: Any, v: Any) -> Any:
    """Scores, softmax and weighted sum as they are written in a textbook: the scores are arrays of the program."""
    with jax.named_scope(CORE):
        scores = (q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
        mask = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, _MASKED), -1)
        return weights @ v


@jax.custom_vjp
def fused(q: Any, k: Any, v: Any) -> Any:
    """The same, block by block of the keys, as flash attention does: no array has the size of the scores.

    For the backward pass it keeps q, k, v, its output and the logarithm of the sum of exponentials, tagged `"attended"` and
    `"log_sum"`; the backward pass makes the scores of one block at a time.

    Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022.
    """
    return _forward(q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The output, and the logarithm of the sum of exponentials of each row of scores."""

    def step(carry: tuple[Any, Any, Any], block: tuple[Any, Any, Any]) -> tuple[tuple[Any, Any, Any], None]:
        top, total, weighted = carry
        start, keys, values = block
        scores = _scores(q, keys, start)
        higher = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(top - higher)
        total = total * shrink + weights.sum(-1)
        return (higher, total, weighted * shrink[..., None] + weights @ values), None

    with jax.named_scope(CORE):
        rows = q.shape[:-1]
        start = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros_like(q))
        (top, total, weighted), _ = jax.lax.scan(step, start, _blocks(k, v))
        return weighted / total[..., None], top + jnp.log(total)


def _keep(q: Any, k: Any, v: Any) -> tuple[Any, tuple[Any, ...]]:
    out, log_sum = _forward(q, k, v)
    out, log_sum = checkpoint_name(out, "attended"), checkpoint_name(log_sum, "log_sum")
    return out, (q, k, v, out, log_sum)


def _backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, Any, Any]:
    q, k, v, out, log_sum = kept
    scale = q.shape[-1] ** -0.5

    def step(dq: Any, block: tuple[Any, Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        start, keys, values = block
        weights = jnp.exp(_scores(q, keys, start) - log_sum[..., None])
        dv = weights.swapaxes(-1, -2) @ cotangent
        dscores = weights * (cotangent @ values.swapaxes(-1, -2) - delta) * scale
        return dq + dscores @ keys, (dscores.swapaxes(-1, -2) @ q, dv)

    with jax.named_scope(CORE):
        delta = (cotangent * out).sum(-1, keepdims=True)
        dq, (dk, dv) = jax.lax.scan(step, jnp.zeros_like(q), _blocks(k, v))
        return dq, _joined(dk), _joined(dv)


fused.defvjp(_keep, _backward)


def _scores(q: Any, keys: Any, start: Any) -> Any:
    """Scaled scores of all queries with a block of keys that begins at position `start`, later keys masked."""
    scores = (q @ keys.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
    mask = jnp.arange(q.shape[-2])[:, None] >= start + jnp.arange(keys.shape[-2])
    return jnp.where(mask, scores, _MASKED)


def _blocks(k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Start, keys and values of each block, blocks first."""
    size = math.gcd(k.shape[-2], BLOCK)

    def split(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, 0)

    return jnp.arange(0, k.shape[-2], size), split(k), split(v)


def _joined(blocks: Any) -> Any:
    """Blocks, joined along the sequence."""
    x = jnp.moveaxis(blocks, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
