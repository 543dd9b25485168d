"""A lower bound on what any program must compute again that meets a memory budget.

    value_and_grad of a function, device -> Relaxation          bytes -> picoseconds

**Claim.** Take a program that returns the loss and its gradient, computed by the operations of `jax.value_and_grad`, in any order that
their data flow allows, some of them again. If it never has more than `K` bytes alive beside its arguments, the operations that
count (see below) run again for at least `Relaxation.least_cost(K)` picoseconds. A program that meets a budget has `K` = the budget
minus the bytes of the arguments; outputs are not subtracted, since their buffers may hold something else before.

**Proof.** Take one operation, the *turn*, and the moment at which it starts for the first time (`_turn`).

- All that it depends on has run by then.
- All that it and those that depend on it read, and all results, are alive at that moment or computed later, from what is alive.
- What is alive takes at most `K` bytes.

So an operation of the first kind that runs later runs twice. What to keep alive at that moment and what to run later is the problem that
`solve` cuts, with the reads of the turn as its outputs and those of the second line as its demanded values, and `solve._bound` is
below its every solution. Each operation gives a true bound: some are tried, those at which most bytes are in between, and the
highest bound counts. Usually that is where the backward pass begins; but nothing rests on the loss being there before it, which no
compiler promises: of two losses that are added it may finish one, backward pass included, before it starts the other.

**Loops.** Each iteration of a `scan` that ran before the turn is a copy of a problem of its own: which values its body keeps, stacked for the
backward loop, and which of its operations run again. What it carries in, what it scans over, and constants of the loop are free there;
what the loop returns is free outside. So every byte and every operation is charged in one place at most, and the sum of the
parts is below the whole. Schedules that keep snapshots of the carry are covered: here all carries are free.

**What is relaxed** beyond what a plan can do, so that the bound holds for what compilers make of a plan:

- Operations that a compiler fuses into their readers cost nothing: it may compute them twice where the program keeps them. Neither
  do those of at most `CHEAP` FLOPs for each element of the result (copies, gathers, outer products). Products, convolutions,
  reductions, sorts and kernels count.
- Equal operations on equal operands are one.
- What is computed from constants alone (of the program, or of a loop) is free: it is folded, or computed once.
- Values and work that several devices share are spread over all of them evenly.
- What branches, inner calls and loops return is free, since parts of them can run again; only bodies of `scan` are looked into.

**What is not covered**: a compiler that replaces an operation that counts by cheaper ones, or runs it again on its own account;
values kept outside of the device's memory. Seconds are those of the cost model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    dce,
    effect_may_repeat,
    hoist_constants,
    new_jaxpr,
    open_jaxpr,
    scan_sizes,
)
from autoremat.cost import Device, graph_costs, is_fusible, op_cost
from autoremat.cost._names import KERNEL
from autoremat.graph import Graph, Op
from autoremat.graph._trace import inner_jaxprs, trace_graph
from autoremat.measure import MemoryUse, abstract
from autoremat.plan._turn import find_turns
from autoremat.solve import LowerBound, Part, Problem
from autoremat.transform._jaxpr import (
    free_vars,
    inline_body,
    inline_calls,
    is_var,
    live_eqns,
    subjaxprs,
    substitute,
)
from autoremat.transform._planned import storages_of
from autoremat.transform._split import may_run_again

CHEAP = 2
"""An operation of at most so many FLOPs for each element of its result is free to run again."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """`bounds` of the picoseconds of recomputation of one device that does it all, one for each turn, by the bytes on all `devices`
    together.

    `step_cost`: picoseconds of a step without recomputation, its work divided evenly.
    """

    bounds: tuple[LowerBound, ...]
    devices: int
    step_cost: int

    def least_cost(self, nbytes: int) -> int | float:
        """No program with at most so many bytes on a device, beside its arguments, recomputes for fewer picoseconds.

        Infinite if there is none.
        """
        least = max((bound.at(nbytes * self.devices) for bound in self.bounds), default=0)
        return least // self.devices if least < math.inf else least

    @property
    def least_bytes(self) -> int:
        """No program has fewer bytes on a device, beside its arguments."""
        return -(-max((bound.least_bytes for bound in self.bounds), default=0) // self.devices)


def room(use: MemoryUse, budget: int) -> int:
    """The bytes beside the arguments within a budget. Donated arguments make room; all programs of a function have the same."""
    return budget - use.argument_bytes + use.alias_bytes


def relax(gradient: Callable[..., Any], args: Sequence[Any], device: Device) -> Relaxation:
    """The relaxation of a function of `args` that returns a loss and its gradient, nothing recomputed. See the module's docstring."""
    program, constants = _gradient_program(gradient, args)
    level = _Level(program, constants, device)
    returned = level.now(program.outvars)
    counts = [i for i, e in enumerate(level.eqns) if not is_fusible(e.primitive.name)]
    turns = find_turns(level.eqns, returned, counts)
    graph, _ = trace_graph(program, source_of=lambda eqn: "")
    devices = _devices(program, args)
    return Relaxation(
        bounds=tuple(LowerBound(list(level.parts(turn.before, turn.after))) for turn in turns),
        devices=devices,
        step_cost=sum(graph_costs(graph, device)) // devices,
    )


def _gradient_program(gradient: Callable[..., Any], args: Sequence[Any]) -> tuple[Jaxpr, list[Var]]:
    """The program without calls and dead code, and which of its inputs are constants."""
    traced, _ = open_jaxpr(jax.make_jaxpr(gradient)(*jax.tree.map(abstract, args)))
    num_args = len(traced.invars)
    inlined, _ = inline_calls(hoist_constants(traced), dissolve_derivatives=True)
    pruned, _ = dce(inlined, [True] * len(inlined.outvars))
    program = inlined.replace(eqns=pruned.eqns, effects=pruned.effects)
    return program, program.invars[: len(program.invars) - num_args]


def _devices(jaxpr: Jaxpr, args: Any) -> int:
    """How many devices may share the values of a program: an array of it is somewhere among them, whole."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            shardings += param if isinstance(param, (tuple, list)) else [param]
    meshes = [getattr(x, "size", 1) for x in shardings if isinstance(x, (Mesh, AbstractMesh))]
    counts = [x.num_devices for x in shardings if isinstance(x, Sharding)]
    return max([1, *meshes, *counts, *(_devices(inner, ()) for e in jaxpr.eqns for inner in subjaxprs(e))])


class _Level:
    """The equations of a program or of a loop's body, equal ones merged, with their parts for any turn.

    `constants` are inputs of which there is one for all iterations.
    """

    def __init__(self, jaxpr: Jaxpr, constants: Iterable[Var], device: Device) -> None:
        self.jaxpr = jaxpr
        self.device = device
        self.eqns, self._same = _merged(jaxpr.eqns, constants)
        self._bodies: dict[int, _Level] = {}

    def now(self, atoms: Iterable[Any]) -> list[Any]:
        """Atoms, each as what stands for it since equal equations are one."""
        return substitute(atoms, self._same)

    def parts(self, before: Iterable[Any], after: Iterable[Any], copies: int = 1) -> Iterator[Part]:
        """The problem of the equations, and those of the bodies of the loops among them, each with its number of copies.

        `before` are values that have been computed at the turn, `after` those that are read from then on.
        """
        computed = _computed(self.eqns, self.now(before), self.jaxpr)
        demanded = {v for v in self.now(after) if is_var(v)}
        yield Part(self._problem(computed, demanded), copies)
        for eqn in live_eqns(self.eqns, demanded, effects=False):
            if eqn.primitive.name == "scan":
                yield from self._loop(eqn, computed, demanded, copies)

    def _problem(self, computed: Collection[Var], demanded: Collection[Var]) -> Problem:
        problem, ids = self._priced
        graph = dataclasses.replace(
            problem.graph,
            outputs=tuple(i for v, i in ids.items() if v in computed),
            demanded=tuple(i for v, i in ids.items() if v in demanded),
        )
        return dataclasses.replace(problem, graph=graph)

    @cached_property
    def _priced(self) -> tuple[Problem, dict[Var, int]]:
        """The equations that run no programs, without outputs, and the value ids of variables. What else they read is free."""
        eqns = [e for e in self.eqns if not _is_container(e)]
        inputs = free_vars(eqns)
        graph, ids = trace_graph(
            new_jaxpr(inputs, (), eqns, self.jaxpr),
            free=inputs,
            effect_allowed=effect_may_repeat,
            source_of=lambda eqn: "",
        )
        times = graph_costs(graph, self.device)
        problem = Problem(
            graph=graph,
            op_cost=tuple(t if _counts(graph, op) else 0 for t, op in zip(times, graph.ops, strict=True)),
            storages=tuple(storages_of(v, self.device, paid_elsewhere=False) for v in graph.values),
        )
        return problem, ids

    def _loop(
        self, eqn: JaxprEqn, computed: Collection[Any], demanded: Collection[Any], copies: int
    ) -> Iterator[Part]:
        """The parts of the body of a loop: of what it returns, `computed` was there at the turn, `demanded` is read later."""
        num_consts, num_carry = scan_sizes(eqn.params)
        if id(eqn) not in self._bodies:
            jaxpr = inline_body(open_jaxpr(eqn.params["jaxpr"])[0], dissolve_derivatives=True)
            self._bodies[id(eqn)] = _Level(jaxpr, jaxpr.invars[:num_consts], self.device)
        body = self._bodies[id(eqn)]
        results = body.jaxpr.outvars
        used = _outs_used(body.jaxpr, [v in computed for v in eqn.outvars], num_consts, num_carry)
        # What is carried out is one value, not one for each iteration: it is free here as it is outside.
        stacked = [v in demanded and i >= num_carry for i, v in enumerate(eqn.outvars)]
        if any(used) and any(stacked):
            before = [v for v, u in zip(results, used, strict=True) if u]
            after = [v for v, s in zip(results, stacked, strict=True) if s]
            yield from body.parts(before, after, copies * eqn.params["length"])


# ------------------------------------------------------------------------------------------------------- equal equations


def _merged(eqns: Sequence[JaxprEqn], constants: Iterable[Var]) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """Equal equations on equal operands as one, and those that depend on constants alone left out.

    The second result says which variables stand for those of the equations that were merged.
    """
    kept: list[JaxprEqn] = []
    same: dict[Var, Var] = {}
    fixed = set(constants)
    seen: dict[Any, JaxprEqn] = {}
    for original in eqns:
        eqn = original.replace(invars=substitute(original.invars, same))
        if not eqn.effects and may_run_again(eqn):
            if all(not is_var(v) or v in fixed for v in eqn.invars):
                fixed.update(eqn.outvars)
                continue
            first = seen.setdefault(_identity(eqn), eqn)
            if first is not eqn:
                same.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        kept.append(eqn)
    return kept, same


def _identity(eqn: JaxprEqn) -> Any:
    """Equal for equations that compute the same."""
    atoms = tuple(v if is_var(v) else (str(v.aval), np.asarray(v.val).tobytes()) for v in eqn.invars)
    key = (eqn.primitive, atoms, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:  # parameters without a hash: equal to itself alone
        return id(eqn)
    return key


# ------------------------------------------------------------------------------------------------------------ data flow


def _computed(eqns: Sequence[JaxprEqn], outs: Iterable[Any], like: Jaxpr) -> set[Var]:
    """All values that `outs` are computed from, themselves included."""
    found = {v for v in outs if is_var(v)}
    for eqn in reversed(eqns):
        wanted = [v for v in eqn.outvars if v in found]
        if wanted and _is_container(eqn):
            invars = free_vars([eqn])
            _, read = dce(new_jaxpr(invars, wanted, [eqn], like), [True] * len(wanted))
            found.update(v for v, r in zip(invars, read, strict=True) if r)
        elif wanted:
            found.update(v for v in eqn.invars if is_var(v))
    return found


def _outs_used(body: Jaxpr, used: list[bool], num_consts: int, num_carry: int) -> list[bool]:
    """The results of each iteration that the results of a loop in `used` need: those, and what is carried on to them."""
    carry = body.invars[num_consts : num_consts + num_carry]
    while True:
        needed = _computed(body.eqns, [v for v, u in zip(body.outvars, used, strict=True) if u], body)
        grown = [u or v in needed for u, v in zip(used, carry, strict=False)] + used[num_carry:]
        if grown == used:
            return used
        used = grown


def _is_container(eqn: JaxprEqn) -> bool:
    """Whether an equation runs a program of which a part can run again: what it returns is free."""
    return eqn.primitive.name not in KERNEL and bool(inner_jaxprs(eqn))


def _counts(graph: Graph, op: Op) -> bool:
    """Whether running an operation again costs anything. See the module's docstring."""
    if is_fusible(op.primitive):
        return False
    return op_cost(graph, op).flops > CHEAP * sum(graph.values[v].size for v in op.outputs)
