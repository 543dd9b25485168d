"""What the backward pass of a gradient computes a second time, read from the emitted program.

`jax.checkpoint` and `autoremat` both emit what they compute again under the name scope `rematted_computation`. What only derivatives
need (`cos x` for `sin x`) may stand there, too, and is computed once: so of those equations, the ones count whose like (same primitive,
parameters and shapes) stands outside the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

import autoremat as ar
from autoremat._compat import DropVar, new_jaxpr, open_jaxpr
from autoremat.plan._plan import prepare
from autoremat.plan._program import planned_function
from autoremat.transform._jaxpr import is_var, subjaxprs

AGAIN = "rematted_computation"

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Primitives that are dear to compute again."""


@dataclass(frozen=True)
class Rerun:
    """An equation that runs again: its primitive, the name scopes that it stands in, and the FLOPs of all its runs in one step."""

    primitive: str
    scopes: str
    flops: int


@dataclass(frozen=True)
class _Placed:
    """An equation of a program, and of the loops and calls in it."""

    eqn: Any
    scopes: str
    trips: int

    @property
    def again(self) -> bool:
        return AGAIN in self.scopes

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two runs of one operation have in common: primitive, parameters, constants, shapes."""
        eqn = self.eqn
        params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
        reads = (str(v.aval) if is_var(v) else str(v) for v in eqn.invars)
        return (eqn.primitive.name, params, *reads, *(str(v.aval) for v in eqn.outvars))


def reruns(gradient: Callable[..., Any], *args: Any) -> list[Rerun]:
    """What `gradient` computes a second time."""
    placed = list(_walk(open_jaxpr(jax.make_jaxpr(gradient)(*args))[0], "", 1))
    once = {p.kind for p in placed if not p.again}
    return [_rerun(p) for p in placed if p.again and p.kind in once]


def _walk(jaxpr: Any, scopes: str, trips: int) -> Iterator[_Placed]:
    """The equations of a program, those inside loops and calls in place of the equation that holds them."""
    for eqn in jaxpr.eqns:
        own = f"{scopes}/{eqn.source_info.name_stack}"
        inner = subjaxprs(eqn)
        if not inner:
            yield _Placed(eqn, own, trips)
        for program in inner:
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            yield from _walk(program, own, trips * length)


def _rerun(placed: _Placed) -> Rerun:
    eqn = placed.eqn
    reads = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
    alone = new_jaxpr(reads, [v for v in eqn.outvars if not isinstance(v, DropVar)], [eqn])
    return Rerun(eqn.primitive.name, placed.scopes, placed.trips * ar.jaxpr_flops(alone))


@dataclass(frozen=True)
class Planned:
    """A function under a plan by which `share` of the bytes is gone that recomputation can free; it computes `flops` again, the planner
    says."""

    function: Callable[..., Any]
    share: float
    flops: int


def planned(fun: Callable[..., Any], args: tuple[Any, ...], share: float) -> Planned:
    """Of the plans that `autoremat.plan` tries first, the first one that frees this share; nothing is compiled.

    Between vertices of the frontier lie plans that are the best for their bytes by a hair; so this one is a vertex.
    """
    candidates = prepare(fun, args, 0, False, None, None, None)
    variant = candidates.variant(0)
    assert variant is not None
    path = variant.path
    most, least = (path.states[i].nbytes for i in (path.edges[0], path.edges[-1]))
    index = next(i for i in path.edges if path.states[i].nbytes <= most - share * (most - least))
    state = path.states[index]
    function = planned_function(candidates.traced, candidates.decisions(0, index))
    return Planned(function, (most - state.nbytes) / (most - least), state.flops)


@dataclass(frozen=True)
class Moment:
    """What a plan computes again by which `share` of the bytes is gone that recomputation can free.

    FLOPs of one step, inside and outside a scope, of products and of all else; `operations` inside the scope, of any kind.
    """

    share: float
    products_inside: int
    others_inside: int
    products_outside: int
    others_outside: int
    operations_inside: int


def moment(fun: Callable[..., Any], args: tuple[Any, ...], share: float, scope: str) -> Moment:
    """What the plan of `planned` computes again, inside and outside a scope."""
    plan = planned(fun, args, share)
    again = reruns(jax.value_and_grad(plan.function), *args)
    inside = [r for r in again if scope in r.scopes]
    outside = [r for r in again if scope not in r.scopes]
    return Moment(plan.share, *_flops(inside), *_flops(outside), len(inside))


def _flops(again: list[Rerun]) -> tuple[int, int]:
    """FLOPs of products, and of all else."""
    products = sum(r.flops for r in again if r.primitive in PRODUCTS)
    return products, sum(r.flops for r in again) - products
