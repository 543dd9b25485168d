"""The stages of a program and the options of each: what it may keep, and what that costs.

    Program = Stage | Loop | Plain ...          in program order; a Loop has a Program inside

A stage's options come from the frontier of its joint graph. Equal stages share them. Whether a stage inside a loop keeps a
value counts once for each iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from autoremat._compat import Jaxpr, Var, is_ref, open_jaxpr, scan_sizes
from autoremat.cost import Device, graph_costs, graph_flops, op_cost
from autoremat.graph._trace import trace_graph
from autoremat.plan._segments import Span, dependents, groupings, halves, signature, subjaxpr, units
from autoremat.sharding import WHOLE, Shards, propagate
from autoremat.solve import Assignment, frontier, pareto, repriced
from autoremat.transform._derived import carry_alone
from autoremat.transform._jaxpr import is_var
from autoremat.transform._linearize import Joint, linearize
from autoremat.transform._planned import (
    Gratis,
    JointProblem,
    PlannedPolicy,
    forward_jaxpr,
    planned_policy,
    pose,
)
from autoremat.transform._split import may_run_again

MAX_OPTIONS = 32
"""Options of a stage beside the vertices of its hull: more would not be told apart by a compiler."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage, for one execution of it.

    `nbytes` kept bytes, `cost` picoseconds and `flops` of recomputation, `policy` what to keep (`None`: the stage is left
    as it is, without a checkpoint). `vertex` marks a vertex of the stage's hull.
    """

    nbytes: int
    cost: int
    flops: int
    policy: PlannedPolicy | None
    vertex: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Equations `start` to `stop` as one checkpoint. `trips` is how often it runs; `label` says where it stands.

    `input_bytes`: of what it reads, the part that its options are charged for. One run takes `forward_cost` picoseconds and
    `forward_flops`.
    """

    span: Span
    options: tuple[Option, ...]
    trips: int
    label: str
    input_bytes: int
    forward_cost: int
    forward_flops: int

    @property
    def movable_bytes(self) -> int:
        """Bytes that it can give back, in all its executions."""
        return (self.options[0].nbytes - self.options[-1].nbytes) * self.trips


@dataclass(frozen=True, slots=True)
class Loop:
    """A `scan` at equation `index`, with the program of its body.

    `carry_bytes` is the size of a snapshot of its carry; 0 for a loop whose steps may not run again. To advance the carry by one
    iteration takes `step_cost` picoseconds and `step_flops`.
    """

    index: int
    body: Program
    length: int
    carry_bytes: int
    step_cost: int
    step_flops: int


@dataclass(frozen=True, slots=True)
class Program:
    """The stages and loops of a jaxpr; equations outside them run as they are. `shards` say how its values are divided."""

    jaxpr: Jaxpr
    nodes: tuple[Stage | Loop, ...]
    ops: int
    shards: Shards

    def stages(self) -> Iterator[Stage]:
        """All stages, those of loops included, in program order."""
        for node in self.nodes:
            if isinstance(node, Stage):
                yield node
            else:
                yield from node.body.stages()

    def has_small_tail(self, share: float) -> bool:
        """Whether the last node is a stage, in no loop, that can give back less than this share of what all can."""
        tail = self.nodes[-1] if self.nodes else None
        return isinstance(tail, Stage) and tail.movable_bytes < share * movable_bytes(self.stages())

    def without_tail(self) -> Program:
        """The same with its last node left as it is."""
        return replace(self, nodes=self.nodes[:-1])


def movable_bytes(stages: Iterable[Stage]) -> int:
    """Bytes between keeping everything and recomputing everything."""
    return sum(s.movable_bytes for s in stages)


@dataclass(frozen=True, slots=True)
class _Solved:
    """What equal stages share: their options, which outputs have a tangent, the size of the joint graph, and what one run costs."""

    options: tuple[Option, ...]
    nonzero_outs: tuple[bool, ...]
    ops: int
    forward_cost: int
    forward_flops: int


@dataclass
class Builder:
    """Builds programs for one device, or for several among which values are divided as `shards` say.

    Equal stages are solved once: `solved` maps their structure to their options.

    With `halve_loops` the body of a loop is two stages, else it is one. What is `gratis` counts nothing when a stage is solved (see
    `transform._planned.Gratis`); its options have the costs of all.
    """

    device: Device
    shards: Shards = WHOLE
    halve_loops: bool = False
    gratis: Gratis = "nothing"
    solved: dict[Any, _Solved] = field(default_factory=dict)
    ops: int = 0

    def program(
        self, jaxpr: Jaxpr, spans: Sequence[Span], active: set[Var], free: set[Var], trips: int, where: str
    ) -> tuple[Program, set[Var]]:
        """The program of `jaxpr` for a partition into spans.

        `active` are the inputs with a tangent, `free` those that are alive anyway. Returns it with all variables that have a
        tangent.
        """
        active, charged = set(active), set(free)
        reads = _reads_after(jaxpr, spans)
        nodes: list[Stage | Loop] = []
        ops = 0
        for span, later in zip(spans, reads, strict=True):
            if span.loop:
                loop, count = self._loop(jaxpr, span.start, active, charged, trips, where)
                nodes.append(loop)
                ops += count
                charged.update(v for v in jaxpr.eqns[span.start].invars if is_var(v))
                continue
            part = subjaxpr(jaxpr, span, later | {v for v in jaxpr.outvars if is_var(v)})
            nonzero = tuple(v in active for v in part.invars)
            if not any(nonzero) or not part.outvars:
                continue
            shared = tuple(i for i, v in enumerate(part.outvars) if v in later)
            solved = self._solve(part, nonzero, tuple(v in charged for v in part.invars), shared)
            ops += solved.ops
            active.update(v for v, nz in zip(part.outvars, solved.nonzero_outs, strict=True) if nz)
            if solved.options:
                nodes.append(
                    Stage(
                        span=span,
                        options=solved.options,
                        trips=trips,
                        label=f"{where}[{span.start}:{span.stop}]",
                        input_bytes=sum(self.shards.nbytes(v) for v in part.invars if v not in charged),
                        forward_cost=solved.forward_cost,
                        forward_flops=solved.forward_flops,
                    )
                )
            charged.update(part.invars)
        return Program(jaxpr, tuple(nodes), ops, self.shards), active

    def _solve(
        self, part: Jaxpr, nonzero: tuple[bool, ...], free: tuple[bool, ...], shared: tuple[int, ...]
    ) -> _Solved:
        divided = tuple(map(self.shards.of, (*part.invars, *(v for e in part.eqns for v in e.outvars))))
        key = (signature(part), nonzero, free, shared, self.gratis, divided if any(divided) else ())
        if key not in self.solved:
            joint = linearize(part, nonzero)
            shards = self._shards_of(part, joint)
            posed = pose(joint, self.device, free, shared, shards=shards)
            options = _options(posed, self.device, self.gratis) if any(joint.nonzero_outs) else ()
            once, _ = trace_graph(part, source_of=lambda eqn: "", shards=self.shards)
            self.solved[key] = _Solved(
                options=options,
                nonzero_outs=joint.nonzero_outs,
                ops=len(joint.forward_eqns) + len(joint.linear_eqns),
                forward_cost=sum(graph_costs(once, self.device)),
                forward_flops=graph_flops(once),
            )
        return self.solved[key]

    def _shards_of(self, part: Jaxpr, joint: Joint) -> Shards:
        """How the values of the joint program are divided: its inputs and outputs are those of the part."""
        if not self.shards.mesh:
            return WHOLE
        ends = zip(
            (*part.invars, *part.outvars), (*joint.inputs[: len(part.invars)], *joint.outs), strict=True
        )
        known = {v: self.shards.of(end) for end, v in ends if is_var(v)}
        return propagate(forward_jaxpr(joint), known, self.shards.mesh)

    def _loop(
        self, jaxpr: Jaxpr, index: int, active: set[Var], free: set[Var], trips: int, where: str
    ) -> tuple[Loop, int]:
        eqn = jaxpr.eqns[index]
        body = loop_body(eqn)
        num_consts, num_carry = scan_sizes(eqn.params)
        nonzero = [is_var(v) and v in active for v in eqn.invars]
        alive = {
            b
            for i, (b, v) in enumerate(zip(body.invars, eqn.invars, strict=True))
            if not num_consts <= i < num_consts + num_carry and (i < num_consts or not is_var(v) or v in free)
        }
        label = f"{where}scan[{index}]" if where else f"scan[{index}]"
        while True:
            seeds = {b for b, nz in zip(body.invars, nonzero, strict=True) if nz}
            carried = set(body.invars[num_consts : num_consts + num_carry])
            finest = units(body, self.shards, dependents(body, seeds), carried)
            if any(s.loop for s in finest):
                spans = finest
            elif self.halve_loops:
                spans = halves(
                    body, self.shards, dependents(body, seeds), carried, trips * eqn.params["length"]
                )
            else:
                spans = [Span(0, len(body.eqns))]
            # What a body returns is stacked or carried once more beside a residual of the same value: `scan` does not see
            # that the carry-out of one iteration is the carry-in of the next, so both are charged.
            program, reached = self.program(body, spans, seeds, alive, trips * eqn.params["length"], label)
            outs = [is_var(v) and v in reached for v in body.outvars]
            grown = [
                nz or outs[i - num_consts] if num_consts <= i < num_consts + num_carry else nz
                for i, nz in enumerate(nonzero)
            ]
            if grown == nonzero:
                break
            nonzero = grown
        active.update(v for v, nz in zip(eqn.outvars, outs, strict=True) if nz)
        carry_bytes = sum(self.shards.nbytes(v) for v in body.invars[num_consts : num_consts + num_carry])
        step, _ = trace_graph(carry_alone(body, num_carry), shards=self.shards)
        repeatable = may_run_again(eqn) and not any(is_ref(v.aval) for v in eqn.invars)
        loop = Loop(
            index=index,
            body=program,
            length=eqn.params["length"],
            carry_bytes=carry_bytes if repeatable else 0,
            step_cost=sum(graph_costs(step, self.device)),
            step_flops=graph_flops(step),
        )
        return loop, program.ops


def loop_body(eqn: Any) -> Jaxpr:
    """The body of a `scan`; tracing has inlined its calls."""
    return open_jaxpr(eqn.params["jaxpr"])[0]


def _reads_after(jaxpr: Jaxpr, spans: Sequence[Span]) -> list[set[Any]]:
    """For each span, the variables that equations after it read."""
    result: list[set[Any]] = []
    reads: set[Any] = set()
    for span in reversed(spans):
        result.append(set(reads))
        for eqn in jaxpr.eqns[span.start : span.stop]:
            reads.update(v for v in eqn.invars if is_var(v))
    result.reverse()
    return result


# -------------------------------------------------------------------------------------------------------------- options


def _options(posed: JointProblem, device: Device, gratis: Gratis) -> tuple[Option, ...]:
    """The Pareto set of a stage as options, by falling bytes; the hull's vertices, and splices thinned out.

    They are what is optimal if what is `gratis` costs nothing; their costs are those of all.
    """
    if gratis == "nothing":
        found = frontier(posed.problem)
        points: Sequence[Assignment] = pareto(posed.problem, found=found)
        vertices = {(p.nbytes, p.cost): price for p, price in zip(found.points, found.prices, strict=True)}
    else:
        points, vertices = repriced(posed.problem, pareto(posed.problem_with(gratis)))
    chosen = _thin(points, set(vertices))
    return tuple(_option(posed, p, vertices.get((p.nbytes, p.cost)), device) for p in chosen)


def _thin(points: Sequence[Assignment], vertices: set[tuple[int, int]]) -> list[Assignment]:
    """The vertices and at most `MAX_OPTIONS` others: again and again the point goes that is missed least.

    A budget that falls on a point which is gone is met by the next one, at a higher cost: its loss is the bytes down to it times
    the time up to the next.
    """
    kept = list(points)

    def loss(i: int) -> tuple[int, int]:
        if (kept[i].nbytes, kept[i].cost) in vertices or not 0 < i < len(kept) - 1:
            return (1, 0)
        return (0, (kept[i - 1].nbytes - kept[i].nbytes) * (kept[i + 1].cost - kept[i].cost))

    losses = [loss(i) for i in range(len(kept))]
    while sum(1 for vertex, _ in losses if not vertex) > MAX_OPTIONS:
        least = min(range(len(kept)), key=losses.__getitem__)
        del kept[least], losses[least]
        for i in (least - 1, least):
            losses[i] = loss(i)
    return kept


def _option(posed: JointProblem, p: Assignment, interval: tuple[Any, Any] | None, device: Device) -> Option:
    twice = p.forward & p.rerun
    flops = sum(op_cost(posed.graph, posed.graph.ops[j]).flops for j in twice)
    plain = not p.rerun and all(posed.problem.storages[v][s].name == "device" for v, s in p.keep.items())
    price = Fraction(0) if interval is None else _inside(*interval)
    policy = None if plain else planned_policy(posed, p, price, device.name)
    return Option(p.nbytes, p.cost, flops, policy, interval is not None)


def _inside(low: Any, high: Any) -> Fraction:
    """A price at which the vertex with this interval is the only optimum of the options."""
    if high == float("inf"):
        return Fraction(low) * 2 + 1
    return (Fraction(low) + Fraction(high)) / 2


def partitions(jaxpr: Jaxpr, shards: Shards, active: set[Var]) -> list[tuple[str, list[Span]]]:
    """The candidate partitions of a program into stages."""
    return groupings(jaxpr, shards, dependents(jaxpr, active))
