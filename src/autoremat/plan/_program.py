"""What a plan is compiled as: the gradient of a loss by itself, or a training step with the gradient inside."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autoremat._compat import Jaxpr, eval_jaxpr
from autoremat.measure import abstract
from autoremat.plan._alike import Alike
from autoremat.plan._rewrite import Decisions, rewrite
from autoremat.plan._trace import Traced
from autoremat.sharding import Shards, shards_of_arrays


class Program(Protocol):
    """A function of `args` that holds the gradient of the function to plan for.

    `key` tells programs of the same such function apart; `argnums` and `has_aux` are those of the gradient.
    """

    @property
    def args(self) -> tuple[Any, ...]:
        """Example arguments of the whole."""
        ...

    @property
    def argnums(self) -> tuple[int, ...]:
        """Which arguments of the function are differentiated."""
        ...

    @property
    def has_aux(self) -> bool:
        """Whether the function returns (loss, aux)."""
        ...

    @property
    def key(self) -> Hashable:
        """What its compiled memory depends on, beside the function and the target."""
        ...

    @property
    def shards(self) -> Shards:
        """How the values of the function's program are divided among devices."""
        ...

    def whole(self, decisions: Decisions, alike: Alike | None = None) -> Callable[..., Any]:
        """What is compiled, with decisions written in; with `alike`, a copy for predictions, in which equal parts are one."""
        ...

    def gradient(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The gradient alone, nothing recomputed, and example arguments of it."""
        ...


@dataclass(frozen=True, eq=False)
class LossProgram:
    """`value_and_grad` of a traced loss."""

    traced: Traced
    args: tuple[Any, ...]
    argnums: tuple[int, ...]
    scalar_argnum: bool
    has_aux: bool

    @property
    def key(self) -> Hashable:
        """How the arguments are differentiated and sharded."""
        return ("loss", self.argnums, self.has_aux, shardings_key(self.args))

    @property
    def shards(self) -> Shards:
        """From the shardings of the arguments; arrays that the loss closes over are constants to a compiler, and whole."""
        constants = (None,) * len(self.traced.constants)
        return shards_of_arrays(self.traced.jaxpr, (*constants, *self.traced.leaves))

    def whole(self, decisions: Decisions, alike: Alike | None = None) -> Callable[..., Any]:
        """`value_and_grad` of the planned loss."""
        argnums = self.argnums[0] if self.scalar_argnum else self.argnums
        planned = planned_function(self.traced, decisions, alike)
        return jax.value_and_grad(planned, argnums, has_aux=self.has_aux)

    def gradient(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The same, nothing recomputed."""
        return self.whole(()), self.args


def shardings_key(args: Any) -> Hashable:
    """The shardings of example arguments, as text."""
    return tuple(str(getattr(x, "sharding", None)) for x in jax.tree.leaves(jax.tree.map(abstract, args)))


def planned_function(traced: Traced, decisions: Decisions, alike: Alike | None = None) -> Callable[..., Any]:
    """The function of the traced program with decisions written in, on the user's arguments."""
    program = rewrite(traced.jaxpr, decisions, alike=alike) if decisions else traced.jaxpr
    return evaluate_with(program, traced.constants, traced.out_tree, traced.name)


def written_function(traced: Traced) -> Callable[..., Any]:
    """The function as the user wrote it, without calling it a second time."""
    return evaluate_with(traced.written, traced.written_constants, traced.out_tree, traced.name)


def evaluate_with(program: Jaxpr, constants: tuple[Any, ...], out_tree: Any, name: str) -> Callable[..., Any]:
    """A function of pytrees that runs a program of leaves."""

    def planned(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(out_tree, eval_jaxpr(program, *constants, *leaves))

    planned.__name__ = name
    return planned
