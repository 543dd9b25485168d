"""From the options of single stages to one path of plans for the whole program.

The path starts where nothing is recomputed that has a price and ends where everything is. Each step moves one stage one
option down. The edges of all hulls are taken in order of their price, equal ones in program order (earlier layers
recompute first: what later layers keep is needed soonest), so the plans after whole edges are the vertices of the program's own
hull, and those between are splices along program order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from autoremat.plan._stages import Option, Program, Stage


@dataclass(frozen=True, slots=True)
class State:
    """One plan: for each stage the index of its option; totals over all executions."""

    index: int
    choice: tuple[int, ...]
    nbytes: int
    cost: int
    flops: int


@dataclass(frozen=True, slots=True)
class Path:
    """All states, by falling bytes and rising cost. `edges` are the indices after whole hull edges."""

    program: Program
    states: tuple[State, ...]
    edges: tuple[int, ...]


def build_path(program: Program) -> Path:
    """The path of a program. See the module's docstring."""
    stages = tuple(program.stages())
    moves = sorted(
        (edge for i, stage in enumerate(stages) for edge in _edges(i, stage)),
        key=lambda edge: (edge.price, edge.stage),
    )
    choice = [0] * len(stages)
    states = [_state(0, stages, choice)]
    edges = [0]
    for move in moves:
        for option in range(move.first + 1, move.last + 1):
            choice[move.stage] = option
            states.append(_step(states[-1], stages, move.stage, choice))
        edges.append(len(states) - 1)
    return Path(program, tuple(states), tuple(edges))


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
    for a, b in zip(vertices, vertices[1:], strict=False):
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
