"""The order that its data flow gives a program, whatever its compiler does, and the moments in it that bind most memory.

    Jaxpr -> Turns

An equation starts when all that it reads has been computed, and nothing that is computed from its results has started before. So for
each equation, the *turn*, there is a moment, its first start, by which some values have been computed, and from which on some
are read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat._compat import JaxprEqn, Var
from autoremat.graph._trace import aval_size
from autoremat.transform._jaxpr import is_var


@dataclass(frozen=True, slots=True)
class Turn:
    """The first start of an equation.

    `before`: what it reads. `after`: what it and all that depends on it read, and what the program returns. `nbytes`: of the
    values that must have been computed before, and are read after.
    """

    before: frozenset[Var]
    after: frozenset[Var]
    nbytes: int


def find_turns(eqns: Sequence[JaxprEqn], outs: Iterable[Any], candidates: Sequence[int]) -> list[Turn]:
    """Turns of some of the equations with the numbers `candidates`, by falling bytes, and no two with equal bytes.

    The first has the most bytes; then ranks quadruple, since a small budget may be bound elsewhere than a large
    one, but neighbours bind it nearly alike.
    """
    made = [v for e in eqns for v in e.outvars]
    bits = {v: 1 << i for i, v in enumerate(made)}
    reads = [[v for v in e.invars if is_var(v)] for e in eqns]
    returned = [v for v in outs if is_var(v)]
    before, after = _read_before(eqns, reads, bits), _read_after(eqns, reads, bits, returned)
    sizes = np.array([aval_size(v.aval)[2] for v in made], dtype=np.int64)
    weights = {_weight(before[i] & after[i], sizes): i for i in reversed(candidates)}
    ranked = sorted(weights.items(), reverse=True)
    return [
        Turn(frozenset(reads[i]), frozenset([*_read_from(eqns, reads, i), *returned]), nbytes)
        for nbytes, i in (ranked[4**k - 1] for k in range((len(ranked).bit_length() + 1) // 2))
    ]


def _read_before(eqns: Sequence[JaxprEqn], reads: Sequence[Sequence[Var]], bits: dict[Var, int]) -> list[int]:
    """For each equation, all values that it is computed from, as bits."""
    found: dict[Var, int] = {}
    masks: list[int] = []
    for eqn, own in zip(eqns, reads, strict=True):
        masks.append(_union(found.get(v, 0) for v in own))
        found.update((v, masks[-1] | bits[v]) for v in eqn.outvars)
    return masks


def _read_after(
    eqns: Sequence[JaxprEqn], reads: Sequence[Sequence[Var]], bits: dict[Var, int], outs: Sequence[Var]
) -> list[int]:
    """For each equation, all values that it and what depends on it read, and `outs`, as bits."""
    found: dict[Var, int] = {}
    masks = [0] * len(eqns)
    returned = _union(bits.get(v, 0) for v in outs)
    for i in reversed(range(len(eqns))):
        masks[i] = _union(
            [returned, *(bits.get(v, 0) for v in reads[i]), *(found.get(v, 0) for v in eqns[i].outvars)]
        )
        for v in reads[i]:
            found[v] = found.get(v, 0) | masks[i]
    return masks


def _read_from(eqns: Sequence[JaxprEqn], reads: Sequence[Sequence[Var]], at: int) -> list[Var]:
    """What an equation and all that depends on it read."""
    reached = set(eqns[at].outvars)
    found = list(reads[at])
    for eqn, own in zip(eqns[at + 1 :], reads[at + 1 :], strict=True):
        if not reached.isdisjoint(own):
            reached.update(eqn.outvars)
            found += own
    return found


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _weight(mask: int, sizes: NDArray[np.int64]) -> int:
    """The bytes of the values whose bits are set."""
    raw = np.frombuffer(mask.to_bytes(-(-len(sizes) // 8), "little"), dtype=np.uint8)
    return int(sizes[np.unpackbits(raw, bitorder="little", count=len(sizes)) != 0].sum())
