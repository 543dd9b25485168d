"""Write a plan into a program: each stage that recomputes becomes a checkpoint with its decisions.

    jaxpr: args -> outs   becomes   jaxpr: args -> outs      with `autoremat_checkpoint` equations

Nothing is traced: equations are grouped, variables stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from jax import lax

from autoremat._compat import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    eqn_effects,
    new_eqn,
    new_jaxpr,
    new_var,
    scan_params,
    scan_sizes,
)
from autoremat.plan._alike import Alike
from autoremat.plan._path import State, snapshots_of
from autoremat.plan._segments import Span, subjaxpr
from autoremat.plan._stages import Loop, Program, Stage, loop_body
from autoremat.solve import Again, Reversal
from autoremat.transform._jaxpr import is_var, traced_eqns
from autoremat.transform._planned import InputsPolicy, PlannedPolicy
from autoremat.transform._primitives import checkpoint_p
from autoremat.transform._scan import with_snapshots


@dataclass(frozen=True, slots=True)
class Block:
    """A decision: equations `start` to `stop` are one checkpoint with this policy."""

    start: int
    stop: int
    policy: PlannedPolicy


@dataclass(frozen=True, slots=True)
class NestedBlock:
    """A decision: equations `start` to `stop` are one checkpoint that keeps only what it reads, with checkpoints inside.

    Its backward pass runs the equations once more, and what `inner` says is kept, for as long as it takes to reverse them.
    Blocks inside have the numbers of the whole program's equations.
    """

    start: int
    stop: int
    fence: str
    inner: tuple[Block | NestedBlock, ...]


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """Decisions inside the body of the `scan` at equation `index`.

    With `split`, the loop becomes two: the first `split` iterations to run follow `body`, the others `rest`. Between two
    neighbouring plans of a body nothing else lies. With `snapshots`, its backward pass keeps so many copies of the carry (see
    `autoremat.scan`).
    """

    index: int
    body: Decisions
    split: int = 0
    rest: Decisions = ()
    snapshots: int = 0


Decisions = tuple[Block | NestedBlock | LoopBlock, ...]


def without_prices(decisions: Decisions) -> Decisions:
    """The decisions with no price in their policies: equal for those that keep the same in the program that they were made for."""

    def without(block: Block | NestedBlock | LoopBlock) -> Any:
        if isinstance(block, Block):
            return replace(block, policy=replace(block.policy, price=Fraction(0)))
        if isinstance(block, NestedBlock):
            return replace(block, inner=without_prices(block.inner))
        return replace(block, body=without_prices(block.body), rest=without_prices(block.rest))

    return tuple(map(without, decisions))


def rewrite(
    jaxpr: Jaxpr, decisions: Decisions, *, in_loop: bool = False, alike: Alike | None = None
) -> Jaxpr:
    """The program with the decisions written in. `jaxpr` has its calls inlined, as when the plan was made.

    With `alike`, parts of the same structure are one.

    Inside a loop a checkpoint has a barrier only if its fence is one: the forward and the backward loop are two computations that no
    compiler merges.
    """
    eqns = _Writer(jaxpr, _Reads(jaxpr), not in_loop, alike).write(0, len(jaxpr.eqns), decisions)
    return new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


@dataclass(frozen=True)
class _Writer:
    """Writes decisions into the equations of `jaxpr`; with `guard`, checkpoints have fences."""

    jaxpr: Jaxpr
    reads: _Reads
    guard: bool
    alike: Alike | None

    def write(self, start: int, stop: int, decisions: Decisions) -> list[JaxprEqn]:
        """Equations `start` to `stop` with the decisions about them."""
        eqns: list[JaxprEqn] = []
        position = start
        for block in decisions:
            first = block.index if isinstance(block, LoopBlock) else block.start
            eqns += self.jaxpr.eqns[position:first]
            if isinstance(block, LoopBlock):
                eqns += _loop(self.jaxpr.eqns[first], block, self.alike)
                position = first + 1
            else:
                eqns.append(self._checkpoint(block))
                position = block.stop
        return eqns + self.jaxpr.eqns[position:stop]

    def _checkpoint(self, block: Block | NestedBlock) -> JaxprEqn:
        span = Span(block.start, block.stop)
        part = subjaxpr(self.jaxpr, span, self.reads.after(block.stop))
        invars, outvars = part.invars, part.outvars
        policy: Any = block.policy if isinstance(block, Block) else InputsPolicy(block.fence)
        if isinstance(block, NestedBlock):
            # The same inputs and outputs, in the same order: they belong to the equations, however these are grouped.
            part = part.replace(eqns=self.write(block.start, block.stop, block.inner))
        elif self.alike:
            part = self.alike.one_for(part, self.jaxpr, span)
        arguments = set(self.jaxpr.invars)
        borders = tuple(i for i, v in enumerate(invars) if v not in arguments)
        params = dict(
            jaxpr=part,
            policy=replace(policy, borders=borders),
            prevent_cse=self.guard or policy.fence == "barrier",
            differentiated=False,
            origin=None,
            siblings=None,
        )
        source = self.jaxpr.eqns[block.start]
        return new_eqn(
            invars,
            outvars,
            checkpoint_p,
            params,
            eqn_effects(part, invars),
            source.source_info,
            source.ctx,
        )


class _Reads:
    """What is read at or after a position."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.last: dict[Any, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in eqn.invars:
                if is_var(v):
                    self.last[v] = i
        for v in jaxpr.outvars:
            if is_var(v):
                self.last[v] = len(jaxpr.eqns)

    def after(self, position: int) -> _After:
        return _After(self.last, position)


@dataclass(frozen=True, slots=True)
class _After:
    last: dict[Any, int]
    position: int

    def __contains__(self, v: Any) -> bool:
        return self.last.get(v, -1) >= self.position


def _loop(eqn: JaxprEqn, block: LoopBlock, alike: Alike | None) -> list[JaxprEqn]:
    body = rewrite(loop_body(eqn), block.body, in_loop=True, alike=alike)
    if not block.split:
        planned = eqn.replace(params=scan_params(eqn.params, body, *scan_sizes(eqn.params)))
        return [with_snapshots(planned, block.snapshots) if block.snapshots else planned]
    rest = rewrite(loop_body(eqn), block.rest, in_loop=True, alike=alike)
    return split_loop(eqn, body, rest, block.split)


def split_loop(eqn: JaxprEqn, first: Jaxpr, rest: Jaxpr, count: int) -> list[JaxprEqn]:
    """A `scan` as two: the first `count` iterations to run with body `first`, the others with body `rest`.

    What is scanned over is sliced, and the stacked results are put together, in the order of the original loop.
    """
    num_consts, num_carry = scan_sizes(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    consts, init = eqn.invars[:num_consts], eqn.invars[num_consts : num_consts + num_carry]
    xs = eqn.invars[num_consts + num_carry :]
    border = length - count if reverse else count
    low_eqns, low = _slices(xs, 0, border)
    high_eqns, high = _slices(xs, border, length)
    early, late = (high, low) if reverse else (low, high)
    one, carry, early_ys = _part(eqn, first, count, [*consts, *init, *early], num_carry)
    two, last, late_ys = _part(eqn, rest, length - count, [*consts, *carry, *late], num_carry)
    low_ys, high_ys = (late_ys, early_ys) if reverse else (early_ys, late_ys)
    joined_eqns, joined = traced_eqns(
        lambda *ys: [
            lax.concatenate(pair, 0) for pair in zip(ys[: len(low_ys)], ys[len(low_ys) :], strict=True)
        ],
        [*low_ys, *high_ys],
        "loop results",
    )
    eqns = [*low_eqns, *high_eqns, one, two, *joined_eqns]
    rename = {
        made: out
        for made, out in zip([*last, *joined], eqn.outvars, strict=True)
        if not isinstance(out, DropVar)
    }
    return [e.replace(outvars=[rename.get(v, v) for v in e.outvars]) for e in eqns]


def _slices(xs: Sequence[Any], start: int, stop: int) -> tuple[list[JaxprEqn], list[Any]]:
    return traced_eqns(lambda *vs: [lax.slice_in_dim(v, start, stop) for v in vs], xs, "loop inputs")


def _part(
    eqn: JaxprEqn, body: Jaxpr, length: int, invars: list[Any], num_carry: int
) -> tuple[JaxprEqn, list[Any], list[Any]]:
    """One of the two loops, with fresh variables for what it carries out and stacks."""
    avals = [v.aval for v in eqn.outvars]
    carry = [new_var(a) for a in avals[:num_carry]]
    ys = [new_var(a.update(shape=(length, *a.shape[1:]))) for a in avals[num_carry:]]
    params = scan_params(eqn.params, body, *scan_sizes(eqn.params)) | {"length": length}
    unroll = params.get("unroll", 1)
    if not isinstance(unroll, bool) and unroll > length:
        params["unroll"] = length
    return eqn.replace(invars=invars, outvars=[*carry, *ys], params=params), carry, ys


def blocks(decisions: Decisions) -> Iterator[Block]:
    """All checkpoints of single stages, those inside loops and nested ones included."""
    for block in decisions:
        if isinstance(block, Block):
            yield block
        elif isinstance(block, NestedBlock):
            yield from blocks(block.inner)
        else:
            yield from blocks(block.body)
            yield from blocks(block.rest)


def nested_blocks(decisions: Decisions) -> Iterator[NestedBlock]:
    """All checkpoints with checkpoints inside. Loops have none."""
    for block in decisions:
        if isinstance(block, NestedBlock):
            yield block
            yield from nested_blocks(block.inner)


@dataclass(frozen=True, slots=True)
class LoopFences:
    """The kinds of fences in the body of a loop: where it is one stage, and where it is several, which wait for each other.

    A loop's backward pass is a computation of its own, which some compilers keep apart without a fence.
    """

    one: str = "none"
    several: str = "dependence"


def decide(program: Program, state: State, fence: str, in_loops: LoopFences) -> Decisions:
    """The decisions of a state of a program's path. `fence` is the kind of fence of the stages outside loops."""
    if state.reversal:
        return _nested(tuple(program.stages()), state.reversal, fence)
    return _Decider(state, in_loops).run(program, fence)


def _nested(stages: Sequence[Stage], reversal: Reversal, fence: str) -> tuple[Block | NestedBlock, ...]:
    """What a reversal of the stages says, as blocks."""
    result: list[Block | NestedBlock] = []
    for item in reversal:
        if isinstance(item, Again):
            start, stop = stages[item.start].span.start, stages[item.stop - 1].span.stop
            result.append(NestedBlock(start, stop, fence, _nested(stages, item.inner, fence)))
        elif (policy := stages[item.link].options[item.option].policy) is not None:
            span = stages[item.link].span
            result.append(Block(span.start, span.stop, replace(policy, fence=fence)))
    return tuple(result)


class _Decider:
    """Walks a program with the choices of a state, in the order of `Program.stages()`."""

    def __init__(self, state: State, in_loops: LoopFences) -> None:
        self.state = state
        self.in_loops = in_loops
        self.position = 0

    def run(self, program: Program, fence: str) -> Decisions:
        result: list[Block | LoopBlock] = []
        for node in program.nodes:
            if isinstance(node, Stage):
                policy = node.options[self.state.choice[self.position]].policy
                self.position += 1
                if policy is not None:
                    result.append(Block(node.span.start, node.span.stop, replace(policy, fence=fence)))
            else:
                result += self._loop(node)
        return tuple(result)

    def _loop(self, node: Loop) -> list[LoopBlock]:
        several = sum(isinstance(n, Stage) for n in node.body.nodes) > 1
        fence = self.in_loops.several if several else self.in_loops.one
        start = self.position
        if snapshots := snapshots_of(node, self.state.halvings):
            inner = _Decider(replace(self.state, halvings=0), self.in_loops)
            inner.position = start
            body = inner.run(node.body, fence)
            self.position = inner.position
            # A step is linearized by itself: a body that is one stage need not run again for that.
            one_stage = len(node.body.nodes) == 1 and isinstance(node.body.nodes[0], Stage)
            return [LoopBlock(node.index, () if one_stage else body, snapshots=snapshots)]
        body = self.run(node.body, fence)
        split = self.state.split
        if split is None or not start <= split.stage < self.position:
            return [LoopBlock(node.index, body)] if body else []
        rest = _Decider(self.state.unsplit(), self.in_loops)
        rest.position = start
        return [LoopBlock(node.index, body, split.count, rest.run(node.body, fence))]
