"""Write a plan into a program: each stage that recomputes becomes a checkpoint with its decisions.

    jaxpr: args -> outs   becomes   jaxpr: args -> outs      with `autoremat_checkpoint` equations

Nothing is traced: equations are grouped, variables stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoremat._compat import Jaxpr, JaxprEqn, eqn_effects, new_eqn, new_jaxpr, scan_params, scan_sizes
from autoremat.plan._segments import Span, subjaxpr
from autoremat.plan._stages import Program, Stage, loop_body
from autoremat.transform._jaxpr import is_var
from autoremat.transform._planned import PlannedPolicy
from autoremat.transform._primitives import checkpoint_p


@dataclass(frozen=True, slots=True)
class Block:
    """A decision: equations `start` to `stop` are one checkpoint with this policy."""

    start: int
    stop: int
    policy: PlannedPolicy


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """Decisions inside the body of the `scan` at equation `index`."""

    index: int
    body: tuple[Block | LoopBlock, ...]


Decisions = tuple[Block | LoopBlock, ...]


def rewrite(jaxpr: Jaxpr, decisions: Decisions, *, in_loop: bool = False) -> Jaxpr:
    """The program with the decisions written in. `jaxpr` has its calls inlined, as when the plan was made.

    Inside a loop no barrier is needed: the forward and the backward loop are two computations that no compiler merges.
    """
    eqns: list[JaxprEqn] = []
    position = 0
    reads = _Reads(jaxpr)
    for block in decisions:
        start = block.start if isinstance(block, Block) else block.index
        eqns += jaxpr.eqns[position:start]
        if isinstance(block, Block):
            eqns.append(_checkpoint(jaxpr, block, reads.after(block.stop), guard=not in_loop))
            position = block.stop
        else:
            eqns.append(_loop(jaxpr.eqns[start], block))
            position = start + 1
    eqns += jaxpr.eqns[position:]
    return new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


class _Reads:
    """What is read at or after a position. Positions are asked for in rising order."""

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


def _checkpoint(jaxpr: Jaxpr, block: Block, later: Any, *, guard: bool) -> JaxprEqn:
    part = subjaxpr(jaxpr, Span(block.start, block.stop), later)
    inputs = set(jaxpr.invars)
    policy = replace(block.policy, borders=tuple(i for i, v in enumerate(part.invars) if v not in inputs))
    params = dict(jaxpr=part, policy=policy, prevent_cse=guard, differentiated=False)
    source = jaxpr.eqns[block.start]
    return new_eqn(
        part.invars,
        part.outvars,
        checkpoint_p,
        params,
        eqn_effects(part, part.invars),
        source.source_info,
        source.ctx,
    )


def _loop(eqn: JaxprEqn, block: LoopBlock) -> JaxprEqn:
    body = rewrite(loop_body(eqn), block.body, in_loop=True)
    return eqn.replace(params=scan_params(eqn.params, body, *scan_sizes(eqn.params)))


def blocks(decisions: Decisions) -> Iterator[Block]:
    """All checkpoints, those inside loops included."""
    for block in decisions:
        if isinstance(block, Block):
            yield block
        else:
            yield from blocks(block.body)


def decide(program: Program, choice: Sequence[int], fence: str) -> Decisions:
    """The decisions of a program for a choice of options, in the order of `Program.stages()`.

    `fence` is the kind of fence of the stages outside loops.
    """
    return _decide(program, iter(choice), fence)


def _decide(program: Program, choice: Iterator[int], fence: str) -> Decisions:
    result: list[Block | LoopBlock] = []
    for node in program.nodes:
        if isinstance(node, Stage):
            policy = node.options[next(choice)].policy
            if policy is not None:
                result.append(Block(node.span.start, node.span.stop, replace(policy, fence=fence)))
        else:
            # A loop's backward pass is a computation of its own; only stages inside one iteration wait for each other.
            several = sum(isinstance(n, Stage) for n in node.body.nodes) > 1
            body = _decide(node.body, choice, "dependence" if several else "none")
            if body:
                result.append(LoopBlock(node.index, body))
    return tuple(result)
