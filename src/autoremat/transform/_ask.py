"""How a policy of the user is asked: what it is told of an equation, and when two policies are the same.

A policy has the signature of JAX's, `policy(primitive, *input_avals, **params)`. One that has a parameter named `equation`
gets an `Equation`, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

from autoremat._compat import JaxprEqn, Primitive, new_jaxpr, source_of
from autoremat.cost import graph_flops
from autoremat.graph._trace import aval_size, trace_graph

PARAMETER = "equation"


@dataclass(frozen=True, eq=False)
class Equation:
    """An equation whose outputs a policy may keep, for a policy with a parameter `equation`.

    `outputs` are the avals of the outputs in question (`.shape`, `.dtype`), `names` the names that `autoremat.checkpoint_name` gave
    them. Inside a `scan`, all figures are those of one iteration.
    """

    outputs: tuple[Any, ...]
    names: frozenset[str]
    _eqn: JaxprEqn = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs."""
        return sum(aval_size(aval)[2] for aval in self.outputs)

    @property
    def flops(self) -> int:
        """FLOPs of one execution, inner loops times their trip counts."""
        inputs = list(dict.fromkeys(v for v in self._eqn.invars if not hasattr(v, "val")))
        one = new_jaxpr(inputs, self._eqn.outvars, [self._eqn])
        return graph_flops(trace_graph(one, source_of=lambda eqn: "")[0])

    @property
    def source(self) -> str:
        """The user's code that made it: `file:line:column (function)`."""
        return source_of(self._eqn)


def equation(eqn: JaxprEqn, outputs: Sequence[int], names: frozenset[str]) -> Equation:
    """What a policy is told of `outputs` (indices) of an equation, tagged with `names`."""
    return Equation(tuple(eqn.outvars[i].aval for i in outputs), names, eqn)


def ask(policy: Any, about: Equation | None, prim: Any, avals: Sequence[Any], params: Any) -> Any:
    """The answer of a policy."""
    if wants_equation(policy):
        return policy(prim, *avals, **{**params, PARAMETER: about})
    return policy(prim, *avals, **params)


def wants_equation(policy: Any) -> bool:
    """Whether a policy has a parameter `equation`."""
    if isinstance(policy, ByValue):
        policy = policy.policy
    try:
        parameter = inspect.signature(policy).parameters.get(PARAMETER)
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return parameter is not None and parameter.kind in (
        parameter.KEYWORD_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )


# ------------------------------------------------------------------------------------------------- the same policy again


@dataclass(frozen=True)
class ByValue:
    """A function as a policy, equal to another one that is made of the same code and the same values.

    So `policy=lambda prim, *_, **__: ...`, a new function at every call, is decided about once.
    """

    value: Hashable
    policy: Callable[..., Any] = field(compare=False)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        return self.policy(prim, *avals, **params)

    def __repr__(self) -> str:
        return repr(self.policy)


class _NotPlain(Exception):
    """A value of which equality does not say that it is the same."""


def by_value(policy: Any) -> Any:
    """The policy, compared by value where it is a function or a `functools.partial` of plain values; else as it is."""
    if not isinstance(policy, (FunctionType, partial)):
        return policy
    try:
        return ByValue(_value(policy), policy)
    except _NotPlain:
        return policy


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, Primitive)


def _value(x: Any) -> Hashable:
    """What `x` consists of, if it cannot change."""
    if isinstance(x, _PLAIN):
        return (type(x), x)
    if isinstance(x, (tuple, frozenset)):
        return (type(x), type(x)(_value(item) for item in x))
    if isinstance(x, partial):
        return (partial, _value(x.func), _value(x.args), _named(x.keywords))
    if isinstance(x, FunctionType):
        cells = tuple(_value(_content(cell)) for cell in x.__closure__ or ())
        return (x.__code__, id(x.__globals__), _value(x.__defaults__), _named(x.__kwdefaults__ or {}), cells)
    if getattr(x, "__dataclass_params__", None) is not None and x.__dataclass_params__.frozen:
        return (type(x), tuple(_value(getattr(x, name)) for name in x.__dataclass_fields__))
    raise _NotPlain


def _named(values: dict[str, Any]) -> Hashable:
    return tuple((name, _value(value)) for name, value in sorted(values.items()))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise _NotPlain from None
