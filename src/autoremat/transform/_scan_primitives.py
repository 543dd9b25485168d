"""The two primitives of a scan that keeps few snapshots of its carry, and how they are evaluated.

    autoremat_scan     the scan; where it is differentiated it also returns the snapshots of its forward sweep (`saving`)
    autoremat_sweep    the backward pass: from the snapshots, one step after the other, the last first

Their derivatives and their batching are in `_scan_rules.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoremat._compat import (
    Jaxpr,
    Primitive,
    mlir,
    positional_effects,
    stacked_aval,
    weakref_lru_cache,
)
from autoremat.transform._derived import grouped
from autoremat.transform._snapshots import Loop, plain_scan, saving_scan, sweep

Values = list[Any]

scan_p = Primitive("autoremat_scan")
scan_p.multiple_results = True
sweep_p = Primitive("autoremat_sweep")
sweep_p.multiple_results = True


def loop_params(loop: Loop, **changed: Any) -> dict[str, Any]:
    """The parameters of an equation that say what its loop is."""
    names = ("jaxpr", "num_consts", "num_carry", "length", "reverse", "snapshots")
    return {name: getattr(loop, name) for name in names} | changed


def sweep_operands(loop: Loop, num_back_consts: int, num_adjoint: int, args: Sequence[Any]) -> list[Values]:
    """Inputs of the loop, snapshots, constants of the step back, adjoint, zs."""
    sizes = [loop.num_inputs, loop.num_carry, num_back_consts, num_adjoint]
    return grouped(args, [*sizes, len(args) - sum(sizes)])


def run_scan(*args: Any, unroll: int, saving: bool, **loop: Any) -> Values:
    """What the equation of a scan does."""
    if saving:
        return saving_scan(Loop(**loop), args)
    return plain_scan(Loop(**loop), args, unroll)


def run_sweep(
    *args: Any, step_back: Jaxpr, num_back_consts: int, num_adjoint: int, steps_again: int, **params: Any
) -> Values:
    """What the equation of a sweep does. `steps_again`, for costs and readers, is how many steps it advances."""
    del steps_again
    loop = Loop(**params)
    return sweep(loop, step_back, *sweep_operands(loop, num_back_consts, num_adjoint, args))


def _compiled(run: Callable[..., Values]) -> Callable[..., Values]:
    """Outside `jit` a loop is compiled as a whole, once for each body."""

    def compile_for(jaxpr: Jaxpr, params: tuple[tuple[str, Any], ...]) -> Callable[..., Values]:
        # A copy of the body: a cache that held its own key would hold it forever.
        return jax.jit(functools.partial(run, jaxpr=jaxpr.replace(), **dict(params)))

    cached = weakref_lru_cache(compile_for)
    return lambda *args, jaxpr, **params: cached(jaxpr, tuple(params.items()))(*args)


scan_p.def_impl(_compiled(run_scan))
sweep_p.def_impl(_compiled(run_sweep))
mlir.register_lowering(scan_p, mlir.lower_fun(run_scan, multiple_results=True))
mlir.register_lowering(sweep_p, mlir.lower_fun(run_sweep, multiple_results=True))


@scan_p.def_effectful_abstract_eval
def _scan_abstract_eval(*_: Any, unroll: int, saving: bool, **params: Any) -> Any:
    loop = Loop(**params)
    return loop.out_avals() + (loop.snapshot_avals() if saving else []), positional_effects(loop.jaxpr)


@sweep_p.def_effectful_abstract_eval
def _sweep_abstract_eval(
    *_: Any, jaxpr: Jaxpr, step_back: Jaxpr, num_adjoint: int, length: int, **__: Any
) -> Any:
    outs = [v.aval for v in step_back.outvars]
    avals = [*outs[:num_adjoint], *(stacked_aval(a, length) for a in outs[num_adjoint:])]
    return avals, positional_effects(jaxpr) | positional_effects(step_back)
