"""Runs a program one operation at a time, or compiled in a way that gets random programs right.

Compiling a random program takes a second, and it runs once. Single operations are compiled once for all programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoremat._compat import JaxprEqn, Literal, open_jaxpr, scan_sizes
from autoremat.transform._linear_map import run_map
from autoremat.transform._scan_primitives import run_scan, run_sweep

_LOOPS = {"autoremat_scan": run_scan, "autoremat_sweep": run_sweep, "autoremat_linear_map": run_map}


def interpreted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, traced as `jax.jit` does, and then run without compiling it as a whole."""

    def run(*args: Any) -> Any:
        jaxpr, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outs = evaluate(jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out_shape), outs)

    return run


def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, compiled as a whole, without fusion.

    XLA's fusion for CPUs gets a few random programs wrong, without any checkpoint in them
    (`test_what_fusion_gets_wrong` in tests/transform/test_stacks.py).
    """
    options: Any = {"xla_disable_hlo_passes": "fusion"}
    return lambda *args: jax.jit(fun).lower(*args).compile(compiler_options=options)(*args)


def evaluate(closed: Any, args: list[Any]) -> list[Any]:
    """Evaluate a closed jaxpr."""
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = _run(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _run(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(params, args)
    if name == "cond":
        index = min(max(int(args[0]), 0), len(params["branches"]) - 1)
        return evaluate(params["branches"][index], args[1:])
    if name == "while":
        return _while(params, args)
    if name in _LOOPS:
        return interpreted(functools.partial(_LOOPS[name], **params))(*args)
    for key in ("jaxpr", "call_jaxpr"):
        if key in params:
            return evaluate(params[key], args)
    outs = eqn.primitive.bind(*args, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _scan(params: dict[str, Any], args: list[Any]) -> list[Any]:
    num_consts, num_carry = scan_sizes(params)
    consts, carry, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
    steps = range(params["length"])
    rows = []
    for i in reversed(steps) if params["reverse"] else steps:
        outs = evaluate(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        carry, ys = outs[:num_carry], outs[num_carry:]
        rows.append(ys)
    if params["reverse"]:
        rows.reverse()
    return [*carry, *(jnp.stack(ys) for ys in zip(*rows, strict=True))]


def _while(params: dict[str, Any], args: list[Any]) -> list[Any]:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = args[:a], args[a : a + b], args[a + b :]
    while evaluate(params["cond_jaxpr"], [*cond_consts, *carry])[0]:
        carry = evaluate(params["body_jaxpr"], [*body_consts, *carry])
    return carry
