"""`vmap` of a linear program that is transposed later.

JAX batches before it linearizes, and two things in a linear program do not survive the other order: what stands for a `custom_vjp` has no
batching rule, and a `cond` whose predicate gets a batch dimension becomes a selection between branches that reads tangents with their
gradient stopped, which has no transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Primitive,
    Zero,
    ad,
    batch_custom_lin,
    batching,
    custom_lin_p,
    mlir,
    tangent_aval,
)
from autoremat.transform._jaxpr import map_eqns
from autoremat.transform._vmap import batch_jaxpr

# In place of JAX's `custom_lin` while a program is batched.
_custom_lin_p = Primitive("custom_lin")
_custom_lin_p.multiple_results = True
_custom_lin_p.def_abstract_eval(lambda *_, out_avals, **__: out_avals)
batching.fancy_primitive_batchers[_custom_lin_p] = batch_custom_lin

# In place of JAX's `stop_gradient`, with a transpose: the tangent that it stops is zero.
_stopped_p = Primitive("stop_gradient")
_stopped_p.def_impl(lambda x: x)
_stopped_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[_stopped_p] = lambda args, dims: (_stopped_p.bind(*args), dims[0])
mlir.register_lowering(_stopped_p, lambda ctx, x: [x])
ad.primitive_jvps[_stopped_p] = lambda primals, tangents: (
    _stopped_p.bind(*primals),
    Zero(tangent_aval(jax.typeof(primals[0]))),
)
ad.primitive_transposes[_stopped_p] = lambda ct, x: [Zero(x.aval)]


def batch_linear(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any], forced: Sequence[bool] = ()
) -> tuple[Jaxpr, list[Any], list[bool]]:
    """`batch_jaxpr` for a program that is linear in some inputs and transposed later."""
    batched, consts, out_batched = batch_jaxpr(map_eqns(jaxpr, _to_ours), axis_data, dims, forced)
    return map_eqns(batched, _from_ours), consts, out_batched


def _to_ours(eqn: JaxprEqn) -> JaxprEqn:
    return eqn.replace(primitive=_custom_lin_p) if eqn.primitive is custom_lin_p else eqn


def _from_ours(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive is _custom_lin_p:  # what reads no batched value
        return eqn.replace(primitive=custom_lin_p)
    return eqn.replace(primitive=_stopped_p) if eqn.primitive.name == "stop_gradient" else eqn
