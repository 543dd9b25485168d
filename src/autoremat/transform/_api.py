"""`checkpoint` and `checkpoint_name`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax

from autoremat._compat import name_p
from autoremat.transform._policies import compared_by_value
from autoremat.transform._primitives import checkpoint_p
from autoremat.transform._trace_user import bind_call, ensure_tuple, trace_call

F = TypeVar("F", bound=Callable[..., Any])


@overload
def checkpoint(
    fun: F,
    *,
    policy: Any = ...,
    budget: int | str | None = ...,
    prevent_cse: bool | Sequence[Any] = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
) -> F: ...


@overload
def checkpoint(
    fun: None = ...,
    *,
    policy: Any = ...,
    budget: int | str | None = ...,
    prevent_cse: bool | Sequence[Any] = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
) -> Callable[[F], F]: ...


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    policy: Any = None,
    budget: int | str | None = None,
    prevent_cse: bool | Sequence[Any] = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Make `fun` recompute its intermediates in the backward pass instead of keeping them.

    Reverse-mode differentiation keeps every value that the backward pass reads. For `checkpoint(fun)` it keeps the
    inputs, and what `policy` or `budget` lets it keep; the rest is computed again when its cotangent arrives. Values and
    gradients are those of `fun`. Does all that `jax.checkpoint` does; also works as a decorator, bare or with options.

    **Arguments:**

    - `fun`: the function. Its positional and keyword arguments, and its result, are pytrees of arrays.
    - `policy`: what may be kept: one of `autoremat.checkpoint_policies`, or a callable of the same signature. One that has a
      keyword-only parameter `equation` gets an `autoremat.Equation` by it: output avals, bytes, FLOPs, names, source. `None` keeps only the inputs.
    - `budget`: in place of a policy: the bytes of residuals that the region may keep besides its inputs, an int or a string such
      as `"64MiB"`, or a share such as `"50%"` of what it keeps without recomputation. What to keep is then chosen to
      recompute as little as possible, while tracing. This bounds kept bytes, not the compiled peak: for that, see
      `autoremat.plan`.
    - `prevent_cse`: whether to guard the recomputation by an optimization barrier, so that the compiler does not undo
      it. A bool, or a pytree prefix of the arguments with a bool for each. Inside `scan` it can be `False`.
    - `static_argnums`, `static_argnames`: arguments that are compile-time constants, by position or by name.

    **Returns:** a function with the arguments and results of `fun`.

    **Raises:** `PolicyError` if a policy returns neither a bool nor a decision; `EffectError` if a differentiated `fun` has an
    effect that may not run twice; `BudgetError` if the budget cannot be read; `InfeasibleBudgetError` if it cannot be met.

    **Source:** `jax.checkpoint`; Griewank and Walther, *Evaluating Derivatives*, ch. 12.
    """
    if fun is None:
        return functools.partial(
            checkpoint,
            policy=policy,
            budget=budget,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise TypeError(f"autoremat.checkpoint needs a function, got {fun!r}. Pass options by keyword.")
    if budget is not None:
        if policy is not None:
            raise TypeError("autoremat.checkpoint takes a policy or a budget, not both.")
        from autoremat.transform._planned import BudgetPolicy

        policy = BudgetPolicy.parse(budget)
    if not isinstance(prevent_cse, (bool, tuple, list)):
        raise TypeError(
            "the `prevent_cse` argument to `autoremat.checkpoint` must be a bool or a tuple with a bool for each argument, "
            f"but got {prevent_cse!r}."
        )
    argnums = ensure_tuple(static_argnums, int, "static_argnums")
    argnames = ensure_tuple(static_argnames, str, "static_argnames")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        call = bind_call(fun, args, kwargs, argnums, argnames)
        jaxpr, consts, out_tree = trace_call(fun, call, "checkpoint / remat")
        guard = (
            prevent_cse if isinstance(prevent_cse, bool) else _per_argument(prevent_cse, call, len(consts))
        )
        outs = checkpoint_p.bind(
            *consts,
            *call.leaves,
            jaxpr=jaxpr,
            policy=compared_by_value(policy),
            prevent_cse=guard,
            differentiated=False,
            origin=None,
            siblings=None,
        )
        return jax.tree.unflatten(out_tree, outs)

    return checkpointed


remat = checkpoint


def _per_argument(prevent_cse: Sequence[Any], call: Any, num_consts: int) -> tuple[bool, ...]:
    """`prevent_cse` as a prefix of `(args)` or `(args, kwargs)`, spread over the flat arguments."""
    args, kwargs = jax.tree.unflatten(call.tree, call.leaves)
    target = (tuple(args), kwargs) if kwargs else tuple(args)
    flags: list[bool] = []
    try:
        jax.tree.map(
            lambda flag, part: flags.extend([bool(flag)] * len(jax.tree.leaves(part))),
            tuple(prevent_cse),
            target,
        )
    except ValueError as error:
        raise ValueError(
            f"the `prevent_cse` argument to `autoremat.checkpoint`, {prevent_cse!r}, is no prefix of the "
            f"{'(args, kwargs)' if kwargs else 'args'} of this call without its static arguments: {error}"
        ) from None
    return (*(False for _ in range(num_consts)), *flags)


def checkpoint_name(x: Any, name: str) -> Any:
    """Tag the arrays of a pytree with a name that policies and reports can refer to.

    Binds JAX's own `name` primitive, so that tags made by `jax.ad_checkpoint.checkpoint_name` count here, and the other
    way round.
    """
    if not isinstance(name, str):
        raise TypeError(f"checkpoint_name needs a str as name, got {name!r} of type {type(name).__name__}.")
    return jax.tree.map(lambda leaf: name_p.bind(leaf, name=name), x)
