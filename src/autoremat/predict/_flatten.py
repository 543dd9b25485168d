"""A jaxpr as a flat program: calls inlined, equal operations merged, operations that compute nothing left out.

This is what the first passes of a compiler do to it. A barrier stands in front of each backward pass of a checkpoint, as in its
lowering; nothing is merged across one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoremat._compat import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    dce,
    is_jaxpr,
    open_jaxpr,
    scan_sizes,
    source_of,
    trace,
)
from autoremat.graph._trace import aval_size
from autoremat.predict._fuse import ELEMENTWISE, JOIN, LAYOUT_COPY
from autoremat.predict._program import (
    BARRIER,
    RECIPROCAL,
    STACK,
    Instruction,
    Program,
    View,
    without_dead_code,
)
from autoremat.sharding import Shards, shards_of_arrays
from autoremat.transform._jaxpr import CALLS, CHECKPOINTS, is_var
from autoremat.transform._linear_map import run_map
from autoremat.transform._scan_primitives import run_scan, run_sweep

_CALLS = {**CALLS, "shard_map": "jaxpr"}
_TRACED: dict[str, Callable[..., Any]] = {
    "autoremat_scan": run_scan,
    "autoremat_sweep": run_sweep,
    "autoremat_linear_map": run_map,
}
"""Primitives that are lowered as functions of JAX."""

_SAME = frozenset(
    {
        "name",
        "stop_gradient",
        "pvary",
        "copy",
        "copy_p",
        "sharding_constraint",
        "reshape",
        "squeeze",
        "expand_dims",
    }
)
"""What hands on its operand: a view of it in the same order, or a remark."""

_INDEX_BYTES = 4

_FEW_JOINED = 8
_LONG_ROW, _LARGE_JOINED = 64, 2048
"""Limits of XLA for CPUs, in arrays and in bytes: up to so many arrays, and rows or results shorter than these, are joined inside other kernels."""

GATHER, SCATTER = "all_gather", "reduce_scatter"
"""What devices exchange where they divide values otherwise than work."""


@dataclass(frozen=True, slots=True)
class Body:
    """How a loop runs its body: it hands on the inputs of its `state`, reads those that are `sliced` of stacks, and writes its outputs, but the first
    `carried`, into others, `trips` times. 0 trips: so often as a condition says."""

    state: Collection[Var] = ()
    sliced: Collection[Var] = ()
    carried: int | None = None
    trips: int = 0


def flatten(jaxpr: Jaxpr, division: Divided, body: Body = Body()) -> Program:
    """The flat program of an open jaxpr; its constants come first among the inputs. Sizes are those of one device."""
    live, _ = dce(jaxpr, [True] * len(jaxpr.outvars))
    flattener = _Flattener(division)
    inputs = [flattener.value(v) for v in (*live.constvars, *live.invars)]
    bound: dict[Any, Operand] = dict(zip((*live.constvars, *live.invars), inputs, strict=True))
    outs = flattener.run(live, bound)
    arguments = dict(zip(live.invars, inputs[len(live.constvars) :], strict=True))
    program = Program(
        nbytes=tuple(flattener.nbytes),
        rank=tuple(flattener.rank),
        instructions=tuple(flattener.instructions),
        inputs=tuple(inputs),
        outputs=tuple(v for v in outs if isinstance(v, int)),
        slices=tuple(arguments[v] for v in arguments if v in body.sliced),
        stacked=tuple(v for v in outs[body.carried :] if isinstance(v, int)) if body.trips else (),
        trips=body.trips,
        state=tuple(arguments[v] for v in arguments if v in body.state),
    )
    return without_dead_code(program)


class _Opened:
    """The programs of operations that are lowered as functions of JAX, traced once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Jaxpr, int]] = {}

    def get(self, eqn: JaxprEqn) -> tuple[Jaxpr, int] | None:
        """The program, and how many of its inputs are constants; `None` for other operations."""
        name = eqn.primitive.name
        if name not in _TRACED:
            return None
        key = (name, tuple(v for v in eqn.outvars if not isinstance(v, DropVar)))
        if key not in self._known:
            run = functools.partial(_TRACED[name], **eqn.params)
            body, constants = trace(run, [v.aval for v in eqn.invars], name)
            self._known[key] = body, len(constants)
        return self._known[key]

    def body(self, eqn: JaxprEqn) -> Jaxpr | None:
        """The program alone."""
        found = self.get(eqn)
        return found[0] if found is not None else None


@dataclass(frozen=True, slots=True)
class Divided:
    """How values are divided among devices, and the programs that were opened to find it out."""

    shards: Shards
    opened: _Opened


def divide(jaxpr: Jaxpr, arrays: Sequence[Any]) -> Divided:
    """How an open jaxpr is divided whose inputs, its constants first, are these arrays, or shapes with shardings."""
    opened = _Opened()
    live, _ = dce(jaxpr, [True] * len(jaxpr.outvars))
    return Divided(shards_of_arrays(jaxpr.replace(eqns=live.eqns), arrays, opened.body), opened)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A literal."""

    dtype: str
    data: bytes

    @classmethod
    def of(cls, literal: Any) -> Scalar:
        """The literal of a jaxpr."""
        value = np.asarray(literal.val)
        return cls(str(value.dtype), value.tobytes())

    @property
    def is_lowest(self) -> bool:
        """Whether it is minus infinity: the maximum of it and something is that."""
        return self.dtype in _FLOATS and bool(np.isneginf(np.frombuffer(self.data, self.dtype)).all())


_FLOATS = frozenset({"float16", "float32", "float64"})
Operand = int | Scalar


@dataclass
class _Flattener:
    """Collects instructions; `known` maps an operation on values to its results."""

    division: Divided
    nbytes: list[int] = field(default_factory=list[int])
    rank: list[int] = field(default_factory=list[int])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    known: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])

    def value(self, var: Var) -> int:
        """A new value for a variable."""
        return self.array(self.division.shards.nbytes(var), len(getattr(var.aval, "shape", ())))

    def array(self, nbytes: int, rank: int) -> int:
        """A new value of this size."""
        self.nbytes.append(nbytes)
        self.rank.append(rank)
        return len(self.nbytes) - 1

    def run(self, jaxpr: Jaxpr, bound: dict[Any, Operand]) -> list[Operand]:
        """The instructions of a jaxpr on the values that `bound` gives its inputs."""
        for eqn in jaxpr.eqns:
            operands = [bound[v] if is_var(v) else Scalar.of(v) for v in eqn.invars]
            bound.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [bound[v] if is_var(v) else Scalar.of(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Operand]) -> Sequence[Operand]:
        name = eqn.primitive.name
        if name in _CALLS and _CALLS[name] in eqn.params:
            return self._call(eqn, operands)
        opened = self.division.opened.get(eqn)
        if opened is not None:
            body, num_constants = opened
            made = [self.value(v) for v in body.invars[:num_constants]]
            return self._inline(body, [*made, *operands])
        if name == BARRIER:
            return self._barrier(operands, [True] * len(operands))
        if name == "split":
            return [self._part(eqn, operands[0], k) for k in range(len(eqn.outvars))]
        same = _handed_on(eqn, operands)
        if same is not None:
            operand = operands[same]
            return [_seen(operand, eqn.invars[same].aval, eqn.outvars[0].aval)]
        return self._operation(eqn, operands)

    def _call(self, eqn: JaxprEqn, operands: list[Operand]) -> Sequence[Operand]:
        if eqn.primitive.name in CHECKPOINTS and eqn.params.get("differentiated"):
            flags = eqn.params.get("prevent_cse", True)
            flags = [flags] * len(operands) if isinstance(flags, bool) else flags
            operands = self._barrier(operands, flags)
        return self._inline(eqn.params[_CALLS[eqn.primitive.name]], operands)

    def _inline(self, called: Any, operands: Sequence[Operand]) -> list[Operand]:
        jaxpr, _ = open_jaxpr(called)
        constants = [self.value(v) for v in jaxpr.constvars]
        return self.run(
            jaxpr, dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))
        )

    def _barrier(self, operands: Sequence[Operand], flags: Sequence[bool]) -> list[Operand]:
        chosen = [v for v, f in zip(operands, flags, strict=True) if f and isinstance(v, int)]
        behind = {v: self.array(self.nbytes[v], self.rank[v]) for v in dict.fromkeys(chosen)}
        if behind:
            self.instructions.append(
                Instruction(primitive=BARRIER, inputs=tuple(behind), outputs=tuple(behind.values()))
            )
        return [behind[v] if f and isinstance(v, int) else v for v, f in zip(operands, flags, strict=True)]

    def _part(self, eqn: JaxprEqn, operand: Operand, k: int) -> int:
        key = ("split", operand, k, str(eqn.params))
        if key not in self.known:
            out = self.value(eqn.outvars[k])
            self._emit(eqn, "slice", [operand], [out], ("split", k, str(eqn.params)))
            self.known[key] = [out]
        return self.known[key][0]

    def _operation(self, eqn: JaxprEqn, operands: list[Operand]) -> list[int]:
        kind = _kind(eqn, operands)
        key = None if kind is None else (kind, tuple(operands))
        if key is not None and key in self.known:
            return self.known[key]
        outputs = [self.value(v) for v in eqn.outvars]
        name = eqn.primitive.name
        moves = self.division.shards.moves(eqn)
        operands = [
            self._gathered(eqn, operand, n) for operand, n in zip(operands, moves.gathered, strict=True)
        ]
        made = list(outputs)
        if moves.scattered > 1:
            made = [self.array(self.nbytes[v] * moves.scattered, self.rank[v]) for v in outputs]
        if name == "conv_general_dilated":
            operands, made = self._as_convolved(eqn, operands, made)
        elif name == "div":
            name, operands = self._as_divided(eqn, operands)
        elif name == "integer_pow" and eqn.params["y"] < 0:
            name = RECIPROCAL
        elif name in ELEMENTWISE:
            pairs = zip(operands, eqn.invars, strict=True)
            operands = [_seen(v, var.aval, eqn.outvars[0].aval) for v, var in pairs]
        elif name == "dot_general":
            operands = self._as_multiplied(eqn, operands)
        if name == "scan":
            operands = [*operands, *self._stacks(eqn)]
        elif name == "select_and_scatter_add":
            operands, kind = self._picked(eqn, operands), None
        elif name == "concatenate" and _stands_alone(eqn):
            name = JOIN
        self._emit(eqn, name, operands, made, kind)
        if made != outputs:
            kind = LAYOUT_COPY if moves.scattered == 1 else SCATTER
            self._emit(eqn, kind, made, outputs, kind)
        if key is not None:
            self.known[key] = outputs
        return outputs

    def _gathered(self, eqn: JaxprEqn, operand: Operand, devices: int) -> Operand:
        """An operand gathered from so many devices: once for all that read it."""
        if devices == 1 or isinstance(operand, Scalar):
            return operand
        key = (GATHER, operand, devices)
        if key not in self.known:
            self.known[key] = [self.array(self.nbytes[operand] * devices, self.rank[operand])]
            self._emit(eqn, GATHER, [operand], self.known[key], GATHER)
        return self.known[key][0]

    def _emit(
        self,
        eqn: JaxprEqn,
        name: str,
        operands: Sequence[Operand],
        outputs: Sequence[int],
        kind: Hashable,
        workspace: int = 0,
    ) -> None:
        self.instructions.append(
            Instruction(
                primitive=name,
                inputs=tuple(v for v in operands if isinstance(v, int)),
                outputs=tuple(outputs),
                literals=any(isinstance(v, Scalar) for v in operands),
                inner=_inside(eqn, self.division) if name == eqn.primitive.name else (),
                workspace=workspace,
                spread=_spread(eqn) if name == "conv_general_dilated" else 1,
                initial=_initial(eqn, operands),
                kind=kind,
                source=source_of(eqn),
            )
        )

    def _picked(self, eqn: JaxprEqn, operands: Sequence[Operand]) -> list[Operand]:
        """The derivative of a pooling has two parts: XLA for CPUs makes an array of indices for each dimension and reduces them with the operand,
        window by window; where the largest stood, it adds the source to the result."""
        source, operand = operands
        shape = eqn.outvars[0].aval.shape
        share = Fraction(
            self.division.shards.nbytes(eqn.outvars[0]), max(1, aval_size(eqn.outvars[0].aval)[2])
        )
        indices, picked = (
            math.ceil(math.prod(v.aval.shape) * len(shape) * _INDEX_BYTES * share)
            for v in (eqn.outvars[0], eqn.invars[0])
        )
        made = self.array(picked, len(shape))
        self._emit(eqn, "reduce_window", [operand], [made], None, indices)
        return [source, made]

    def _stacks(self, eqn: JaxprEqn) -> list[int]:
        """The zeros that the stacked results of a `scan` start as."""
        found: list[int] = []
        for var in eqn.outvars[scan_sizes(eqn.params)[1] :]:
            key = (STACK, var.aval.shape, var.aval.dtype, self.division.shards.nbytes(var))
            if key not in self.known:
                self.known[key] = [self.value(var)]
                self._emit(eqn, STACK, [], self.known[key], key)
            found += self.known[key]
        return found

    def _copied(self, eqn: JaxprEqn, operand: Operand) -> Operand:
        if isinstance(operand, Scalar):
            return operand
        copy = self.array(self.nbytes[operand], self.rank[operand])
        self._emit(eqn, LAYOUT_COPY, [operand], [copy], LAYOUT_COPY)
        return copy

    def _as_multiplied(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Matrix products want one dimension to sum over and one to keep: others are read as one. Of several to sum over, the first operand is
        written anew."""
        contracted, batched = eqn.params["dimension_numbers"]
        found: list[Operand] = []
        for operand, var, summed, batch in zip(operands, eqn.invars, contracted, batched, strict=True):
            kept = len(var.aval.shape) - len(summed) - len(batch)
            plain = len(summed) <= 1 and kept <= 1
            found.append(operand if plain or not isinstance(operand, int) else View(operand))
        return [self._copied(eqn, found[0]), found[1]] if len(contracted[0]) > 1 else found

    def _as_divided(self, eqn: JaxprEqn, operands: list[Operand]) -> tuple[str, list[Operand]]:
        """Where the divisor is one number for several elements, none of them an integer, the compiler multiplies by its reciprocal."""
        wanted = eqn.outvars[0].aval
        over, divisor = (_seen(v, var.aval, wanted) for v, var in zip(operands, eqn.invars, strict=True))
        exact = not jnp.issubdtype(wanted.dtype, jnp.inexact)
        if isinstance(divisor, Scalar):
            return "div" if exact else "mul", [over, divisor]
        if exact or math.prod(eqn.invars[1].aval.shape) >= math.prod(wanted.shape):
            return "div", [over, divisor]
        key = (RECIPROCAL, divisor)
        if key not in self.known:
            self.known[key] = [self.array(self.nbytes[divisor], self.rank[divisor])]
            self._emit(eqn, RECIPROCAL, [divisor], self.known[key], RECIPROCAL)
        return "mul", [over, View(self.known[key][0])]

    def _as_convolved(
        self, eqn: JaxprEqn, operands: list[Operand], outputs: list[int]
    ) -> tuple[list[Operand], list[int]]:
        """Convolutions want batch first and features last: others are written anew, as the derivative in a kernel is."""
        dims = eqn.params["dimension_numbers"]
        last = len(dims.lhs_spec) - 1
        lhs, rhs = operands
        if tuple(dims.lhs_spec[:2]) != (0, last):
            lhs = self._copied(eqn, lhs)
        if tuple(dims.rhs_spec[:2]) != (last, last - 1):
            rhs = self._copied(eqn, rhs)
        if tuple(dims.out_spec[:2]) != (0, last):
            outputs = [self.value(eqn.outvars[0])]
        return [lhs, rhs], outputs


def _initial(eqn: JaxprEqn, operands: Sequence[Operand]) -> tuple[int, ...]:
    """Of the operands of a loop those that its results start as."""
    if eqn.primitive.name == "scan":
        num_consts, num_carry = scan_sizes(eqn.params)
        num_xs = len(eqn.invars) - num_consts - num_carry
        chosen = (
            *operands[num_consts : num_consts + num_carry],
            *operands[num_consts + num_carry + num_xs :],
        )
    elif eqn.primitive.name == "while":
        chosen = tuple(operands[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :])
    else:
        return ()
    return tuple(v for v in chosen if isinstance(v, int))


def _stands_alone(eqn: JaxprEqn) -> bool:
    """Whether XLA for CPUs joins arrays in a kernel of its own: many, or along the last dimension."""
    (out,) = (v.aval for v in eqn.outvars)
    last = eqn.params["dimension"] == len(out.shape) - 1 and len(out.shape) > 1
    row, size = out.shape[-1] * out.dtype.itemsize, math.prod(out.shape) * out.dtype.itemsize
    return len(eqn.invars) > _FEW_JOINED or (last and row >= _LONG_ROW and size >= _LARGE_JOINED)


def _spread(eqn: JaxprEqn) -> int:
    """Of the derivative of a depthwise convolution in its kernel, how many channels there are; 1 for other convolutions."""
    groups = eqn.params["batch_group_count"]
    features = eqn.outvars[0].aval.shape[eqn.params["dimension_numbers"].out_spec[1]]
    return groups if groups == features else 1


def _seen(operand: Operand, made: Any, wanted: Any) -> Operand:
    """A value as it is read, in the shape that is wanted."""
    if isinstance(operand, Scalar) or getattr(made, "shape", ()) == getattr(wanted, "shape", ()):
        return operand
    return View(operand)


def _handed_on(eqn: JaxprEqn, operands: Sequence[Operand]) -> int | None:
    """The position of the operand that an equation hands on unchanged; `None` if it computes something."""
    if eqn.primitive.name == "max":
        lowest = [i for i, v in enumerate(operands) if isinstance(v, Scalar) and v.is_lowest]
        return 1 - lowest[0] if lowest else None
    if not operands or not isinstance(operands[0], int) or not eqn.outvars:
        return None
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    return 0 if eqn.primitive.name in _SAME or _changes_nothing(eqn, operand, result) else None


def _changes_nothing(eqn: JaxprEqn, operand: Any, result: Any) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return operand.dtype == result.dtype
    if name == "reduce_precision":
        info = jnp.finfo(operand.dtype)
        return eqn.params["mantissa_bits"] >= info.nmant and eqn.params["exponent_bits"] >= info.nexp
    if name == "transpose":
        moved = [i for i in eqn.params["permutation"] if operand.shape[i] != 1]
        return moved == sorted(moved)
    if name in ("broadcast_in_dim", "reduce_sum", "reduce_max", "reduce_min"):
        return math.prod(operand.shape) == math.prod(result.shape)
    return False


def _kind(eqn: JaxprEqn, operands: Sequence[Operand]) -> Hashable | None:
    """What an operation does to its inputs; `None` where it is not to be merged with another."""
    if eqn.effects or any(map(_holds_program, eqn.params.values())):
        return None
    literals = tuple(v if isinstance(v, Scalar) else None for v in operands)
    shapes = tuple(getattr(v.aval, "shape", ()) for v in eqn.outvars)
    params = str(sorted(eqn.params.items(), key=lambda item: item[0]))
    return eqn.primitive.name, literals, shapes, params


def _holds_program(parameter: Any) -> bool:
    return is_jaxpr(parameter) or (isinstance(parameter, (tuple, list)) and any(map(is_jaxpr, parameter)))


def _inside(eqn: JaxprEqn, division: Divided) -> tuple[Program, ...]:
    """The programs that an equation runs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        body, _ = open_jaxpr(params["jaxpr"])
        num_consts, num_carry = scan_sizes(params)
        given = body.invars[num_consts:]
        return (
            flatten(body, division, Body(given[:num_carry], given[num_carry:], num_carry, params["length"])),
        )
    if name == "while":
        body, _ = open_jaxpr(params["body_jaxpr"])
        state = body.invars[params["body_nconsts"] :]
        return _inner(params["cond_jaxpr"], division), flatten(body, division, Body(state))
    if name == "cond":
        return tuple(_inner(branch, division) for branch in params["branches"])
    return ()


def _inner(called: Any, division: Divided) -> Program:
    return flatten(open_jaxpr(called)[0], division)
