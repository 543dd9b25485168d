"""Structural work on jaxprs: inlining, substitution, dead code. Nothing is traced again here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from autoremat._compat import (
    EVALUATED,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Tracer,
    Var,
    close_jaxpr,
    eqn_is_effectful,
    is_jaxpr,
    new_jaxpr,
    new_var,
    open_jaxpr,
    trace,
    varying_axes,
    weakref_lru_cache,
    with_source_of,
)

R = TypeVar("R")

# Calls without a meaning of their own: a planner looks through them.
PLAIN_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": EVALUATED,
}


def is_var(x: Any) -> bool:
    """Whether an atom of a jaxpr is a variable, not a literal."""
    return not isinstance(x, Literal)


# Functions with derivatives of their own: where nothing is differentiated any more they are plain calls.
OWN_DERIVATIVES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}

# Checkpoints that a planner replaces by its own: JAX's and ours.
CHECKPOINTS = {"remat2": "jaxpr", "checkpoint": "jaxpr", "autoremat_checkpoint": "jaxpr"}

# All that runs one program once, on all of its operands: what a compiler inlines.
CALLS = {**PLAIN_CALLS, **CHECKPOINTS, **OWN_DERIVATIVES, "autoremat_linear": "jaxpr"}


def called_jaxpr(eqn: JaxprEqn, calls: Mapping[str, str] = PLAIN_CALLS) -> Any | None:
    """The jaxpr that a plain call runs, or `None` if the equation is not a call that may be inlined.

    A `jit` with shardings or layouts of its own says something to the compiler, so it stays. So does a checkpoint that
    is a backward pass already.
    """
    key = calls.get(eqn.primitive.name)
    if key is None or key not in eqn.params or eqn.params.get("differentiated"):
        return None
    for constraint in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
        for spec in eqn.params.get(constraint, ()):
            if spec is not None and "Unspecified" not in type(spec).__name__:
                return None
    # In a branch of a `cond`, JAX makes operands varying after it has traced the calls on them: inlined, they would not type.
    body, _ = open_jaxpr(eqn.params[key])
    if any(
        varying_axes(a.aval) != varying_axes(v.aval) for a, v in zip(eqn.invars, body.invars, strict=True)
    ):
        return None
    return eqn.params[key]


def substitute(atoms: Iterable[Any], env: Mapping[Var, Any]) -> list[Any]:
    """Replace variables that `env` maps."""
    return [env.get(a, a) if is_var(a) else a for a in atoms]


class _Inliner:
    """Collects the equations of nested calls in one flat list, with fresh variables for each call.

    `hoist` says what to do with a call that holds constants: hoist them, or leave the call as it is.
    """

    def __init__(self, calls: Mapping[str, str] = PLAIN_CALLS, hoist: bool = True) -> None:
        self.calls = calls
        self.hoist = hoist
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}

    def run(self, jaxpr: Jaxpr, env: dict[Var, Any], fresh: bool, call: JaxprEqn | None = None) -> list[Any]:
        for eqn in jaxpr.eqns:
            if call is not None:
                eqn = with_source_of(eqn, call)
            invars = substitute(eqn.invars, env)
            called = called_jaxpr(eqn, self.calls)
            inner, consts = open_jaxpr(called) if called is not None else (None, ())
            if inner is not None and (self.hoist or not consts):
                inner_env: dict[Var, Any] = dict(zip(inner.invars, invars, strict=True))
                for var, value in zip(inner.constvars, consts, strict=True):
                    hoisted = new_var(var.aval)
                    self.constants[hoisted] = value
                    inner_env[var] = hoisted
                outs = self.run(inner, inner_env, True, eqn)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            outvars = eqn.outvars
            if fresh:
                outvars = [
                    DropVar(v.aval) if isinstance(v, DropVar) else new_var(v.aval) for v in eqn.outvars
                ]
                env.update(
                    (a, b) for a, b in zip(eqn.outvars, outvars, strict=True) if not isinstance(a, DropVar)
                )
            if fresh or invars != list(eqn.invars):
                eqn = rebind(eqn, invars, outvars)
            self.eqns.append(eqn)
        return substitute(jaxpr.outvars, env)


def rebind(eqn: JaxprEqn, invars: Sequence[Any], outvars: Sequence[Any], **params: Any) -> JaxprEqn:
    """The same equation on other variables, with some parameters changed."""
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=dict(eqn.params, **params))


def inline_calls(
    jaxpr: Jaxpr, *, dissolve_checkpoints: bool = False, dissolve_derivatives: bool = False
) -> tuple[Jaxpr, list[Any]]:
    """Inline every plain call. Returns a jaxpr whose leading inputs are the returned constants.

    `jaxpr: a -> b` becomes `(consts, a) -> b`; a jaxpr without calls comes back as it is. `dissolve_checkpoints` treats
    checkpoints as plain calls, too, `dissolve_derivatives` functions with derivatives of their own.
    """
    calls = PLAIN_CALLS | (CHECKPOINTS if dissolve_checkpoints else {})
    calls |= OWN_DERIVATIVES if dissolve_derivatives else {}
    if not any(called_jaxpr(e, calls) is not None for e in jaxpr.eqns):
        return jaxpr, []
    inliner = _Inliner(calls)
    outs = inliner.run(jaxpr, {}, False)
    invars = [*inliner.constants, *jaxpr.invars]
    return new_jaxpr(invars, outs, inliner.eqns, jaxpr), list(inliner.constants.values())


def inline_body(jaxpr: Jaxpr, *, dissolve_derivatives: bool = False) -> Jaxpr:
    """Inline the plain calls in the body of a loop or a branch, which can have no constants: a call that holds some stays.

    `dissolve_derivatives` as in `inline_calls`.
    """
    inliner = _Inliner(PLAIN_CALLS | (OWN_DERIVATIVES if dissolve_derivatives else {}), hoist=False)
    outs = inliner.run(jaxpr, {}, False)
    return new_jaxpr(jaxpr.invars, outs, inliner.eqns, jaxpr)


def live_eqns(eqns: Sequence[JaxprEqn], outs: Iterable[Any], *, effects: bool = True) -> list[JaxprEqn]:
    """The equations that `outs` need, and those with effects if `effects`; in order."""
    want = {v for v in outs if is_var(v)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if any(v in want for v in eqn.outvars) or (effects and eqn_is_effectful(eqn)):
            kept.append(eqn)
            want.update(v for v in eqn.invars if is_var(v))
    kept.reverse()
    return kept


def free_vars(eqns: Sequence[JaxprEqn], outs: Iterable[Any] = ()) -> list[Var]:
    """The variables that the equations and `outs` read but do not make, in order of first use."""
    made: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if is_var(v) and v not in made:
                free.setdefault(v)
        made.update(eqn.outvars)
    for v in outs:
        if is_var(v) and v not in made:
            free.setdefault(v)
    return list(free)


def traced_eqns(
    fun: Callable[..., Sequence[Any]], invars: Sequence[Var], what: str
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a small helper function applied to given variables, and its output atoms."""
    jaxpr, consts = trace(fun, [v.aval for v in invars], what)
    if consts:
        raise AssertionError(f"{what} must not capture constants")
    inliner = _Inliner()
    outs = inliner.run(jaxpr, dict(zip(jaxpr.invars, invars, strict=True)), True)
    return inliner.eqns, outs


def subjaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs in the parameters of an equation, opened."""
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(x):
                found.append(open_jaxpr(x)[0])
    return found


def all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program and of all programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from all_eqns(inner)


def map_eqns(jaxpr: Jaxpr, change: Callable[[JaxprEqn], JaxprEqn]) -> Jaxpr:
    """Apply `change` to every equation, those of inner programs first. An unchanged jaxpr comes back as it is."""
    eqns = [change(_map_inner(eqn, change)) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _map_inner(eqn: JaxprEqn, change: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    def of_param(x: Any) -> Any:
        # `map_eqns`: the same program before `vmap`
        return x.map_eqns(change) if hasattr(x, "map_eqns") else x

    mapped = map_programs(eqn, lambda jaxpr: map_eqns(jaxpr, change))
    params = {key: of_param(value) for key, value in mapped.params.items()}
    if all(params[key] is value for key, value in mapped.params.items()):
        return mapped
    return mapped.replace(params=params)


def map_programs(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Apply `change` to the programs inside an equation. An unchanged equation comes back as it is; its effects stay."""

    def of_param(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)):
            mapped = _same_tuple(x, [of_param(y) for y in x])
            return x if all(new is old for new, old in zip(mapped, x, strict=True)) else mapped
        if not is_jaxpr(x):
            return x
        opened, consts = open_jaxpr(x)
        changed = change(opened)
        if changed is opened:
            return x
        return (
            changed if x is opened else close_jaxpr(changed, dict(zip(opened.constvars, consts, strict=True)))
        )

    params = {key: of_param(value) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def _same_tuple(like: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple (that of a linear solve holds four jaxprs) with other parts."""
    return like._make(parts) if hasattr(like, "_make") else type(like)(parts)


def cached_by_jaxpr(fun: Callable[..., R]) -> Callable[..., R]:
    """Cache a function of a jaxpr (and hashable arguments) for as long as the jaxpr lives.

    A result that holds a tracer among its `constants` is not kept: no cache may keep a trace alive. (The rule of a
    `custom_vjp` can close over one.)
    """
    cached = weakref_lru_cache(fun)

    def lookup(jaxpr: Jaxpr, *rest: Any) -> R:
        result = cached(jaxpr, *rest)
        if any(isinstance(c, Tracer) for c in getattr(result, "constants", ())):
            cached.evict_weakref(jaxpr)
        return result

    return lookup
