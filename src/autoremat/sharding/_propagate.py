"""Propagate the specifications of arguments through a program, as a compiler does that divides it (GSPMD, Shardy).

Three sweeps, in program order, against it, in program order again: each fills dimensions that are whole so far, and never changes one
that is divided. What arguments, constraints (`jax.lax.with_sharding_constraint`), jitted functions with shardings of their own and
types (explicit axes) say is fixed. It is a model: the compiler decides, and its program is what a plan is verified by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoremat._compat import Jaxpr, JaxprEqn, Var, open_jaxpr, scan_sizes
from autoremat.graph._trace import aval_size
from autoremat.sharding._rules import Dims, Rule, rule_of
from autoremat.sharding._spec import (
    Axes,
    Mesh,
    Spec,
    axes_in,
    filled,
    mesh_of,
    shard_size,
    spec_of,
    trimmed,
    ways,
)
from autoremat.transform._jaxpr import CALLS, is_var, subjaxprs

_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
_LOCAL = frozenset({"shard_map"})
_PAIRS = frozenset({"optimization_barrier"})
"""Each result is an operand."""

NONE: frozenset[int] = frozenset()

Opened = Callable[[JaxprEqn], Any]
"""The program of an equation that is one operation to JAX, and several to a compiler; `None` for others."""


@dataclass(frozen=True, eq=False)
class Shards:
    """Specifications of variables over the axes of a mesh; a variable that is missing is whole."""

    specs: Mapping[Var, Spec]
    mesh: Mesh

    def of(self, atom: Any) -> Spec:
        """The specification of an atom."""
        return self.specs.get(atom, ()) if is_var(atom) else ()

    def nbytes(self, var: Var) -> int:
        """Bytes on one device."""
        shape, _, whole = aval_size(var.aval)
        # A type that names a sharding is counted by shards already.
        spec = _without(self.specs.get(var, ()), axes_in(spec_of(_sharding(var.aval), len(shape))))
        elements = math.prod(shape)
        if not spec or not elements:
            return whole
        return -(-whole * shard_size(shape, spec, self.mesh) // elements)

    def devices(self, eqn: JaxprEqn) -> int:
        """Among how many devices the work of an equation is divided."""
        if not self.mesh or _runs_programs(eqn) or eqn.primitive.name in _PAIRS:
            return 1
        rule = _rule(eqn)
        used = set(axes_in(a for v in eqn.outvars for a in self.of(v)))
        used |= axes_in(self._claims(eqn, rule).values())
        return ways(used, self.mesh)

    def _claims(self, eqn: JaxprEqn, rule: Rule) -> dict[int, Axes]:
        specs = [self.of(v) for v in eqn.invars]
        return _claims(rule.operands, specs, _sizes(eqn.invars), _factors(rule.results))

    def sent_bytes(self, eqn: JaxprEqn) -> int:
        """Bytes that one device sends to others, so that an equation can run: rings, each device its share.

        Operands that are divided otherwise than the work are gathered; sums over a divided dimension are reduced, and scattered where the
        result is divided along the same axes.
        """
        if eqn.primitive.name in _CONSTRAINTS:
            return self._moved(eqn.invars[0], self.of(eqn.outvars[0]))
        moves = self.moves(eqn)
        gathered = sum(
            (n - 1) * self.nbytes(v) for n, v in zip(moves.gathered, eqn.invars, strict=True) if n > 1
        )
        rest = moves.summed // moves.scattered
        reduced = moves.scattered - 1 + Fraction(2 * (rest - 1), rest)
        return gathered + math.ceil(sum(map(self.nbytes, eqn.outvars)) * reduced)

    def moves(self, eqn: JaxprEqn) -> Moves:
        """What devices exchange, so that an equation can run."""
        if not self.mesh or _runs_programs(eqn) or eqn.primitive.name in (_CONSTRAINTS | _PAIRS):
            return Moves((1,) * len(eqn.invars), 1, 1)
        rule = _rule(eqn)
        claims = self._claims(eqn, rule)
        made = _factors(rule.results)
        summed = axes_in(axes for f, axes in claims.items() if f not in made)
        kept = axes_in(axes for v in eqn.outvars for axes in self.of(v))
        return Moves(
            gathered=tuple(
                ways(_lost(self.of(v), dims, claims), self.mesh)
                for v, dims in zip(eqn.invars, rule.operands, strict=True)
            ),
            summed=ways(summed, self.mesh),
            scattered=ways(summed & kept, self.mesh),
        )

    def _moved(self, atom: Any, spec: Spec) -> int:
        before = self.of(atom)
        if before == spec or not is_var(atom):
            return 0
        lost = axes_in(before) - axes_in(spec)
        moved = any((set(a) - set(b)) & axes_in(before) for a, b in zip(spec, before, strict=False))
        return (ways(lost, self.mesh) - 1) * self.nbytes(atom) + (self.nbytes(atom) if moved else 0)


@dataclass(frozen=True, slots=True)
class Moves:
    """`gathered`: from among how many devices each operand is gathered; 1: it is not. Results are sums over the parts of `summed` devices,
    and `scattered` among so many of them.
    """

    gathered: tuple[int, ...]
    summed: int
    scattered: int


WHOLE = Shards({}, {})


def propagate(
    jaxpr: Jaxpr, known: Mapping[Var, Spec], mesh: Mesh, opened: Opened = lambda eqn: None
) -> Shards:
    """The shards of a program, those of its inner programs among them.

    `known` are specifications that stand fast, of its inputs and, where they are known, its outputs; the mesh of types and of constraints
    inside is added.
    """
    sizes = {**_meshes_in(jaxpr, opened), **mesh}
    if not sizes or max(sizes.values()) == 1:
        return WHOLE
    work = _Propagation(sizes, dict(known), dict.fromkeys(known, NONE), opened, _shared(jaxpr, opened))
    for forward in (True, False, True):
        work.sweep(jaxpr, forward)
    return Shards({v: s for v, s in work.specs.items() if s}, sizes)


def input_shardings(jaxpr: Jaxpr, arrays: Sequence[Any]) -> list[Any]:
    """The shardings of the inputs of a program, its constants first: of the arrays, or what a jitted function asks for."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    found = {v: getattr(x, "sharding", None) for v, x in zip(inputs, arrays, strict=True)}
    for eqn in jaxpr.eqns:
        for v, sharding in zip(eqn.invars, eqn.params.get("in_shardings", ()), strict=False):
            if is_var(v) and v in found and mesh_of(sharding) and not mesh_of(found[v]):
                found[v] = sharding
    return [found[v] for v in inputs]


def shards_of_arrays(jaxpr: Jaxpr, arrays: Sequence[Any], opened: Opened = lambda eqn: None) -> Shards:
    """The shards of a program whose inputs, its constants first, are these arrays, or shapes with shardings."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    shardings = input_shardings(jaxpr, arrays)
    mesh: dict[str, int] = {}
    for sharding in shardings:
        mesh |= mesh_of(sharding)
    known = {v: spec_of(sharding, len(_shape(v))) for v, sharding in zip(inputs, shardings, strict=True)}
    known |= dict.fromkeys(jaxpr.constvars, ())  # a compiler is given constants whole
    return propagate(jaxpr, known, mesh, opened)


@dataclass
class _Propagation:
    mesh: Mesh
    specs: dict[Var, Spec]
    fixed: dict[Var, frozenset[int]]  # with the dimensions that are left to the compiler
    opened: Opened
    shared: Collection[int] = ()  # programs, by `id`, that several equations run

    def sweep(self, jaxpr: Jaxpr, forward: bool) -> None:
        for v in (*jaxpr.constvars, *jaxpr.invars):
            self._typed(v)
        for eqn in jaxpr.eqns if forward else reversed(jaxpr.eqns):
            for v in eqn.outvars:
                self._typed(v)
            self._step(eqn, forward)

    def of(self, atom: Any) -> Spec:
        return self.specs.get(atom, ()) if is_var(atom) else ()

    def give(self, atom: Any, spec: Spec) -> None:
        """Fill what is whole so far."""
        if is_var(atom) and spec and self.fixed.get(atom, True):
            shape = _shape(atom)
            if atom in self.fixed:
                spec = trimmed(tuple(a if d in self.fixed[atom] else () for d, a in enumerate(spec)))
            if len(shape) == len(spec):
                self.specs[atom] = filled(self.of(atom), spec, shape, self.mesh)

    def _fix(self, atom: Any, sharding: Any, open_dims: frozenset[int] = NONE) -> None:
        """Set what a sharding says; one that leaves it to the compiler says nothing."""
        if not is_var(atom) or not mesh_of(sharding) or atom in self.fixed:
            return
        self.specs[atom] = spec_of(sharding, len(_shape(atom)))
        self.fixed[atom] = open_dims

    def _typed(self, var: Var) -> None:
        sharding = _sharding(var.aval)
        if spec := spec_of(sharding, len(getattr(var.aval, "shape", ()))):
            if _has_auto(sharding):  # axes beside the explicit ones are the compiler's to use
                self.give(var, spec)
            else:
                self._fix(var, sharding)

    def _step(self, eqn: JaxprEqn, forward: bool) -> None:
        name = eqn.primitive.name
        if name in _CONSTRAINTS:
            sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            self._fix(eqn.outvars[0], sharding, frozenset(eqn.params.get("unconstrained_dims", ())))
            if forward:
                self.give(eqn.outvars[0], self.of(eqn.invars[0]))
            else:
                self.give(eqn.invars[0], self.of(eqn.outvars[0]))
        elif name in _LOCAL:
            self._shard_map(eqn, forward)
        elif name in _PAIRS:
            for v, atom in zip(eqn.outvars, eqn.invars, strict=True):
                self.give(*((v, self.of(atom)) if forward else (atom, self.of(v))))
        elif name == "scan":
            self._scan(eqn, forward)
        elif name == "while":
            self._while(eqn, forward)
        elif name == "cond":
            for branch in eqn.params["branches"]:
                self._forget(open_jaxpr(branch)[0])
                self._call(open_jaxpr(branch)[0], eqn.invars[1:], eqn.outvars, forward)
        elif (called := _called(eqn, self.opened)) is not None:
            self._forget(called)
            self._jitted(eqn, called)
            self._call(called, eqn.invars, eqn.outvars, forward)
        else:
            self._operation(eqn, forward)

    def _operation(self, eqn: JaxprEqn, forward: bool) -> None:
        rule = _rule(eqn)
        operands = list(zip(eqn.invars, rule.operands, strict=True))
        results = list(zip(eqn.outvars, rule.results, strict=True))
        sources, sinks = (operands, results) if forward else (results, operands)
        atoms = [v for v, _ in sources]
        made = _factors([d for _, d in sinks])
        claims = _claims([d for _, d in sources], [self.of(v) for v in atoms], _sizes(atoms), made)
        for atom, dims in sinks:
            if any(f in claims for f in dims):
                self.give(atom, tuple(() if f is None else claims.get(f, ()) for f in dims))

    def _call(self, body: Jaxpr, ins: Sequence[Any], outs: Sequence[Any], forward: bool) -> None:
        inner = body.invars[len(body.invars) - len(ins) :]  # constants that were hoisted come first
        if id(body) in self.shared:
            for v, atom in zip(inner, ins, strict=True):
                self.give(v, self.of(atom))
            if not forward:
                self.sweep(body, True)
        if forward:
            for v, atom in zip(inner, ins, strict=True):
                self.give(v, self.of(atom))
            self.sweep(body, forward)
            for v, atom in zip(outs, body.outvars, strict=True):
                self.give(v, self.of(atom))
        else:
            for v, atom in zip(outs, body.outvars, strict=True):
                self.give(atom, self.of(v))
            self.sweep(body, forward)
            for v, atom in zip(inner, ins, strict=True):
                self.give(atom, self.of(v))

    def _forget(self, body: Jaxpr) -> None:
        """What another equation has found of a program that this one runs, too: the sizes inside are those of the last."""
        if id(body) in self.shared:
            for v in _all_vars(body):
                self.specs.pop(v, None)
                self.fixed.pop(v, None)

    def _jitted(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        for v, sharding in zip(body.invars, eqn.params.get("in_shardings", ()), strict=False):
            self._fix(v, sharding)
        for v, sharding in zip(eqn.outvars, eqn.params.get("out_shardings", ()), strict=False):
            self._fix(v, sharding)

    def _scan(self, eqn: JaxprEqn, forward: bool) -> None:
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        self._forget(body)
        consts, carry = scan_sizes(eqn.params)
        entering = [
            (v, atom, i >= consts + carry) for i, (v, atom) in enumerate(_pairs(body.invars, eqn.invars))
        ]
        leaving = [(atom, v, i >= carry) for i, (v, atom) in enumerate(_pairs(eqn.outvars, body.outvars))]
        carried = list(_pairs(body.invars[consts : consts + carry], body.outvars[:carry]))
        if id(body) in self.shared and not forward:
            for inside, outside, stacked in entering:
                self.give(inside, _unstacked(self.of(outside)) if stacked else self.of(outside))
            self.sweep(body, True)
        for _ in range(2):  # the second time with what the first one found of the carry
            for inside, outside, stacked in entering if forward else leaving:
                self.give(inside, _unstacked(self.of(outside)) if stacked else self.of(outside))
            self.sweep(body, forward)
            for into, out in carried:
                self.give(*((into, self.of(out)) if forward else (out, self.of(into))))
            for inside, outside, stacked in leaving if forward else entering:
                self.give(outside, _stacked(self.of(inside)) if stacked else self.of(inside))

    def _while(self, eqn: JaxprEqn, forward: bool) -> None:
        body = open_jaxpr(eqn.params["body_jaxpr"])[0]
        cond = open_jaxpr(eqn.params["cond_jaxpr"])[0]
        self._forget(body)
        ins = eqn.invars[eqn.params["cond_nconsts"] :]
        for _ in range(2):
            self._call(body, ins, eqn.outvars, forward)
            for v, atom in zip(body.invars[eqn.params["body_nconsts"] :], body.outvars, strict=True):
                self.give(v, self.of(atom))
        carried = body.invars[eqn.params["body_nconsts"] :]
        for v, atom in zip(cond.invars, (*eqn.invars[: eqn.params["cond_nconsts"]], *carried), strict=True):
            self.give(v, self.of(atom))
        self.sweep(cond, True)

    def _shard_map(self, eqn: JaxprEqn, forward: bool) -> None:
        """Inside, types are those of one shard; outside, what it returns is divided as it says."""
        mesh, manual = _mesh_of_params(eqn), _manual(eqn)
        whole = manual >= mesh.keys()
        for v, spec in zip(eqn.outvars, eqn.params.get("out_specs", ()), strict=False):
            if mesh and v not in self.fixed and not self.of(v):
                self.specs[v] = spec_of(_Named(spec), len(_shape(v)))
                if whole:
                    self.fixed[v] = NONE
        if not forward:
            for v, spec in zip(eqn.invars, eqn.params.get("in_specs", ()), strict=False):
                self.give(v, spec_of(_Named(spec), len(_shape(v))))
        if not whole:  # the other axes divide what is inside as well
            body = open_jaxpr(eqn.params["jaxpr"])[0]
            into, out = list(_pairs(body.invars, eqn.invars)), list(_pairs(eqn.outvars, body.outvars))
            for to, of in into if forward else [(a, v) for v, a in out]:
                self.give(to, _without(self.of(of), manual))
            self.sweep(body, forward)
            for to, of in out if forward else [(a, v) for v, a in into]:
                self.give(to, _without(self.of(of), manual))


def _pairs(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(a, b, strict=True)


def _manual(eqn: JaxprEqn) -> frozenset[str]:
    return frozenset(map(str, eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))))


def _without(spec: Spec, axes: Collection[str]) -> Spec:
    return trimmed(tuple(tuple(a for a in of_dim if a not in axes) for of_dim in spec))


def _all_vars(jaxpr: Jaxpr) -> Iterator[Var]:
    yield from _vars(jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subjaxprs(eqn):
            yield from _all_vars(inner)


def _shared(jaxpr: Jaxpr, opened: Opened) -> set[int]:
    """Programs, by `id`, that several equations run: JAX traces a jitted function once for all calls of the same types."""
    seen: set[int] = set()
    twice: set[int] = set()

    def look(program: Jaxpr) -> None:
        for eqn in program.eqns:
            inner = opened(eqn)
            for body in subjaxprs(eqn) if inner is None else (inner,):
                if id(body) in seen:
                    twice.add(id(body))
                else:
                    seen.add(id(body))
                    look(body)

    look(jaxpr)
    return twice


@dataclass(frozen=True, slots=True)
class _Named:
    spec: Any


def _claims(
    dims: Sequence[Dims], specs: Sequence[Spec], sizes: Sequence[int], made: Collection[int | None]
) -> dict[int, Axes]:
    """The axes of each factor. An axis divides one factor: one that is `made`, rather than summed over, and of those that of the
    largest array that has it."""
    claims: dict[int, Axes] = {}
    used: set[str] = set()
    order = sorted(range(len(dims)), key=lambda i: -sizes[i])
    pairs = [pair for i in order for pair in zip(dims[i], specs[i], strict=False)]
    for f, axes in sorted(pairs, key=lambda pair: pair[0] not in made):
        new = tuple(a for a in axes if a not in used)
        if f is not None and new and f not in claims:
            claims[f] = new
            used.update(new)
    return claims


def _factors(dims: Sequence[Dims]) -> set[int | None]:
    return {f for of_one in dims for f in of_one}


def _lost(spec: Spec, dims: Sequence[int | None], claims: Mapping[int, Axes]) -> list[str]:
    """The axes that an operand may not be divided along."""
    return [
        a
        for axes, f in zip(spec, dims, strict=False)
        for a in axes
        if f is None or a not in claims.get(f, ())
    ]


def _shape(atom: Any) -> tuple[int, ...]:
    aval = getattr(atom.aval, "inner_aval", atom.aval)
    return tuple(getattr(aval, "shape", ()))


def _rule(eqn: JaxprEqn) -> Rule:
    ins, outs = ([_shape(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    return rule_of(eqn.primitive.name, eqn.params, ins, outs)


def _sizes(atoms: Sequence[Any]) -> list[int]:
    return [math.prod(_shape(v)) for v in atoms]


def _sharding(aval: Any) -> Any:
    return getattr(getattr(aval, "inner_aval", aval), "sharding", None)


def _has_auto(sharding: Any) -> bool:
    types = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return any(str(t).endswith("Auto") for t in types)


def _runs_programs(eqn: JaxprEqn) -> bool:
    """Whether its work is counted in the programs that it runs."""
    return (
        eqn.primitive.name in _LOCAL
        or eqn.primitive.name in ("scan", "while", "cond")
        or _called(eqn) is not None
    )


def _called(eqn: JaxprEqn, opened: Opened = lambda eqn: None) -> Jaxpr | None:
    key = CALLS.get(eqn.primitive.name)
    if key is not None and key in eqn.params:
        return open_jaxpr(eqn.params[key])[0]
    return opened(eqn)


def _stacked(spec: Spec) -> Spec:
    return ((), *spec) if spec else ()


def _unstacked(spec: Spec) -> Spec:
    return spec[1:] if any(spec[1:]) else ()


def _mesh_of_params(eqn: JaxprEqn) -> dict[str, int]:
    """The meshes that the parameters of an equation name."""
    found: dict[str, int] = mesh_of(_HasMesh(eqn.params.get("mesh")))
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            found |= mesh_of(item)
    return found


@dataclass(frozen=True, slots=True)
class _HasMesh:
    mesh: Any


def _meshes_in(jaxpr: Jaxpr, opened: Opened) -> dict[str, int]:
    found: dict[str, int] = {}
    for v in _vars(jaxpr):
        found |= mesh_of(_sharding(v.aval))
    for eqn in jaxpr.eqns:
        found |= _mesh_of_params(eqn)
        inner = opened(eqn)
        for body in subjaxprs(eqn) if inner is None else (inner,):
            found |= _meshes_in(body, opened)
    return found


def _vars(jaxpr: Jaxpr) -> Iterator[Var]:
    yield from jaxpr.constvars
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
