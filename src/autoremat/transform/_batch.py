"""`vmap` of a checkpointed function: the policy decides about the program as it was before.

    vmap(checkpoint(f, policy))    differentiated as    vmap of (f split as `policy` says)

In JAX the policy sees the batched operations: a product that gains a batch dimension is another product to
`dots_with_no_batch_dims_saveable`, so a `vmap` around a model changes what is kept. Here an *origin* remembers the program
without the batch, and its partition is batched. Where that cannot be (`_shares_custom_vjp`), the policy decides about the
batched program, as in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoremat._compat import Jaxpr, JaxprEqn, Var, dce, new_jaxpr, new_var
from autoremat.transform._batch_linear import batch_linear
from autoremat.transform._jaxpr import cached_by_jaxpr, map_eqns, subjaxprs
from autoremat.transform._partition import Partition, partition_cached
from autoremat.transform._vmap import batch_jaxpr


@dataclass(frozen=True, eq=False)
class Origin:
    """What a batched jaxpr was before `vmap`.

    Input i of `jaxpr` is input `positions[i]` of the batched one, batched at axis `dims[i]` (`None`: shared). `origin` is that of
    `jaxpr` itself, for a `vmap` under a `vmap`.
    """

    jaxpr: Jaxpr
    axis_data: Any
    dims: tuple[int | None, ...]
    positions: tuple[int, ...]
    origin: Origin | None

    def map_eqns(self, change: Callable[[JaxprEqn], JaxprEqn]) -> Origin:
        """The origin with `change` applied to every equation; an unchanged one comes back as it is."""
        jaxpr = map_eqns(self.jaxpr, change)
        before = self.origin and self.origin.map_eqns(change)
        if jaxpr is self.jaxpr and before is self.origin:
            return self
        return replace(self, jaxpr=jaxpr, origin=before)


def origin_of(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any], num_consts: int, before: Origin | None
) -> Origin | None:
    """The origin of a jaxpr that was batched and has `num_consts` more inputs at the front since."""
    if not all(d is None or isinstance(d, int) for d in dims):
        return None  # a ragged axis
    positions = tuple(range(num_consts, num_consts + len(dims)))
    return Origin(jaxpr, axis_data, tuple(dims), positions, before)


def without_unused(
    origin: Origin | None, used_outputs: Sequence[bool], used_inputs: Sequence[bool]
) -> Origin | None:
    """The origin after dead-code elimination has dropped outputs and inputs of the batched jaxpr."""
    if origin is None:
        return None
    pruned, used = dce(origin.jaxpr, used_outputs)
    if any(u != used_inputs[p] for p, u in zip(origin.positions, used, strict=True)):
        return None
    return replace(
        origin,
        jaxpr=pruned,
        dims=tuple(d for d, u in zip(origin.dims, used, strict=True) if u),
        positions=tuple(sum(used_inputs[:p]) for p, u in zip(origin.positions, used, strict=True) if u),
        origin=without_unused(origin.origin, used_outputs, used),
    )


def partition_of(jaxpr: Jaxpr, nonzero: tuple[bool, ...], policy: Any, origin: Origin | None) -> Partition:
    """The partition of a jaxpr, by what `policy` says of its origin, if it has one."""
    if origin is None:
        return partition_cached(jaxpr, nonzero, policy)
    return _batched_partition_cached(jaxpr, nonzero, policy, origin)


def _batched_partition(jaxpr: Jaxpr, nonzero: tuple[bool, ...], policy: Any, origin: Origin) -> Partition:
    before = set(origin.positions)
    if not any(nz for i, nz in enumerate(nonzero) if i not in before):
        inner = partition_of(origin.jaxpr, tuple(nonzero[p] for p in origin.positions), policy, origin.origin)
        batched = _Batching(jaxpr, nonzero, origin, inner).run()
        if batched is not None:
            return batched
    return partition_cached(jaxpr, nonzero, policy)


def _custom_vjps(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_vjp_call":
            yield eqn
        else:
            for inner in subjaxprs(eqn):
                yield from _custom_vjps(inner)


def _shares_custom_vjp(before: Jaxpr, batched: Jaxpr) -> bool:
    """Whether a `custom_vjp` has a result that all examples share (a `psum`): its rule gets the sum of their cotangents, once."""
    pairs = list(_custom_vjps(before)), list(_custom_vjps(batched))
    if len(pairs[0]) != len(pairs[1]):
        return True

    def gained(a: JaxprEqn, b: JaxprEqn, which: str) -> list[bool]:
        both = zip(getattr(a, which), getattr(b, which), strict=True)
        return [len(v.aval.shape) < len(w.aval.shape) for v, w in both]

    return any(
        len(a.invars) != len(b.invars) or (any(gained(a, b, "invars")) and not all(gained(a, b, "outvars")))
        for a, b in zip(*pairs, strict=True)
    )


_batched_partition_cached: Callable[..., Partition] = cached_by_jaxpr(_batched_partition)


@dataclass(frozen=True)
class _Batching:
    """Batches the partition `part` of the origin of `jaxpr`."""

    jaxpr: Jaxpr
    nonzero: tuple[bool, ...]
    origin: Origin
    part: Partition

    def run(self) -> Partition | None:
        """`None` where an output would be batched that the batched program does not batch."""
        origin, part = self.origin, self.part
        if _shares_custom_vjp(origin.jaxpr, self.jaxpr):
            return None
        num_outs = len(self.jaxpr.outvars)
        shared = (None,) * len(part.constants)
        out_batched = [
            len(v.aval.shape) > len(o.aval.shape)
            for v, o in zip(self.jaxpr.outvars, origin.jaxpr.outvars, strict=True)
        ]
        forward, forward_consts, batched = batch_jaxpr(
            part.forward,
            origin.axis_data,
            (*origin.dims, *shared),
            forced=[i < num_outs and out_batched[i] for i in range(len(part.forward.outvars))],
        )
        kept_dims = [0 if batched[i] else None for i in part.kept_results]
        leaf_dims = [(*origin.dims, *shared)[i] for i in part.leaves]
        tangent_dims = [d for d, p in zip(origin.dims, origin.positions, strict=True) if self.nonzero[p]]
        tangent_outs = [b for b, nz in zip(out_batched, part.nonzero_outs, strict=True) if nz]
        linear, linear_consts, linear_batched = batch_linear(
            part.linear, origin.axis_data, (*leaf_dims, *kept_dims, *tangent_dims), forced=tangent_outs
        )
        if batched[:num_outs] != out_batched or linear_batched != tangent_outs:
            return None
        num_inputs = len(self.jaxpr.invars)
        first_constant = num_inputs + len(forward_consts) + len(linear_consts)
        leaves = [
            origin.positions[i] if i < len(origin.positions) else first_constant + i - len(origin.positions)
            for i in part.leaves
        ]
        return replace(
            part,
            forward=self._reordered(forward, len(forward_consts), linear.invars[: len(linear_consts)]),
            linear=linear,
            leaves=(*range(num_inputs + len(forward_consts), first_constant), *leaves),
            constants=(*forward_consts, *linear_consts, *part.constants),
        )

    def _reordered(self, forward: Jaxpr, num_consts: int, unread: Sequence[Var]) -> Jaxpr:
        """`(constants, origin's inputs, its constants)` as `(inputs, constants, those of the linear part, origin's constants)`."""
        consts, rest = forward.invars[:num_consts], forward.invars[num_consts:]
        num_primals = len(self.origin.positions)
        inputs = [new_var(v.aval) for v in self.jaxpr.invars]
        for p, v in zip(self.origin.positions, rest[:num_primals], strict=True):
            inputs[p] = v
        more = [new_var(v.aval) for v in unread]
        return new_jaxpr(
            [*inputs, *consts, *more, *rest[num_primals:]], forward.outvars, forward.eqns, forward
        )
