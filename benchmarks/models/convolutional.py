"""A U-Net: convolutions with group normalization, four resolutions, a skip connection at each."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models.model import Loss, Model, Wrap

CHANNELS = (16, 32, 64, 128)
"""Of each resolution, the finest first."""

PIXELS, BATCH, GROUPS, COLORS = 64, 16, 8, 3


def init(key: Any) -> dict[str, Any]:
    """Parameters: blocks on the way down, blocks on the way up, and the head."""
    keys = iter(jax.random.split(key, 64))

    def kernel(rows: int, columns: int, size: int = 3) -> Any:
        return jax.random.normal(next(keys), (size, size, rows, columns)) * (2 / (size * size * rows)) ** 0.5

    def block(rows: int, columns: int) -> dict[str, Any]:
        return {
            "first": kernel(rows, columns),
            "second": kernel(columns, columns),
            "scale1": jnp.ones(columns),
            "scale2": jnp.ones(columns),
        }

    before = (COLORS, *CHANNELS[:-1])
    below = itertools.pairwise(CHANNELS)
    return {
        "down": [block(a, b) for a, b in zip(before, CHANNELS, strict=True)],
        "up": [block(fine + coarse, fine) for fine, coarse in below],
        "head": kernel(CHANNELS[0], COLORS, 1),
    }


def convolve(x: Any, kernel: Any) -> Any:
    """A convolution that keeps the size of the image."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x: Any, scale: Any) -> Any:
    """Group normalization without bias."""
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, GROUPS, channels // GROUPS)
    centered = grouped - grouped.mean((1, 2, 4), keepdims=True)
    variance = (centered**2).mean((1, 2, 4), keepdims=True)
    return (centered * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale


def block(x: Any, p: dict[str, Any]) -> Any:
    """Two convolutions, each normalized and rectified."""
    x = checkpoint_name(convolve(x, p["first"]), "first")
    x = jax.nn.relu(group_norm(x, p["scale1"]))
    x = checkpoint_name(convolve(x, p["second"]), "second")
    return jax.nn.relu(group_norm(x, p["scale2"]))


def halve(x: Any) -> Any:
    """Max-pooling over squares of two by two."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def double(x: Any) -> Any:
    """Each pixel as a square of two by two."""
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def make(wrap: Wrap) -> Loss:
    """The squared error of the image that comes out; `wrap` is applied to the block."""
    wrapped = wrap(block)

    def loss(params: dict[str, Any], x: Any, wanted: Any) -> Any:
        skips = []
        for level, p in enumerate(params["down"]):
            x = wrapped(halve(x) if level else x, p)
            skips.append(x)
        for skip, p in zip(reversed(skips[:-1]), reversed(params["up"]), strict=True):
            x = wrapped(jnp.concatenate([skip, double(x)], -1), p)
        return ((convolve(x, params["head"]) - wanted) ** 2).mean()

    return loss


def model() -> Model:
    """The U-Net with a random batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    image = (BATCH, PIXELS, PIXELS, COLORS)
    return Model(
        make=make,
        args=(init(keys[0]), jax.random.normal(keys[1], image), jax.random.normal(keys[2], image)),
        about=f"{', '.join(map(str, CHANNELS))} channels, {PIXELS} pixels, batch {BATCH}, group normalization; a block is two convolutions "
        "at one resolution",
        saved=(("first",), ("first", "second")),
        left_out=("second",),
    )
