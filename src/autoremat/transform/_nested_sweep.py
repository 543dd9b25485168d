"""The backward pass of a scan in two levels, for JAX to differentiate.

    forward:  a scan over segments of about sqrt(n) steps keeps the carry at the start of each
    backward: the last segment first: its steps forward, every carry kept, then its steps reversed

Each segment and each step is a checkpoint, so that what its derivative keeps grows with sqrt(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoremat._compat import Jaxpr, eval_jaxpr
from autoremat.transform._api import checkpoint
from autoremat.transform._snapshots import Loop

Values = list[Any]
Step = Callable[[Values, Any], tuple[Values, Any]]


def nested_sweep(
    loop: Loop,
    step_back: Jaxpr,
    consts: Sequence[Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    back_consts: Sequence[Any],
    adjoint: Sequence[Any],
    zs: Sequence[Any],
) -> Values:
    """What `sweep` returns, without snapshots."""

    def step(carry: Values, x: Values) -> tuple[Values, Values]:
        return eval_jaxpr(loop.jaxpr, *consts, *carry, *x), carry

    def back(adjoint: Values, at: tuple[Values, Values, Values]) -> tuple[Values, Values]:
        carry, x, z = at
        outs = eval_jaxpr(step_back, *back_consts, *carry, *x, *adjoint, *z)
        return outs[: len(adjoint)], outs[len(adjoint) :]

    steps, steps_back = _checkpointed(step), _checkpointed(back)

    def segment(carry: Values, x: Values, length: int) -> tuple[Values, Values]:
        end, _ = lax.scan(steps, carry, x, length)
        return end, carry

    def segment_back(adjoint: Values, start: Values, x: Values, z: Values, length: int) -> Any:
        _, carries = lax.scan(steps, start, x, length)
        return lax.scan(steps_back, adjoint, (carries, x, z), length, reverse=True)

    return _in_two_levels(loop, segment, segment_back, list(init), list(xs), list(adjoint), list(zs))


def _checkpointed(fun: Callable[..., Any]) -> Callable[..., Any]:
    return checkpoint(fun, prevent_cse=False)


def _in_two_levels(
    loop: Loop, segment: Any, segment_back: Any, init: Values, xs: Values, adjoint: Values, zs: Values
) -> Values:
    """Run whole segments in a scan, and what is left after them by itself."""
    size = math.isqrt(loop.length)
    count, rest = divmod(loop.length, size)
    if loop.reverse:
        xs, zs = ([jnp.flip(x, 0) for x in stacks] for stacks in (xs, zs))
    whole = [[x[: count * size].reshape(count, size, *x.shape[1:]) for x in stacks] for stacks in (xs, zs)]
    forward = _checkpointed(lambda carry, x: segment(carry, x, size))
    backward = _checkpointed(lambda adjoint, at: segment_back(adjoint, *at, size))

    end, starts = lax.scan(forward, init, whole[0], count)
    tail: list[Values] = []
    if rest:
        left = [[x[count * size :] for x in stacks] for stacks in (xs, zs)]
        adjoint, last = _checkpointed(lambda *args: segment_back(*args, rest))(adjoint, end, *left)
        tail = [last]
    adjoint, outs = lax.scan(backward, adjoint, (starts, *whole), count, reverse=True)
    flat = [x.reshape(count * size, *x.shape[2:]) for x in outs]
    joined = [jnp.concatenate(parts) for parts in zip(flat, *tail, strict=True)]
    return [*adjoint, *(jnp.flip(x, 0) if loop.reverse else x for x in joined)]
