"""Which operation sets the floor: the one whose own working set is largest, compiled alone to be sure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import Jaxpr, JaxprEqn, eval_jaxpr, new_jaxpr, source_of
from autoremat._errors import CompileError
from autoremat.cost import is_fusible
from autoremat.graph._trace import aval_size
from autoremat.measure import memory_of
from autoremat.plan._candidates import Candidates
from autoremat.plan._rewrite import Decisions
from autoremat.target import Target
from autoremat.transform._jaxpr import is_var, subjaxprs

TRIED = 4
"""Operations with the largest operands that are compiled alone."""

_CONTAINERS = frozenset(
    {"scan", "while", "cond", "jit", "pjit", "autoremat_checkpoint", "autoremat_linear", "closed_call"}
)


@dataclass(frozen=True, slots=True)
class FloorOp:
    """The operation that sets the floor. `peak_bytes` is the compiled peak of it alone, operands included."""

    primitive: str
    shapes: str
    source: str
    peak_bytes: int

    @property
    def text(self) -> str:
        """A sentence for messages."""
        if not self.primitive:
            return ""
        return (
            f"The operation that needs most by itself is `{self.primitive}` on {self.shapes} at {self.source}: compiled "
            f"alone it takes {self.peak_bytes:,} bytes."
        )


def name_floor(candidates: Candidates, decisions: Decisions) -> FloorOp:
    """Find the operation of the gradient program that needs most memory by itself."""
    program = jax.make_jaxpr(candidates.program.whole(decisions))(
        *jax.tree.map(_abstract, candidates.program.args)
    )
    best = FloorOp("", "", "", 0)
    for eqn in _largest(program.jaxpr.eqns):
        peak = compiled_alone(eqn, candidates.traced.jaxpr, candidates.target, candidates.options)
        if peak > best.peak_bytes:
            shapes = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.invars)
            best = FloorOp(eqn.primitive.name, f"({shapes})", source_of(eqn), peak)
    return best


def _abstract(x: Any) -> Any:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _all_eqns(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        if eqn.primitive.name in _CONTAINERS:
            for inner in subjaxprs(eqn):
                yield from _all_eqns(inner.eqns)
        else:
            yield eqn


def _working_set(eqn: JaxprEqn) -> int:
    atoms = {id(v): v for v in (*eqn.invars, *eqn.outvars) if is_var(v)}
    sizes = [aval_size(v.aval)[2] for v in atoms.values()]
    # Of a convolution grouped by batch (the derivative of a depthwise one in its kernel) some compilers compute all pairs of groups.
    groups = eqn.params.get("batch_group_count", 1)
    return sum(sizes) + (groups - 1) * sum(aval_size(v.aval)[2] for v in eqn.outvars)


def _largest(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The operations with the largest operands and results, one of each shape. Fusible ones have no buffers of their own."""
    heavy = [e for e in _all_eqns(eqns) if not is_fusible(e.primitive.name) and not _is_fence(e)]
    heavy.sort(key=_working_set, reverse=True)
    seen: set[Any] = set()
    chosen = []
    for eqn in heavy:
        kind = (eqn.primitive.name, *(str(v.aval) for v in eqn.invars))
        if kind not in seen:
            seen.add(kind)
            chosen.append(eqn)
        if len(chosen) == 3 * TRIED:
            break
    # Operations on large operands differ by what the compiler needs besides: try one of each primitive first.
    first: dict[str, JaxprEqn] = {}
    for eqn in chosen:
        first.setdefault(eqn.primitive.name, eqn)
    rest = [e for e in chosen if e is not first[e.primitive.name]]
    return [*first.values(), *rest][:TRIED]


def _is_fence(eqn: JaxprEqn) -> bool:
    """Whether an equation writes a single element, as the fence of a stage does: it is not the user's."""
    return eqn.primitive.name == "dynamic_update_slice" and eqn.invars[1].aval.size == 1


def compiled_alone(eqn: JaxprEqn, like: Jaxpr, target: Target, options: dict[str, Any]) -> int:
    """The compiled peak of one operation in bytes, its operands included; 0 if it does not compile by itself."""
    invars = list({v: None for v in eqn.invars if is_var(v)})
    jaxpr = new_jaxpr(invars, eqn.outvars, [eqn], like)
    try:
        use = memory_of(
            lambda *xs: eval_jaxpr(jaxpr, *xs),
            *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars),
            target=target,
            compiler_options=options,
        )
    except (CompileError, TypeError, ValueError):
        return 0
    return use.peak_bytes
