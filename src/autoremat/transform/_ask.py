"""How a policy of the user is asked: what it is told of an equation, and when two policies are the same.

A policy has the signature of JAX's, `policy(primitive, *input_avals, **params)`. One that has a keyword-only parameter named
`equation` gets an `Equation`, too.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
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


def asker(policy: Any) -> Callable[[Equation | None, Any, Sequence[Any], Any], Any]:
    """`(equation, primitive, input avals, params) -> answer` of a policy, whose signature is looked up once."""
    if wants_equation(policy):
        return lambda about, prim, avals, params: policy(prim, *avals, **{**params, PARAMETER: about})
    return lambda about, prim, avals, params: policy(prim, *avals, **params)


def wants_equation(policy: Any) -> bool:
    """Whether a policy has a keyword-only parameter `equation`; by another one it would get the primitive or an aval."""
    if isinstance(policy, ByValue):
        policy = policy.policy
    try:
        parameter = inspect.signature(policy).parameters.get(PARAMETER)
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


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
    """The policy, compared by value where it is a function or a `functools.partial` of plain values; else as it is.

    The value is that of now: what a function has closed over may be bound to something else later.
    """
    if not isinstance(policy, (FunctionType, partial)):
        return policy
    try:
        return ByValue(_value(policy), policy)
    except _NotPlain:
        return policy


_PLAIN = (str, bytes, int, bool, type(None))


def _value(x: Any, inside: tuple[Any, ...] = ()) -> Hashable:
    """What `x` consists of, if it cannot change. `inside`: the functions that it stands in."""
    if type(x) in _PLAIN or isinstance(x, (type, Primitive, ModuleType, BuiltinFunctionType)):
        return (type(x), x)
    if type(x) in (float, complex):
        return (type(x), repr(x))  # 0.0 is not -0.0
    if type(x) in (tuple, frozenset):
        return (type(x), type(x)(_value(item, inside) for item in x))
    if type(x) is partial and not x.__dict__:
        return (partial, _value(x.func, inside), _value(x.args, inside), _named(x.keywords, inside))
    if type(x) is FunctionType and _is_constant(x, inside):
        inside = (*inside, x)
        cells = tuple(_value(_content(cell), inside) for cell in x.__closure__ or ())
        read = {n: x.__globals__[n] for n in _names_read(x.__code__) if n in x.__globals__}
        defaults = _value(x.__defaults__, inside), _named(x.__kwdefaults__ or {}, inside)
        return (x.__code__, id(x.__globals__), *defaults, cells, _named(read, inside))
    if dataclasses.is_dataclass(x) and _is_frozen(x):
        return (type(x), tuple(_value(getattr(x, f.name), inside) for f in dataclasses.fields(x)))
    raise _NotPlain


def _is_frozen(x: Any) -> bool:
    """Whether a dataclass cannot change, and has nothing beside its fields."""
    names = {f.name for f in dataclasses.fields(x)}
    return type(x).__dataclass_params__.frozen and set(getattr(x, "__dict__", names)) == names


def _is_constant(function: FunctionType, inside: tuple[Any, ...]) -> bool:
    """Whether a function has no attributes, does not refer to itself, and writes no variable that it has closed over."""
    return (
        not function.__dict__ and not any(function is f for f in inside) and not _rebinds(function.__code__)
    )


@functools.lru_cache(maxsize=1024)
def _rebinds(code: CodeType) -> bool:
    stores = {i.argval for i in dis.get_instructions(code) if i.opname in {"STORE_DEREF", "DELETE_DEREF"}}
    return bool(stores.intersection(code.co_freevars)) or any(
        _rebinds(c) for c in code.co_consts if isinstance(c, CodeType)
    )


def _names_read(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in the functions inside."""
    inner = (_names_read(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _named(values: dict[str, Any], inside: tuple[Any, ...]) -> Hashable:
    return tuple((name, _value(value, inside)) for name, value in sorted(values.items()))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise _NotPlain from None
