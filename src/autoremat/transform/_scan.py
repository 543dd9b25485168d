"""`scan`: that of JAX, with a bound on how many copies of the carry reverse mode keeps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from autoremat import _compat
from autoremat._errors import EffectError
from autoremat.transform import _scan_rules as _scan_rules  # registers the rules
from autoremat.transform._scan_primitives import scan_p
from autoremat.transform._trace_user import bind_call, trace_call

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    snapshots: int | None,
) -> tuple[Carry, Y]:
    """`jax.lax.scan` whose backward pass keeps at most `snapshots` copies of the carry.

    Reverse mode through `jax.lax.scan` keeps what every step's derivative reads: memory grows with the length times all
    intermediates of a step; with `jax.checkpoint` round the step, with the length times the carry. This scan keeps the carry at
    `snapshots` steps, the first among them, and advances from there to the others again, by the binomial schedule, which
    needs the least steps: for n steps and s snapshots

        r n - C(s + r, r - 1)  steps advanced,  r the least number with C(s + r, s) >= n

    the n - 1 of the forward pass among them: 2,747 for n = 1,000 and s = 20, 3,636 for s = 10. Beside these, each step is
    linearized once, and the last one runs in the forward pass, for its value. Values and derivatives, of any order and mode, are those
    of the plain scan.

    **Arguments:**

    - `f`, `init`, `xs`, `length`, `reverse`: as in `jax.lax.scan`: `f(carry, x) -> (carry, y)`, pytrees of arrays; `xs` and the ys
      have a leading axis of `length` steps. `f` may close over arrays, and is differentiated in them.
    - `unroll`: as in `jax.lax.scan`, for the values and for forward mode. Where snapshots are taken or read, steps run one by one: how
      many there are between two snapshots is data of the program.
    - `snapshots`: the number of copies of the carry that wait for the backward pass, at least 1; a step's own memory comes on top, and
      one carry, the state in hand. `xs`, ys and their cotangents are not bounded by it. `None`: the plain `jax.lax.scan`.

    **Returns:** the last carry, and the ys, stacked.

    **Raises:** `TypeError` if `snapshots` is not an int, `ValueError` if it is less than 1, what `jax.lax.scan` raises, and
    `EffectError` if `f` has an effect that may not run twice and is differentiated, or reads or writes a mutable reference.

    The compiled program does not grow with `length`; tables of the schedule, a few integers a step, are its constants.

    Forward mode computes the primal steps twice, as with `autoremat.checkpoint`: for the value, and beside the tangents. Of second
    derivatives, forward over reverse and reverse over forward keep `snapshots` copies of carry and tangent; reverse over
    reverse keeps about `3 sqrt(length)` of them.

    **Source:** Griewank and Walther, Algorithm 799: *Revolve*, ACM TOMS 26(1), 2000; `jax.lax.scan`.
    """
    if snapshots is not None:
        snapshots = _checked(snapshots)
    if snapshots is None or _compat.jit_is_disabled():
        return lax.scan(f, init, xs, length, reverse, unroll)

    def run(init: Carry, xs: X | None) -> tuple[Carry, Y]:
        return lax.scan(f, init, xs, length, reverse, unroll)

    # JAX's own scan checks the arguments and settles types; its equation is then bound as ours.
    call = bind_call(run, (init, xs), {}, (), ())
    jaxpr, consts, tree = trace_call(run, call, "autoremat.scan")
    scans = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"]
    if len(scans) != 1:
        raise NotImplementedError(
            "autoremat.scan found no scan in what jax.lax.scan traced. Cheapest fix: leave the flag jax_scan3 off, or use snapshots=None."
        )
    eqns = list(jaxpr.eqns)
    eqns[scans[0]] = with_snapshots(eqns[scans[0]], snapshots)
    replaced = _compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)
    return jax.tree.unflatten(tree, _compat.eval_jaxpr(replaced, *consts, *call.leaves))


def _checked(snapshots: Any) -> int:
    """The number of snapshots as an int."""
    try:
        if isinstance(snapshots, bool):
            raise TypeError
        number = operator.index(snapshots)
    except TypeError:
        raise TypeError(
            f"autoremat.scan needs an int as `snapshots`, the number of copies of the carry that may be kept, or None for a plain "
            f"scan; got {snapshots!r} of type {type(snapshots).__name__}. Cheapest fix: give a Python int; a traced value cannot "
            "decide how much memory a program has."
        ) from None
    if number < 1:
        raise ValueError(
            f"autoremat.scan needs at least 1 snapshot, that of the initial carry; got snapshots={number}. Cheapest fix: snapshots=1 "
            "keeps the least and computes the most; about log2(length) of them cost a few steps for each step."
        )
    return number


def with_snapshots(eqn: _compat.JaxprEqn, snapshots: int) -> _compat.JaxprEqn:
    """The equation of a plain scan as one with at most so many snapshots."""
    body, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
    if consts:
        raise AssertionError("a scan hoists the constants of its body")
    length = eqn.params["length"]
    if not length:
        return eqn
    if any(_compat.is_ref(v.aval) for v in eqn.invars):
        raise EffectError(
            f"A mutable reference is used inside the function that autoremat.scan scans, {body.debug_info.func_src_info}: steps "
            "between snapshots run again, and would write twice. Cheapest fix: carry the array instead of the reference, or use "
            "snapshots=None."
        )
    num_consts, num_carry = _compat.scan_sizes(eqn.params)
    params = {
        "jaxpr": body,
        "num_consts": num_consts,
        "num_carry": num_carry,
        "length": length,
        "reverse": eqn.params["reverse"],
        "unroll": eqn.params["unroll"],
        "snapshots": min(snapshots, length),
        "saving": False,
    }
    return _compat.new_eqn(eqn.invars, eqn.outvars, scan_p, params, eqn.effects, eqn.source_info, eqn.ctx)
