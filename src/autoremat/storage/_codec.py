"""Codecs: encode after the forward pass, decode in the backward pass. All here are exact.

- `device`: the array as it is.
- `packed`: booleans as bits along the last axis, eight to a byte.
- `device->pinned_host`: in the memory of the host, for policies that offload (`offload`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One way to keep an array.

    `encode(x)` gives the array that is kept and `decode(encoded, shape)` gives `x` back. `nbytes(shape, itemsize)` is
    the size of the encoded array in bytes; `flops_per_element` the arithmetic of encoding and decoding together.
    """

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Sequence[int]], Any]
    nbytes: Callable[[Sequence[int], int], int]
    accepts: Callable[[Sequence[int], str], bool]
    flops_per_element: int


def _pack(x: Any) -> Any:
    return jnp.packbits(x, axis=-1)


def _unpack(encoded: Any, shape: Sequence[int]) -> Any:
    return jnp.unpackbits(encoded, axis=-1, count=shape[-1]).astype(bool)


DEVICE = Codec(
    name="device",
    encode=lambda x: x,
    decode=lambda encoded, shape: encoded,
    nbytes=lambda shape, itemsize: math.prod(shape) * itemsize,
    accepts=lambda shape, dtype: True,
    flops_per_element=0,
)

PACKED = Codec(
    name="packed",
    encode=_pack,
    decode=_unpack,
    nbytes=lambda shape, itemsize: math.prod(shape[:-1]) * math.ceil(shape[-1] / 8),
    # Below eight elements a row the padding eats the gain.
    accepts=lambda shape, dtype: dtype == "bool" and len(shape) > 0 and shape[-1] >= 8,
    # A shift, a mask and an addition to encode; a shift, a mask and a comparison to decode.
    flops_per_element=6,
)

_SPACES = {
    "device": jax.memory.Space.Device,
    "pinned_host": jax.memory.Space.Host,
    "unpinned_host": jax.memory.Space.Host,
}


@functools.cache
def offload(src: str, dst: str) -> Codec:
    """Keep an array in another memory: it moves from memory kind `src` to `dst`, and back in the backward pass.

    Raises `ValueError` for a memory kind that is unknown.
    """
    if unknown := [kind for kind in (src, dst) if kind not in _SPACES]:
        raise ValueError(
            f"offloading from {src!r} to {dst!r}: unknown memory {unknown}. Cheapest fix: offload_src and offload_dst among "
            f"{sorted(_SPACES)}."
        )
    return Codec(
        name=f"{src}{_ARROW}{dst}",
        encode=lambda x: jax.device_put(x, _SPACES[dst], may_alias=False),
        decode=lambda encoded, shape: jax.device_put(encoded, _SPACES[src], may_alias=False),
        nbytes=lambda shape, itemsize: 0 if dst != "device" else math.prod(shape) * itemsize,
        accepts=lambda shape, dtype: True,
        flops_per_element=0,
    )


_ARROW = "->"


def codec_named(name: str) -> Codec:
    """The codec of this name."""
    return offload(*name.split(_ARROW)) if _ARROW in name else CODECS[name]


CODECS = {codec.name: codec for codec in (DEVICE, PACKED)}


def codecs_for(shape: Sequence[int], dtype: str) -> tuple[Codec, ...]:
    """The codecs that can keep an array of this shape and dtype, the plain one first."""
    return tuple(codec for codec in CODECS.values() if codec.accepts(shape, dtype))
