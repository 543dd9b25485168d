"""From the options of single stages to one path of plans for the whole program.

The path starts where nothing is recomputed that had a price when the stages were solved, and ends where everything is. Each step moves one stage one
option down. The edges of all hulls are taken in order of their price, equal ones in program order (earlier layers
recompute first: what later layers keep is needed soonest), so the plans after whole edges are the vertices of the program's own
hull, and those between are splices along program order.

Where everything is recomputed, a loop still keeps its carry at every iteration. After that come states in which loops keep
snapshots of it, half as many from one state to the next, and advance from them by binomial schedules. And a program without loops
still keeps all that crosses between two stages: after that come states with nested checkpoints (`_nested.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autoremat.plan._nested import nestings
from autoremat.plan._stages import Loop, Option, Program, Stage, movable_bytes
from autoremat.solve import Reversal, forward_steps

SPLITS = 3
"""A large step of a stage inside a loop is taken in so many parts, some of the iterations at a time. More are of no use: of six
layers, splits after an odd number need more memory on CPU than both neighbours, whose buffers serve both loops."""

LARGE = 0.03
"""A step is large if it moves this share of all bytes that the path moves."""


@dataclass(frozen=True, slots=True)
class Split:
    """A step that only the first `count` iterations of the loop of a stage have taken; the others keep option `before`."""

    stage: int
    before: int
    count: int


@dataclass(frozen=True, slots=True)
class State:
    """One plan: for each stage the index of its option; totals over all executions."""

    index: int
    choice: tuple[int, ...]
    nbytes: int
    cost: int
    flops: int
    split: Split | None = None
    halvings: int = 0
    """If not 0, each loop outside other loops keeps snapshots of its carry at `length / 2**halvings` iterations."""
    reversal: Reversal = ()
    """If not empty, what each stage keeps, in place of `choice`, and which stages run again together."""

    def unsplit(self) -> State:
        """The state before the step that is taken in part."""
        if self.split is None:
            return self
        choice = list(self.choice)
        choice[self.split.stage] = self.split.before
        return replace(self, choice=tuple(choice), split=None)


@dataclass(frozen=True, slots=True)
class Path:
    """All states, by falling bytes and rising cost. `edges` are the indices after whole hull edges."""

    program: Program
    states: tuple[State, ...]
    edges: tuple[int, ...]

    @property
    def flat(self) -> int:
        """How many states, the first ones, have no nested checkpoints."""
        return sum(not s.reversal for s in self.states)


def build_path(program: Program) -> Path:
    """The path of a program. See the module's docstring."""
    stages = tuple(program.stages())
    moves = sorted(
        (edge for i, stage in enumerate(stages) for edge in _edges(i, stage)),
        key=lambda edge: (edge.price, edge.stage),
    )
    loops = set(_top_level_loops(program))
    moved = movable_bytes(stages)
    choice = [0] * len(stages)
    whole = _state(0, stages, choice)
    states = [whole]
    edges = [0]
    for move in moves:
        for option in range(move.first + 1, move.last + 1):
            before = choice[move.stage]
            choice[move.stage] = option
            after = _step(whole, stages, move.stage, choice)
            if move.stage in loops and whole.nbytes - after.nbytes > LARGE * moved:
                states += _parts(whole, after, move.stage, before, stages[move.stage].trips, len(states))
            whole = replace(after, index=len(states))
            states.append(whole)
        edges.append(len(states) - 1)
    states += _with_snapshots(program, whole)
    states += _with_nesting(program, whole)
    return Path(program, tuple(states), tuple(edges))


def _top_level_loops(program: Program) -> Iterator[int]:
    """The stages, by number, inside loops that stand in no other loop: those loops can be split in two."""
    number = 0
    for node in program.nodes:
        inside = 1 if isinstance(node, Stage) else sum(1 for _ in node.body.stages())
        if not isinstance(node, Stage) and all(isinstance(n, Stage) for n in node.body.nodes):
            yield from range(number, number + inside)
        number += inside


def _parts(before: State, after: State, stage: int, option: int, trips: int, index: int) -> list[State]:
    """States in which some of the iterations of a loop have taken a step."""
    counts = sorted({trips * k // SPLITS for k in range(1, SPLITS)} - {0})
    return [
        State(
            index + i,
            after.choice,
            before.nbytes + (after.nbytes - before.nbytes) * count // trips,
            before.cost + (after.cost - before.cost) * count // trips,
            before.flops + (after.flops - before.flops) * count // trips,
            Split(stage, option, count),
        )
        for i, count in enumerate(counts)
    ]


def snapshots_of(loop: Loop, halvings: int) -> int:
    """How many snapshots a loop keeps; 0 if it keeps its carry at every iteration."""
    number = loop.length >> halvings
    return max(number, 1) if halvings and loop.carry_bytes and loop.length > 2 else 0


def _with_snapshots(program: Program, last: State) -> list[State]:
    """The states after the one in which everything is recomputed."""
    loops = [n for n in program.nodes if isinstance(n, Loop) and snapshots_of(n, 1) and any(n.body.stages())]
    states: list[State] = []
    for halvings in range(1, max((n.length for n in loops), default=0).bit_length() - 1):
        nbytes, cost, flops = last.nbytes, last.cost, last.flops
        for loop in loops:
            snapshots = snapshots_of(loop, halvings)
            again = forward_steps(loop.length, snapshots) - (loop.length - 1)
            nbytes += (snapshots + 1) * loop.carry_bytes
            nbytes -= sum(s.options[-1].nbytes * s.trips for s in loop.body.stages())
            cost += again * loop.step_cost
            flops += again * loop.step_flops
        if nbytes < (states[-1] if states else last).nbytes:
            index = last.index + 1 + len(states)
            states.append(State(index, last.choice, nbytes, cost, flops, halvings=halvings))
    return states


def _with_nesting(program: Program, last: State) -> list[State]:
    """The same for a program without loops."""
    return [
        State(last.index + 1 + i, last.choice, last.nbytes - n.saved, n.cost, n.flops, reversal=n.reversal)
        for i, n in enumerate(nestings(program))
    ]


@dataclass(frozen=True, slots=True)
class _Edge:
    stage: int
    first: int
    last: int
    price: Fraction


def _edges(index: int, stage: Stage) -> list[_Edge]:
    """The edges of a stage's hull, from vertex to vertex over the options between them."""
    vertices = [i for i, o in enumerate(stage.options) if o.vertex]
    result = []
    for a, b in itertools.pairwise(vertices):
        high, low = stage.options[a], stage.options[b]
        result.append(_Edge(index, a, b, Fraction(low.cost - high.cost, high.nbytes - low.nbytes)))
    return result


def _state(index: int, stages: Sequence[Stage], choice: Sequence[int]) -> State:
    options = [(s.options[c], s.trips) for s, c in zip(stages, choice, strict=True)]
    return State(
        index,
        tuple(choice),
        sum(o.nbytes * t for o, t in options),
        sum(o.cost * t for o, t in options),
        sum(o.flops * t for o, t in options),
    )


def _step(before: State, stages: Sequence[Stage], moved: int, choice: Sequence[int]) -> State:
    stage = stages[moved]
    old: Option = stage.options[before.choice[moved]]
    new: Option = stage.options[choice[moved]]
    return State(
        before.index + 1,
        tuple(choice),
        before.nbytes + (new.nbytes - old.nbytes) * stage.trips,
        before.cost + (new.cost - old.cost) * stage.trips,
        before.flops + (new.flops - old.flops) * stage.trips,
    )
