"""A model of the policy benchmark: its loss, and the blocks that a user of `jax.checkpoint` would wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Loss = Callable[..., Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def unwrapped(block: Callable[..., Any]) -> Callable[..., Any]:
    """The block as it is."""
    return block


def stacked(block: Callable[..., Any]) -> Loss:
    """The mean square of what comes out of a block for each layer's parameters, one after the other."""

    def loss(params: list[dict[str, Any]], x: Any) -> Any:
        for p in params:
            x = block(x, p)
        return (x**2).mean()

    return loss


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A loss and its arguments.

    - `make`: from what is wrapped round each block to the loss, which is differentiated in its first argument; with `has_aux` it
        returns something besides.
    - `args`: parameters, and a batch.
    - `about`: what it is, with its sizes, and what a block is.
    - `saved`: sets of names of its tagged values that are worth keeping, the most useful first; `left_out`: names of values that are
        dear to keep. Both empty where nothing is tagged.
    - `attention`: the scope (`jax.named_scope`) of its attention core, if it has one; `fused` if that is one kernel.
    """

    make: Callable[[Wrap], Loss]
    args: tuple[Any, ...]
    about: str
    saved: tuple[tuple[str, ...], ...] = ()
    left_out: tuple[str, ...] = ()
    has_aux: bool = False
    attention: str = ""
    fused: bool = False
