"""What fills the memory of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat.measure import MemoryUse
from autoremat.measure._lower import nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Bytes on one device at the peak of a compiled step.

    - `parameters`: arguments that the gradient is taken in.
    - `optimizer_state`: other arguments that the step returns anew: moments, counters, statistics.
    - `batch`: the rest of the arguments.
    - `outputs`: results for which no argument was donated.
    - `activations`: what is kept from the forward to the backward pass.
    - `gradients`: of the parameters; what a compiler uses up at once it need not hold at once.
    - `temporaries`: all else that the compiler allots.
    """

    parameters: int
    optimizer_state: int
    batch: int
    outputs: int
    activations: int
    gradients: int
    temporaries: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(size for _, size in self.items())

    def items(self) -> Iterator[tuple[str, int]]:
        """Names and bytes."""
        for name in self.__slots__:
            yield name.replace("_", " "), getattr(self, name)


def account(args: Sequence[Any], out: Any, primals: Any, kept_bytes: int, use: MemoryUse) -> Account:
    """Divide the compiled memory of a step of `args` that returns `out` and differentiates in `primals`.

    Arguments are told apart by their shapes: parameters are the first run of arguments with the shapes of the primals, state is what comes
    back in the same shape. The compiler's own temporaries are what is kept, the gradients, and a rest.
    """
    leaves = jax.tree.leaves(args)
    parameters = _parameters(leaves, jax.tree.leaves(primals))
    returned = Counter(_key(x) for x in jax.tree.leaves(out))
    returned.subtract(_key(leaves[i]) for i in parameters)
    state = [i for i in range(len(leaves)) if i not in parameters and _taken(returned, _key(leaves[i]))]
    sizes = [nbytes([x]) for x in leaves]
    fixed = use.argument_bytes + use.output_bytes - use.alias_bytes
    # On TPUs the peak is the compiler's own, and not the sum of its parts.
    temporary = use.peak_bytes - fixed
    of_parameters, of_state = (sum(sizes[i] for i in found) for found in (parameters, state))
    activations = min(kept_bytes, max(0, temporary))
    gradients = min(_gradient_bytes(leaves, parameters, primals), max(0, temporary - activations))
    return Account(
        parameters=of_parameters,
        optimizer_state=of_state,
        batch=use.argument_bytes - of_parameters - of_state,
        outputs=use.output_bytes - use.alias_bytes,
        activations=activations,
        gradients=gradients,
        temporaries=temporary - activations - gradients,
    )


def _gradient_bytes(leaves: Sequence[Any], parameters: Iterable[int], primals: Any) -> int:
    """Bytes of the gradient on one device: of the types of the primals, sharded as the parameters are."""
    whole = nbytes([x for x in jax.tree.leaves(primals) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)])
    unsharded = sum(leaves[i].size * leaves[i].dtype.itemsize for i in parameters)
    return whole * nbytes([leaves[i] for i in parameters]) // unsharded if unsharded else whole


def _key(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape), str(x.dtype)


def _parameters(leaves: Sequence[Any], primals: Sequence[Any]) -> frozenset[int]:
    """The first run of arguments with the shapes of the primals, whatever their types: parameters may be cast first."""
    wanted = [tuple(x.shape) for x in primals if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    floating = [i for i, x in enumerate(leaves) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    shapes = [tuple(leaves[i].shape) for i in floating]
    for start in range(len(shapes) - len(wanted) + 1):
        if wanted and shapes[start : start + len(wanted)] == wanted:
            return frozenset(floating[start : start + len(wanted)])
    return frozenset()


def _taken(counts: Counter[Any], key: Any) -> bool:
    """Whether one of this kind is left, which is taken."""
    if counts[key] <= 0:
        return False
    counts[key] -= 1
    return True
