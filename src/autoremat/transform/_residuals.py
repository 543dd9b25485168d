"""What reverse mode keeps: a list of residuals that looks through `jit`, `scan`, `cond` and nested checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    argument_names,
    has_tangent,
    on_host,
    open_jaxpr,
    scan_sizes,
    short_aval,
    source_of,
)
from autoremat._errors import UnmatchedNameWarning
from autoremat.graph._trace import aval_size
from autoremat.transform._batch import partition_of
from autoremat.transform._jaxpr import CHECKPOINTS, inline_calls, is_var, subjaxprs
from autoremat.transform._linearize import Joint, linearize
from autoremat.transform._partition import Partition
from autoremat.transform._split import tags_of
from autoremat.transform._trace_user import bind_call, trace_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One array that is kept between the forward and the backward pass.

    `shape` and `nbytes` (bytes) are those of all iterations where it stands inside a `scan`; `iterations` is how many. `kind` is
    `"argument"`, `"constant"` or `"intermediate"`; `primitive` and `source` (file:line:column) say what made it, `name` how
    `checkpoint_name` tagged it. `offloaded`: it waits in the memory of the host.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str
    name: str | None = None
    source: str = ""
    primitive: str = ""
    iterations: int = 1
    type: str = ""
    offloaded: bool = False

    @property
    def description(self) -> str:
        """Where it comes from, in the words of `jax.ad_checkpoint.print_saved_residuals`."""
        if self.kind == "argument":
            return f"from the argument {self.source}"
        if self.kind == "constant":
            return "from a constant"
        what = f"named '{self.name}'" if self.name else f"output of {self.primitive}"
        where = f" from {self.source}" if self.source else ""
        where += f", {self.iterations} iterations" if self.iterations > 1 else ""
        return f"{what}{where}" + (", in host memory" if self.offloaded else "")


@dataclass(frozen=True, slots=True)
class Residuals(Sequence[Residual]):
    """The residuals of a function, arguments first. `notes` are remarks on what does not help."""

    residuals: tuple[Residual, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all residuals, arguments included."""
        return sum(r.nbytes for r in self.residuals)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the residuals that are arguments or constants: alive anyway."""
        return sum(r.nbytes for r in self.residuals if r.kind != "intermediate")

    @property
    def intermediate_bytes(self) -> int:
        """Bytes of the residuals that the function makes: the activations."""
        return self.total_bytes - self.argument_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the residuals that a policy offloads."""
        return sum(r.nbytes for r in self.residuals if r.offloaded)

    @overload
    def __getitem__(self, index: int) -> Residual: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Residual]: ...
    def __getitem__(self, index: int | slice) -> Residual | Sequence[Residual]:
        return self.residuals[index]

    def __len__(self) -> int:
        return len(self.residuals)


def saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """List what reverse-mode differentiation of `fun` keeps for the backward pass.

    **Arguments:** as for `fun`; every floating-point argument counts as differentiated.

    **Returns:** a sequence of `Residual`, arguments and constants first, then in the order in which they are made, with
    `.total_bytes`. Nothing is executed or compiled: the compiler may still merge or drop some.

    **Source:** `jax.ad_checkpoint.print_saved_residuals`.
    """
    call = bind_call(fun, args, kwargs, (), ())
    traced, constants, _ = trace_call(fun, call, "saved_residuals")
    jaxpr, hoisted = inline_calls(traced)
    leading = len(hoisted) + len(constants)
    nonzero = tuple(i >= leading and has_tangent(v.aval) for i, v in enumerate(jaxpr.invars))
    if not any(nonzero):
        return Residuals(())
    joint = linearize(jaxpr, nonzero)
    names = argument_names(fun, args, kwargs)
    found = [*_inputs(joint, leading, len(jaxpr.invars), names), *_intermediates(joint)]
    return Residuals(tuple(found), tuple(_notes(jaxpr, nonzero, found)))


def print_saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print what reverse-mode differentiation of `fun` keeps: type, bytes, origin, then the total and remarks."""
    print(residuals_text(saved_residuals(fun, *args, **kwargs)))


def residuals_text(residuals: Residuals) -> str:
    """The text that `print_saved_residuals` prints."""
    rows = [(r.type, f"{r.nbytes:,} B", r.description) for r in residuals]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines = [f"{t:<{widths[0]}} {b:>{widths[1]}} {d}" for t, b, d in rows]
    lines.append(
        f"total {residuals.total_bytes:,} B in {len(residuals)} residuals, of which "
        f"{residuals.intermediate_bytes:,} B are intermediates"
        + (f", {residuals.host_bytes:,} B in host memory" if residuals.host_bytes else "")
    )
    return "\n".join([*lines, *(f"note: {note}" for note in residuals.notes)])


def _residual(aval: Any, **fields: Any) -> Residual:
    shape, dtype, nbytes = aval_size(aval)
    return Residual(
        shape=shape, dtype=dtype, nbytes=nbytes, type=short_aval(aval), offloaded=on_host(aval), **fields
    )


def _inputs(joint: Joint, leading: int, num_inputs: int, names: Sequence[str]) -> Iterator[Residual]:
    demanded = set(_origins(joint))
    for i, v in enumerate(joint.inputs):
        if v not in demanded:
            continue
        if leading <= i < num_inputs:
            position = i - leading
            name = (
                names[position]
                if position < len(names) and names[position]
                else f"at flattened index {position}"
            )
            yield _residual(v.aval, kind="argument", source=name)
        else:
            yield _residual(v.aval, kind="constant")


def _origins(joint: Joint) -> dict[Var, str | None]:
    """The distinct demanded values, looked through tags and rounding; with the tag of each."""
    tags = tags_of(joint.forward_eqns)
    through = {e.outvars[0]: e.invars[0] for e in joint.forward_eqns if _passes_on(e)}
    found: dict[Var, str | None] = {}
    for v in joint.demanded:
        tag = next(iter(sorted(tags.get(v, ()))), None)
        while v in through:
            v = through[v]
        found[v] = found.get(v) or tag or next(iter(sorted(tags.get(v, ()))), None)
    return found


def _intermediates(joint: Joint) -> Iterator[Residual]:
    origins = _origins(joint)
    for eqn in joint.forward_eqns:
        for i, v in enumerate(eqn.outvars):
            if v in origins:
                origin = resolve(eqn, i)
                yield intermediate(v.aval, origin, origins[v] or origin.name)


@dataclass(frozen=True, slots=True)
class _Origin:
    primitive: str
    source: str
    name: str | None
    iterations: int


def intermediate(aval: Any, origin: _Origin, name: str | None) -> Residual:
    """The residual of a value that the function makes."""
    return _residual(
        aval,
        kind="intermediate",
        name=name,
        source=origin.source,
        primitive=origin.primitive,
        iterations=origin.iterations,
    )


def resolve(eqn: JaxprEqn, out: int, iterations: int = 1) -> _Origin:
    """The innermost equation that makes output `out` of `eqn`."""
    name = eqn.primitive.name
    if name == "scan" and out >= scan_sizes(eqn.params)[1]:
        iterations *= eqn.params["length"]
    found: list[_Origin] = []
    for inner in _bodies(eqn):
        atom = inner.outvars[out] if out < len(inner.outvars) else None
        origin = _resolve_var(inner, atom, iterations) if atom is not None and is_var(atom) else None
        # A branch returns zeros for what only other branches keep.
        if origin is not None and not (name == "cond" and origin.primitive == "broadcast_in_dim"):
            found.append(origin if origin.source else replace(origin, source=source_of(eqn)))
    if found:
        return _either(found)
    label = f"{name} (a value carried from one iteration to the next)" if name == "scan" else name
    return _Origin(label, source_of(eqn), None, iterations)


def _either(found: Sequence[_Origin]) -> _Origin:
    """The origin of a value that each branch makes in its own way."""
    primitives = " or ".join(dict.fromkeys(o.primitive for o in found))
    sources = " or ".join(dict.fromkeys(o.source for o in found))
    return _Origin(
        primitives, sources, next((o.name for o in found if o.name), None), max(o.iterations for o in found)
    )


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    if eqn.primitive.name in {
        "scan",
        "cond",
        "jit",
        "pjit",
        "closed_call",
        "remat2",
        "autoremat_checkpoint",
        "shard_map",
    }:
        return [open_jaxpr(j)[0] for j in subjaxprs(eqn)]
    return []


def _passes_on(eqn: JaxprEqn) -> bool:
    """Whether an equation only tags or rounds its input."""
    return eqn.primitive.name in {"name", "reduce_precision"} and is_var(eqn.invars[0])


def hands_on(eqn: JaxprEqn) -> bool:
    """Whether an equation only tags, rounds or offloads its input."""
    offloads = eqn.primitive.name == "device_put" and on_host(eqn.outvars[0].aval) and is_var(eqn.invars[0])
    return _passes_on(eqn) or offloads


def _resolve_var(jaxpr: Jaxpr, var: Any, iterations: int) -> _Origin | None:
    """What makes a variable inside a jaxpr; `None` if it is an input."""
    tag = next(iter(sorted(tags_of(jaxpr.eqns).get(var, ()))), None)
    made = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
    while var in made and hands_on(made[var][0]):
        tag = tag or next(iter(sorted(tags_of(jaxpr.eqns).get(made[var][0].invars[0], ()))), None)
        var = made[var][0].invars[0]
    if var not in made:
        return None
    found = resolve(*made[var], iterations)
    return _Origin(found.primitive, found.source, tag or found.name, found.iterations)


# ---------------------------------------------------------------------------------------------------------------- notes


def _checkpoints(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> Iterator[tuple[JaxprEqn, tuple[bool, ...]]]:
    """The checkpoints in a program, ours and JAX's, each with which of its inputs have a tangent."""
    active = {v for v, nz in zip(jaxpr.invars, nonzero, strict=True) if nz}
    for eqn in jaxpr.eqns:
        flags = tuple(is_var(v) and v in active for v in eqn.invars)
        if not any(flags):
            continue
        active.update(v for v in eqn.outvars if has_tangent(v.aval))
        if eqn.primitive.name in CHECKPOINTS and not eqn.params.get("differentiated"):
            yield eqn, flags
        for inner in subjaxprs(eqn):
            yield from _checkpoints(inner, _inner_flags(eqn, inner, flags))


def _inner_flags(eqn: JaxprEqn, inner: Jaxpr, flags: Sequence[bool]) -> tuple[bool, ...]:
    """Which inputs of an inner program have a tangent: those of the equation; of a carry, and where unsure, all that can."""
    if eqn.primitive.name == "cond":
        flags = flags[1:]
    if len(inner.invars) != len(flags):
        return tuple(has_tangent(v.aval) for v in inner.invars)
    first, count = scan_sizes(eqn.params) if eqn.primitive.name == "scan" else (0, 0)
    return tuple(
        has_tangent(v.aval) and (f or first <= i < first + count)
        for i, (v, f) in enumerate(zip(inner.invars, flags, strict=True))
    )


def _notes(jaxpr: Jaxpr, nonzero: Sequence[bool], found: Sequence[Residual]) -> Iterator[str]:
    checkpoints = list(_checkpoints(jaxpr, nonzero))
    yield from dict.fromkeys(
        note
        for eqn, flags in checkpoints
        if eqn.primitive.name == "autoremat_checkpoint" and (note := _useless(eqn, flags))
    )
    arguments = sum(r.nbytes for r in found if r.kind != "intermediate")
    activations = sum(r.nbytes for r in found if r.kind == "intermediate")
    # With a checkpoint in it, what is kept does not tell how large the activations are.
    if not checkpoints and activations < arguments:
        yield (
            f"activations ({activations:,} B) are not the bulk of what this function needs: its arguments and constants "
            f"take {arguments:,} B. Recomputation cannot lower those."
        )


def _useless(eqn: JaxprEqn, nonzero: tuple[bool, ...]) -> str | None:
    """A remark if a checkpoint keeps at least as much as the function inside would keep without it."""
    inner: Jaxpr = eqn.params["jaxpr"]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UnmatchedNameWarning
        )  # given already, when the whole was differentiated
        part = partition_of(inner, nonzero, eqn.params["policy"], eqn.params["origin"])
    plain = sum(aval_size(v.aval)[2] for v in _origins(linearize(inner, nonzero)))
    kept = kept_bytes(part)
    if kept < plain or not any(part.nonzero_outs):
        return None
    where = inner.debug_info.func_src_info
    again = (
        "and it runs again in the backward pass"
        if part.recomputes
        else "and nothing of it has to run again anyway"
    )
    return (
        f"the checkpoint of {where} frees nothing: it keeps {kept:,} B, the function without it {plain:,} B, {again}. "
        "Cheapest fix: leave it out, or put it round a larger part."
    )


def kept_bytes(part: Partition) -> int:
    """Bytes of what a checkpointed function keeps on the device: inputs that its backward pass reads, and kept values."""
    leaves = part.linear.invars[: len(part.leaves) + part.num_kept]
    return sum(aval_size(v.aval)[2] for v in leaves if not on_host(v.aval))
