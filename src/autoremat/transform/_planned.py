"""Policies that see the whole joint program: they price it, solve it, and keep what the solution says.

Joint -> Graph -> Problem -> Assignment -> KeepDecider
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autoremat._compat import Jaxpr, Var, effect_may_repeat, new_jaxpr
from autoremat._errors import BudgetError, InfeasibleBudgetError
from autoremat.cost import (
    Cost,
    Device,
    device,
    device_for_backend,
    graph_costs,
    op_cost,
    seconds,
)
from autoremat.graph import Graph, Op, Value, fingerprint
from autoremat.graph._trace import Division, trace_graph
from autoremat.solve import Assignment, Problem, Storage, cut, evaluate, frontier, pareto
from autoremat.storage import codecs_for
from autoremat.transform._decide import KeepDecider
from autoremat.transform._jaxpr import is_var
from autoremat.transform._linearize import Joint
from autoremat.transform._split import Decider

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """A memory budget: bytes, or a share of what is used without recomputation."""

    nbytes: int | None = None
    share: Fraction | None = None

    def resolve(self, whole: int) -> int:
        """The budget in bytes, if `whole` is what is used without recomputation. Rounds down."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.share is not None
        return int(self.share * whole)


def parse_budget(budget: int | str, where: str) -> Budget:
    """Read a budget: an int (bytes), `"12GiB"`, `"800 MB"`, or `"50%"`.

    Raises `BudgetError` if it cannot be read or is not positive.
    """
    wanted = f'`{where}(budget=...)` needs bytes as an int, a size such as "12GiB" or "800MB", or a share such as "50%"'
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        fix = f"budget={int(budget)}" if isinstance(budget, float) and 1 <= budget < 2**63 else 'budget="50%"'
        raise BudgetError(f"{wanted}; got {budget!r} of type {type(budget).__name__}. Cheapest fix: {fix}.")
    if isinstance(budget, int):
        result = Budget(nbytes=budget)
    else:
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", budget)
        if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
            raise BudgetError(
                f"{wanted}; cannot read {budget!r}. Cheapest fix: one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB."
            )
        number = Fraction(match[1])
        if match[2] == "%":
            result = Budget(share=number / 100)
        else:
            result = Budget(nbytes=int(number * _UNITS[match[2].lower()]))
    if (result.nbytes is not None and result.nbytes <= 0) or (result.share is not None and result.share <= 0):
        raise BudgetError(
            f'{wanted}, above zero; got {budget!r}. Cheapest fix: budget="100%", which says what there is to plan for.'
        )
    return result


# ------------------------------------------------------------------------------------------------ the joint graph, priced

Gratis = Literal["nothing", "views", "all but products"]
"""What costs nothing to run again. Of two values of one size, of which the second is made of the first by what is gratis, the first is kept.

`"views"`: what takes no more than a picosecond, such as operations that only rearrange their operand. `"all but products"`: also all that is
made without a product (of matrices, a convolution), except what runs programs: as under `dots_saveable`, products alone are worth keeping.
"""


@dataclass(frozen=True, eq=False)
class JointProblem:
    """A joint program as a problem. `variables[i]` is the variable of value `i`."""

    problem: Problem
    variables: tuple[Var, ...]
    fingerprint: str

    @property
    def graph(self) -> Graph:
        """The joint graph."""
        return self.problem.graph

    def problem_with(self, gratis: Gratis) -> Problem:
        """The problem in which what is `gratis` costs nothing to run again."""
        graph, costs = self.graph, self.problem.op_cost
        free = [_is_gratis(graph, op, cost, gratis) for op, cost in zip(graph.ops, costs, strict=True)]
        return replace(self.problem, op_cost=tuple(0 if f else c for f, c in zip(free, costs, strict=True)))

    def decider(self, keep: Mapping[int, int]) -> KeepDecider:
        """Decisions that keep the values of an assignment."""
        storages = self.problem.storages
        return KeepDecider({self.variables[v]: storages[v][s].name for v, s in keep.items()})


def forward_jaxpr(joint: Joint) -> Jaxpr:
    """The forward part of a joint program as a jaxpr `(primals, constants) -> outs`."""
    return new_jaxpr(joint.inputs, joint.outs, joint.forward_eqns, joint.like)


def joint_graph(
    joint: Joint, free: Sequence[bool], shards: Division | None = None
) -> tuple[Graph, dict[Any, int]]:
    """The graph of a joint program. `free` marks the primals that are alive anyway; constants are. `shards`: of its forward part."""
    num_primals = len(free)
    alive = [v for i, v in enumerate(joint.inputs) if i >= num_primals or free[i]]
    return trace_graph(
        forward_jaxpr(joint),
        demanded=joint.demanded,
        free=alive,
        effect_allowed=effect_may_repeat,
        source_of=lambda eqn: "",
        shards=shards,
    )


def pose(
    joint: Joint,
    target: Device,
    free: Sequence[bool],
    shared: Iterable[int] = (),
    *,
    shards: Division | None = None,
) -> JointProblem:
    """Price a joint program for a device, or for several that divide its values as `shards` say.

    `shared` are positions of outputs that are kept on somebody else's account (the next stage reads them as its input).
    """
    graph, ids = joint_graph(joint, free, shards)
    variables: list[Any] = [None] * len(graph.values)
    for var, i in ids.items():
        variables[i] = var
    paid_elsewhere = {ids[joint.outs[i]] for i in shared if is_var(joint.outs[i])}
    storages = tuple(storages_of(v, target, paid_elsewhere=v.id in paid_elsewhere) for v in graph.values)
    problem = Problem(graph=graph, op_cost=graph_costs(graph, target), storages=storages)
    return JointProblem(problem, tuple(variables), fingerprint(graph))


def _is_gratis(graph: Graph, op: Op, cost: int, gratis: Gratis) -> bool:
    if gratis == "nothing":
        return False
    if cost <= 1:
        return True
    return gratis == "all but products" and not op.inner and not op_cost(graph, op).matrix_flops


def storages_of(value: Value, target: Device, *, paid_elsewhere: bool) -> tuple[Storage, ...]:
    """The ways to keep a value; as it is it costs nothing if it is `paid_elsewhere`."""
    if value.dtype == "float0" or (not value.shape and not value.nbytes):
        return (Storage("device", 0),)
    options = []
    codecs = codecs_for(value.shape, value.dtype)
    for codec in codecs if value.producer is not None else codecs[:1]:  # an input waits as it is
        nbytes, share = value.nbytes, Fraction(1)
        if codec.name != "device":
            itemsize = jnp.dtype(value.dtype).itemsize
            share = Fraction(value.nbytes, max(1, value.size * itemsize))  # that one device has
            nbytes = math.ceil(codec.nbytes(value.shape, itemsize) * share)
        work = Cost(vector_flops=math.ceil(codec.flops_per_element * value.size * share))
        cost = int(seconds(work, target, fusible=True) * 1e12)
        options.append(Storage(codec.name, 0 if paid_elsewhere and codec.name == "device" else nbytes, cost))
    return tuple(options)


# ------------------------------------------------------------------------------------------------------------- policies


@dataclass(frozen=True)
class PricePolicy:
    """Keeps what is worth keeping at `price` (picoseconds per byte) on a device: one minimum cut."""

    price: Fraction
    target: str
    fence: str = "barrier"
    borders: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def decider(self, joint: Joint) -> Decider:
        posed = pose(joint, device(self.target), [True] * len(joint.like.invars))
        return posed.decider(cut(posed.problem, self.price).keep)


@dataclass(frozen=True)
class InputsPolicy:
    """Keeps nothing but inputs, whatever the program: for checkpoints that are planned from inside, of what may run again.

    `fence`, `borders` and `carried` as in `PlannedPolicy`.
    """

    fence: str = "barrier"
    borders: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def decider(self, joint: Joint) -> Decider:
        return KeepDecider({})


@dataclass(frozen=True)
class PlannedPolicy:
    """Keeps the values that a plan lists, in the joint graph that the plan was made for.

    `keep` holds (op, output, codec), or (-1, input, codec) for an input. The joint graph of another program (under
    `vmap`, after dead code was removed, of the derivative) has other ops: there the plan's price decides. `borders` are the
    inputs that earlier stages make; `carried` the same as positions among the tangents of a linear part (see `_fence`).
    """

    fingerprint: str
    keep: tuple[tuple[int, int, str], ...]
    price: Fraction
    target: str
    fence: str = "barrier"
    borders: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def decider(self, joint: Joint) -> Decider:
        num_primals = len(joint.like.invars)
        graph, ids = joint_graph(joint, [True] * num_primals)
        if fingerprint(graph) != self.fingerprint:
            return PricePolicy(self.price, self.target).decider(joint)
        variables = {i: var for var, i in ids.items()}
        return KeepDecider(
            {variables[graph.ops[op].outputs[out]]: codec for op, out, codec in self.keep if op >= 0}
        )


def planned_policy(posed: JointProblem, chosen: Assignment, price: Fraction, target: str) -> PlannedPolicy:
    """The policy that keeps what an assignment keeps."""
    keep = []
    for v, s in sorted(chosen.keep.items()):
        producer = posed.graph.values[v].producer
        name = posed.problem.storages[v][s].name
        if producer is None:
            keep.append((-1, posed.graph.inputs.index(v), name))
        else:
            keep.append((producer, posed.graph.ops[producer].outputs.index(v), name))
    return PlannedPolicy(posed.fingerprint, tuple(keep), price, target)


@dataclass(frozen=True)
class BudgetPolicy:
    """Keeps at most `budget` bytes besides the inputs, and recomputes as little as possible.

    A model of the program decides, at tracing time: nothing is compiled.
    """

    budget: Budget
    target: str = "cpu"

    @classmethod
    def parse(cls, budget: int | str) -> BudgetPolicy:
        """From what the user wrote. Raises `BudgetError`."""
        return cls(
            parse_budget(budget, "autoremat.checkpoint"), device_for_backend(jax.default_backend()).name
        )

    def decider(self, joint: Joint) -> Decider:
        posed = pose(joint, device(self.target), [True] * len(joint.like.invars))
        found = frontier(posed.problem)
        limit = self.budget.resolve(found.points[0].nbytes)
        fitting = [a for a in pareto(posed.problem, found=found) if a.nbytes <= limit]
        if not fitting:
            floor = found.points[-1].nbytes
            raise InfeasibleBudgetError(
                f"`autoremat.checkpoint(budget=...)`: got {limit} bytes, but what may not run again in "
                f"{joint.like.debug_info.func_src_info} keeps {floor} bytes. Cheapest fix: a budget of at least {floor} "
                "bytes, or move the random or effectful operation out of the checkpointed function.",
                floor_bytes=floor,
                budget_bytes=limit,
            )
        chosen = min(fitting, key=lambda a: (a.cost, a.nbytes))
        return posed.decider(evaluate(posed.problem, chosen.keep).keep)
