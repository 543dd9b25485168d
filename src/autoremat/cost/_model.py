"""What an operation costs: arithmetic, memory traffic, communication. All integers, all per device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autoremat.graph import Op, Value


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one execution.

    `matrix_flops` are FLOPs that a matrix unit can do (a multiply-add is 2), `vector_flops` all others.
    `bytes_moved` are bytes read from and written to the device's memory if nothing is fused.
    `collective_bytes` are bytes that one device sends to others.
    """

    matrix_flops: int = 0
    vector_flops: int = 0
    bytes_moved: int = 0
    collective_bytes: int = 0

    @property
    def flops(self) -> int:
        """All FLOPs, whichever unit does them."""
        return self.matrix_flops + self.vector_flops

    def __add__(self, other: Cost) -> Cost:
        """The cost of both, one after the other."""
        return Cost(
            self.matrix_flops + other.matrix_flops,
            self.vector_flops + other.vector_flops,
            self.bytes_moved + other.bytes_moved,
            self.collective_bytes + other.collective_bytes,
        )

    def __mul__(self, times: int) -> Cost:
        """The cost of `times` executions."""
        return Cost(
            self.matrix_flops * times,
            self.vector_flops * times,
            self.bytes_moved * times,
            self.collective_bytes * times,
        )

    __rmul__ = __mul__


ZERO = Cost()


class CostRule(Protocol):
    """The rule of one primitive."""

    def __call__(self, op: Op, inputs: Sequence[Value], outputs: Sequence[Value]) -> Cost:
        """Return the cost of one execution of `op`.

        `inputs` are the operands that are variables: literals have no value, so do not count on a position.
        `op.params["operand_shapes"]`, where the tracer sets it, has the shapes of all operands.
        """
        ...


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of `costs`."""
    result = ZERO
    for cost in costs:
        result = result + cost
    return result


def nbytes(values: Iterable[Value]) -> int:
    """Return the bytes of `values` together."""
    return sum(v.nbytes for v in values)


def elements(values: Iterable[Value]) -> int:
    """Return the number of elements of `values` together."""
    return sum(v.size for v in values)
