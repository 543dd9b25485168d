"""`vmap` of a jaxpr, with a fault of JAX's rule for `cond` worked around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    close_jaxpr,
    eval_jaxpr,
    open_jaxpr,
    trace,
    varying_axes,
)
from autoremat._compat import batch_jaxpr as _batch_jaxpr
from autoremat.transform._jaxpr import PLAIN_CALLS, map_eqns


def batch_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any], forced: Sequence[bool] = ()
) -> tuple[Jaxpr, list[Any], list[bool]]:
    """`vmap` of a jaxpr: the batched jaxpr, its new constants, and which outputs are batched (at axis 0).

    The outputs that `forced` marks are batched whether they depend on a batched input or not.
    """
    return _batch_jaxpr(map_eqns(jaxpr, _with_calls_as_branches), axis_data, dims, forced)


def _with_calls_as_branches(eqn: JaxprEqn) -> JaxprEqn:
    """A `cond` whose predicate varies from device to device in a `shard_map`, each branch as one call.

    Where such a predicate is batched, JAX runs all branches on operands that it makes varying, too, one operation after the other: an
    operation on two operands of which only one came from outside does not type. A call takes them.
    """
    if eqn.primitive.name != "cond" or not varying_axes(eqn.invars[0].aval):
        return eqn
    branches = tuple(map(_as_call, eqn.params["branches"]))
    return eqn.replace(params=dict(eqn.params, branches=branches))


def _as_call(branch: Any) -> Any:
    opened, consts = open_jaxpr(branch)
    if consts or not opened.eqns or [e.primitive.name in PLAIN_CALLS for e in opened.eqns] == [True]:
        return branch

    def run(*operands: Any) -> list[Any]:
        return jax.jit(lambda *xs: eval_jaxpr(opened, *xs))(*operands)

    call, made = trace(run, [v.aval for v in opened.invars], "autoremat.checkpoint")
    return branch if made else close_jaxpr(call)
