"""A linear map with its transpose, as one equation: `autoremat_linear_map`.

    residuals, tangents   -> tangents out          push: what forward mode runs
    residuals, cotangents -> cotangents            pull: what reverse mode runs, written by hand, not transposed from push

`autoremat_linear` is transposed by transposing what it holds. This one is for derivatives whose two directions are two programs:
those of a scan that keeps few snapshots. In its residuals it is differentiated through push, so push may bind
only what can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autoremat._compat import (
    Jaxpr,
    Primitive,
    Zero,
    ad,
    batching,
    eval_jaxpr,
    instantiate,
    mlir,
    stacked_aval,
    trace,
)
from autoremat.transform._vmap import batch_jaxpr

Values = list[Any]


class LinearMap(Protocol):
    """A linear map. Hashable, and equal to one that does the same."""

    def in_avals(self) -> tuple[list[Any], list[Any]]:
        """The types of the residuals and of the tangents."""
        ...

    def out_avals(self) -> list[Any]:
        """The types of the tangents out."""
        ...

    def effects(self) -> Any:
        """The effects of push."""
        ...

    def programs(self) -> list[tuple[Jaxpr, int]]:
        """What push runs and how often, without the part that is linear: what a cost rule can see of it."""
        ...

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """Map tangents."""
        ...

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> Values:
        """Map cotangents of the tangents out, some of them a `Zero`, not all, to those of the tangents."""
        ...


linear_map_p = Primitive("autoremat_linear_map")
linear_map_p.multiple_results = True


def run_map(*args: Any, linear_map: LinearMap, num_residuals: int) -> Values:
    """What the equation does where it is not transposed."""
    return linear_map.push(args[:num_residuals], args[num_residuals:])


linear_map_p.def_impl(run_map)


@linear_map_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, linear_map: LinearMap, **__: Any) -> Any:
    return linear_map.out_avals(), linear_map.effects()


def _jvp(primals: Any, tangents: Any, *, linear_map: LinearMap, num_residuals: int) -> Any:
    bind = functools.partial(linear_map_p.bind, linear_map=linear_map, num_residuals=num_residuals)
    if all(type(t) is Zero for t in tangents[:num_residuals]):
        outs = bind(*primals)
        return outs, bind(*primals[:num_residuals], *map(instantiate, tangents[num_residuals:]))
    nonzero = [type(t) is not Zero for t in tangents]
    chosen = [p for p, nz in zip(primals, nonzero, strict=True) if nz]

    def of_chosen(*values: Any) -> Values:
        it = iter(values)
        args = [next(it) if nz else p for p, nz in zip(primals, nonzero, strict=True)]
        return linear_map.push(args[:num_residuals], args[num_residuals:])

    return jax.jvp(of_chosen, tuple(chosen), tuple(t for t in tangents if type(t) is not Zero))


ad.primitive_jvps[linear_map_p] = _jvp


def _transpose(cts: Any, *args: Any, linear_map: LinearMap, num_residuals: int) -> Values:
    residuals, tangents = args[:num_residuals], args[num_residuals:]
    if all(type(ct) is Zero for ct in cts):
        found: Sequence[Any] = [Zero(a) for a in linear_map.in_avals()[1]]
    else:
        found = linear_map.pull(residuals, cts)
    asked = [ct if ad.is_undefined_primal(t) else None for ct, t in zip(found, tangents, strict=True)]
    return [*([None] * num_residuals), *asked]


ad.primitive_transposes[linear_map_p] = _transpose


# -------------------------------------------------------------------------------------------------------------- batching


@dataclass(frozen=True)
class Batched:
    """`vmap` of a map: residual i is batched at axis `dims[i]` (`None`: shared), all tangents at their first axis."""

    inner: LinearMap
    axis_data: Any
    dims: tuple[int | None, ...]

    def in_avals(self) -> tuple[list[Any], list[Any]]:
        """See `LinearMap`. The residuals as they are without the batch; only a map inside asks."""
        residuals, tangents = self.inner.in_avals()
        size = self.axis_data.size
        batched = [
            a if d is None else stacked_aval(a, size, d) for a, d in zip(residuals, self.dims, strict=True)
        ]
        return batched, [stacked_aval(a, size) for a in tangents]

    def out_avals(self) -> list[Any]:
        """See `LinearMap`."""
        return [stacked_aval(a, self.axis_data.size) for a in self.inner.out_avals()]

    def effects(self) -> Any:
        """See `LinearMap`."""
        return self.inner.effects()

    def programs(self) -> list[tuple[Jaxpr, int]]:
        """See `LinearMap`."""
        return [(jaxpr, trips * self.axis_data.size) for jaxpr, trips in self.inner.programs()]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        num = len(residuals)
        return self._batched(
            lambda *args: self.inner.push(args[:num], args[num:]),
            [*residuals, *tangents],
            self.inner.in_avals()[1],
        )

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> Values:
        """See `LinearMap`."""
        num = len(residuals)
        avals = self.inner.out_avals()
        nonzero = [type(ct) is not Zero for ct in cts]

        def pulled(*args: Any) -> Values:
            it = iter(args[num:])
            given = [next(it) if nz else Zero(a) for a, nz in zip(avals, nonzero, strict=True)]
            return [instantiate(ct) for ct in self.inner.pull(args[:num], given)]

        chosen = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
        return self._batched(
            pulled, [*residuals, *chosen], [a for a, nz in zip(avals, nonzero, strict=True) if nz]
        )

    def _batched(self, fun: Any, args: Sequence[Any], linear_avals: Sequence[Any]) -> Values:
        avals = [*self.inner.in_avals()[0], *linear_avals]
        jaxpr, consts = trace(fun, avals, "vmap of a linear map")
        dims = [*(None for _ in consts), *self.dims, *(0 for _ in linear_avals)]
        batched, more, _ = batch_jaxpr(jaxpr, self.axis_data, dims, [True] * len(jaxpr.outvars))
        return eval_jaxpr(batched, *more, *consts, *args)


def at_front(x: Any, dim: int | None, size: int) -> Any:
    """`x` with its batch as first axis; a value without one is repeated."""
    if dim is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)


def _batch(axis_data: Any, args: Any, dims: Any, *, linear_map: LinearMap, num_residuals: int) -> Any:
    residuals, tangents = args[:num_residuals], args[num_residuals:]
    front = [at_front(x, d, axis_data.size) for x, d in zip(tangents, dims[num_residuals:], strict=True)]
    batched = Batched(linear_map, axis_data, tuple(dims[:num_residuals]))
    outs = linear_map_p.bind(*residuals, *front, linear_map=batched, num_residuals=num_residuals)
    return outs, [0] * len(outs)


batching.fancy_primitive_batchers[linear_map_p] = _batch

mlir.register_lowering(linear_map_p, mlir.lower_fun(run_map, multiple_results=True))
