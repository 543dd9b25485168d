"""How the primitives of a scan with snapshots are differentiated and batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from autoremat._compat import (
    Jaxpr,
    Zero,
    ad,
    batching,
    disallowed_effects,
    instantiate,
    register_key_reuse_rule,
    tangent_aval,
)
from autoremat._errors import EffectError
from autoremat.transform._derived import Flags, chosen, perturbed
from autoremat.transform._linear_map import at_front, linear_map_p
from autoremat.transform._scan_maps import ScanMap, SweepMap
from autoremat.transform._scan_primitives import loop_params, scan_p, sweep_operands, sweep_p
from autoremat.transform._snapshots import Loop
from autoremat.transform._vmap import batch_jaxpr

Values = list[Any]


# ------------------------------------------------------------------------------------------------------------------- jvp


def _check_effects(jaxpr: Jaxpr) -> None:
    if found := disallowed_effects(jaxpr):
        names = ", ".join(sorted({str(effect) for effect in found}))
        raise EffectError(
            f"Effects not supported in the derivative of `autoremat.scan`: [{names}], in {jaxpr.debug_info.func_src_info}. "
            "Steps between snapshots run again in the backward pass, and these effects may not. Cheapest fix: move the call "
            "that has the effect (io_callback, an ordered print) out of the scanned function, or scan with snapshots=None."
        )


def _nonzero(tangents: Sequence[Any]) -> Flags:
    return tuple(type(t) is not Zero for t in tangents)


def _scan_jvp(primals: Any, tangents: Any, *, unroll: int, saving: bool, **params: Any) -> Any:
    """The scan with its snapshots, and a linear map. The snapshots have no tangents (see `_scan_maps`)."""
    loop = Loop(**params)
    _check_effects(loop.jaxpr)
    outs = scan_p.bind(*primals, unroll=unroll, saving=True, **params)
    num_outs = len(loop.jaxpr.outvars)
    flags, out_flags = perturbed(loop.jaxpr, _nonzero(tangents), loop.num_consts, loop.num_carry)
    touts: list[Any] = [Zero(tangent_aval(a)) for a in loop.out_avals()]
    if any(out_flags):
        residuals = [*primals, *outs[num_outs:]]
        found = iter(
            linear_map_p.bind(
                *residuals,
                *map(instantiate, chosen(tangents, flags)),
                linear_map=ScanMap(loop, flags, out_flags, unroll),
                num_residuals=len(residuals),
            )
        )
        touts = [next(found) if f else t for t, f in zip(touts, out_flags, strict=True)]
    if saving:
        return outs, [*touts, *(Zero(tangent_aval(a)) for a in loop.snapshot_avals())]
    return outs[:num_outs], touts


ad.primitive_jvps[scan_p] = _scan_jvp


def _sweep_jvp(
    primals: Any,
    tangents: Any,
    *,
    step_back: Jaxpr,
    num_back_consts: int,
    num_adjoint: int,
    steps_again: int,
    **params: Any,
) -> Any:
    loop = Loop(**params)
    outs = sweep_p.bind(
        *primals,
        step_back=step_back,
        num_back_consts=num_back_consts,
        num_adjoint=num_adjoint,
        steps_again=steps_again,
        **params,
    )

    def without_snapshots(values: Sequence[Any]) -> list[Values]:
        inputs, _, *rest = sweep_operands(loop, num_back_consts, num_adjoint, values)
        return [inputs, *rest]

    of_inputs, of_consts, _, of_zs = map(tuple, without_snapshots(_nonzero(tangents)))
    of_inputs, _ = perturbed(loop.jaxpr, of_inputs, loop.num_consts, loop.num_carry)
    # All of the adjoint has tangents: it is what those of the other operands are added to.
    linear = SweepMap(loop, step_back, of_inputs, of_consts, (True,) * num_adjoint, of_zs)
    residuals, all_tangents = (
        [x for part in without_snapshots(values) for x in part] for values in (primals, tangents)
    )
    given = map(instantiate, chosen(all_tangents, linear.flags))
    touts = linear_map_p.bind(*residuals, *given, linear_map=linear, num_residuals=len(residuals))
    return outs, touts


ad.primitive_jvps[sweep_p] = _sweep_jvp


# -------------------------------------------------------------------------------------------------------------- batching


def _batch_body(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any], first: int, num_carry: int
) -> tuple[Jaxpr, Values, list[bool]]:
    """`vmap` of a body whose carry is the inputs from `first` on and the first outputs. As much of the carry is batched as must be.

    Returns the batched body, its new constants, and which outputs are batched.
    """
    carry = [d is not None for d in dims[first : first + num_carry]]
    while True:
        now = [*dims[:first], *(0 if b else None for b in carry), *dims[first + num_carry :]]
        forced = [*carry, *(False for _ in jaxpr.outvars[num_carry:])]
        batched, consts, outs = batch_jaxpr(jaxpr, axis_data, now, forced)
        if outs[:num_carry] == carry:
            return batched, consts, outs
        carry = outs[:num_carry]


def _carried(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], batched: Sequence[bool]) -> Values:
    """Operands for a carry: the batch at the front where it is batched."""
    size = axis_data.size
    return [at_front(x, d, size) if b else x for x, d, b in zip(args, dims, batched, strict=True)]


def _stacked(args: Sequence[Any], dims: Sequence[Any]) -> Values:
    """Stacks over steps or places: the batch behind the first axis."""
    return [x if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(args, dims, strict=True)]


def _per_step(dims: Sequence[Any]) -> list[int | None]:
    """Where the batch is in an element of a stack, or in a carry."""
    return [None if d is None else 0 for d in dims]


def _scan_batch(axis_data: Any, args: Any, dims: Any, *, unroll: int, saving: bool, **params: Any) -> Any:
    loop = Loop(**params)
    (consts, init, xs), (c_dims, i_dims, x_dims) = loop.split(args), loop.split(dims)
    body, new, batched = _batch_body(
        loop.jaxpr, axis_data, [*c_dims, *i_dims, *_per_step(x_dims)], loop.num_consts, loop.num_carry
    )
    of_carry, of_ys = batched[: loop.num_carry], batched[loop.num_carry :]
    outs = scan_p.bind(
        *new,
        *consts,
        *_carried(axis_data, init, i_dims, of_carry),
        *_stacked(xs, x_dims),
        unroll=unroll,
        saving=saving,
        **loop_params(loop, jaxpr=body, num_consts=len(new) + len(consts)),
    )
    stacks = [*of_ys, *(of_carry if saving else ())]
    return outs, [*(0 if b else None for b in of_carry), *(1 if b else None for b in stacks)]


batching.fancy_primitive_batchers[scan_p] = _scan_batch


def _sweep_batch(
    axis_data: Any,
    args: Any,
    dims: Any,
    *,
    step_back: Jaxpr,
    num_back_consts: int,
    num_adjoint: int,
    steps_again: int,
    **params: Any,
) -> Any:
    loop = Loop(**params)
    inputs, places, back_consts, adjoint, zs = sweep_operands(loop, num_back_consts, num_adjoint, args)
    in_dims, p_dims, b_dims, a_dims, z_dims = sweep_operands(loop, num_back_consts, num_adjoint, dims)
    (consts, init, xs), (c_dims, i_dims, x_dims) = loop.split(inputs), loop.split(in_dims)
    # A carry of which only the snapshots are batched is batched.
    now = [*c_dims, *(p if i is None else i for i, p in zip(i_dims, p_dims, strict=True)), *_per_step(x_dims)]
    body, new, of_carry = _batch_body(loop.jaxpr, axis_data, now, loop.num_consts, loop.num_carry)
    step_dims = [*(0 if b else None for b in of_carry), *_per_step(x_dims)]
    back, back_new, batched = _batch_body(
        step_back,
        axis_data,
        [*b_dims, *step_dims, *a_dims, *_per_step(z_dims)],
        num_back_consts + len(step_dims),
        num_adjoint,
    )
    outs = sweep_p.bind(
        *new,
        *consts,
        *_carried(axis_data, init, i_dims, of_carry),
        *_stacked(xs, x_dims),
        *_stacked(_carried(axis_data, places, p_dims, of_carry), [0 if b else None for b in of_carry]),
        *back_new,
        *back_consts,
        *_carried(axis_data, adjoint, a_dims, batched[:num_adjoint]),
        *_stacked(zs, z_dims),
        step_back=back,
        num_back_consts=len(back_new) + num_back_consts,
        num_adjoint=num_adjoint,
        steps_again=steps_again,
        **loop_params(loop, jaxpr=body, num_consts=len(new) + len(consts)),
    )
    return outs, [(0 if i < num_adjoint else 1) if b else None for i, b in enumerate(batched)]


batching.fancy_primitive_batchers[sweep_p] = _sweep_batch


# -------------------------------------------------------------------------------------------------------------- key reuse

# A second run uses the keys of the first again, and may.
register_key_reuse_rule(scan_p, lambda params: False)
register_key_reuse_rule(sweep_p, lambda params: True)
register_key_reuse_rule(linear_map_p, lambda params: True)
