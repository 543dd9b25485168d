"""Schedules under a memory budget: what to run again, and where.

**Problem.** Ops in a fixed input order, each with bytes and a time. Find a schedule of least time whose peak, as
`simulate` sees it, is within the budget. First executions keep the input order; an op may run again any number of times,
anywhere.

**Method.** Parts, each in its own file, none of which judges itself:

- `_repair`: a first schedule by greedy repair;
- `_anneal`: many small moves (simulated annealing);
- `_exchange`: large neighbourhood search with exact moves (CP-SAT);
- `_stages`: a lower bound that no schedule is below (CP-SAT);
- `_floor`: what peak no schedule is below;
- `_states`: exact search over sets of values, for small graphs.

**Optimality.** A result is called optimal only if its time meets the lower bound. Schedules of the first three
run an op at most once between two first executions; the bound holds for all schedules.

**Reproducibility.** Seeds are fixed. What a time limit cuts short depends on the machine; `effort="fast"` counts
moves instead: its schedule is always the same where greedy repair succeeds and the limit is not reached.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from autoremat._errors import AutorematError, InfeasibleBudgetError
from autoremat.solve._anneal import Annealer
from autoremat.solve._exchange import Neighbourhoods
from autoremat.solve._floor import Floor, floor
from autoremat.solve._repair import Searcher
from autoremat.solve._reruns import Rerun
from autoremat.solve._schedule import OpGraph, Timeline, simulate
from autoremat.solve._stages import Bounder
from autoremat.solve._states import search

Effort = Literal["fast", "balanced", "optimal"]

_MOVES = 20_000
"""Of the annealing with `effort=\"fast\"`."""
_LARGE = 400
"""From so many ops on, default limits are those for large graphs."""
_DEFAULT_S = {"fast": (2.0, 20.0), "balanced": (10.0, 60.0), "optimal": (600.0, 1800.0)}
_STATES = 300_000
_SMALL = 24
"""Ops up to which the exact search is tried."""


class ScheduleStatus(Enum):
    """How the search ended, in words for a user."""

    OPTIMAL = "optimal: no schedule in this order takes less time"
    TIME_LIMIT = "stopped by its time limit: the best schedule found, and its gap to the lower bound"
    FINISHED = "finished its moves: the best schedule found, and its gap to the lower bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """A schedule under a budget, judged by `simulate`.

    `lower_bound` is a time that no schedule under the budget is below, in the units of the costs; `gap` how
    far above it this one may be, relative to it. `seconds` are those of the search.
    """

    schedule: tuple[int, ...]
    timeline: Timeline
    budget_bytes: int
    lower_bound: int
    status: ScheduleStatus
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The peak, never above the budget."""
        return self.timeline.peak_bytes

    @property
    def cost(self) -> int:
        """Time of all executions."""
        return self.timeline.cost

    @property
    def gap(self) -> float:
        """(time - lower bound) / lower bound."""
        return (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0


class NoScheduleFoundError(AutorematError):
    """The search ended without a schedule under the budget; that is no proof that there is none.

    `lowest_bytes` is the lowest peak reached, `floor_bytes` what no schedule can be below.
    """

    def __init__(self, message: str, *, lowest_bytes: int = 0, floor_bytes: int = 0) -> None:
        super().__init__(message)
        self.lowest_bytes = lowest_bytes
        self.floor_bytes = floor_bytes


def schedule(
    graph: OpGraph,
    budget_bytes: int,
    *,
    effort: Effort = "balanced",
    time_limit_s: float | None = None,
    workers: int = 1,
) -> ScheduleResult:
    """Return a schedule of little time whose peak is within `budget_bytes`.

    **Arguments:**

    - `effort`: `"fast"`, greedy repair and local search, 2 s for up to 400 ops, 20 s above; `"balanced"`, also large neighbourhood search and a good
        bound, 10 s for up to 400 ops, 60 s above; `"optimal"`, until the bound is met or the time is over.
    - `time_limit_s`: seconds, in place of the limit that goes with the effort.
    - `workers`: threads of CP-SAT.

    Raises `InfeasibleBudgetError` if it is proven that no schedule has such a peak, and
    `NoScheduleFoundError` if no schedule was found in time.
    """
    if effort not in get_args(Effort):
        raise ValueError(f"effort is one of {', '.join(get_args(Effort))}; got {effort!r}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be positive; got {time_limit_s!r}")
    begin = time.monotonic()
    least = floor(graph)
    if budget_bytes < least.nbytes:
        raise _infeasible(graph, budget_bytes, least, "what must be alive together is more")
    limit = _DEFAULT_S[effort][len(graph) > _LARGE] if time_limit_s is None else time_limit_s
    run = _Run(graph, budget_bytes, least, begin=begin, limit=limit, workers=workers)
    run.work(effort)
    return run.result()


def _infeasible(graph: OpGraph, budget_bytes: int, least: Floor, reason: str) -> InfeasibleBudgetError:
    name = graph.name(least.op)
    return InfeasibleBudgetError(
        f"no schedule has a peak within {budget_bytes:,} bytes: {reason}. The floor is {least.nbytes:,} bytes, set by op "
        f"{name}, whose inputs and output alone are {graph.working_set(least.op):,}",
        floor_bytes=least.nbytes,
        op=name,
    )


class _Run:
    """One call of `schedule`: the best schedule and the best bound so far, and the clock."""

    def __init__(
        self, graph: OpGraph, budget_bytes: int, least: Floor, *, begin: float, limit: float, workers: int
    ) -> None:
        self.graph = graph
        self.floor = least
        self.budget = budget_bytes
        self.begin = begin
        self.limit = limit
        self.searcher = Searcher(graph, budget_bytes)
        self.neighbourhoods = Neighbourhoods(self.searcher, workers=workers)
        self.annealer = Annealer(self.searcher.state)
        self.bounder = Bounder(graph, budget_bytes)
        # Whether greedy repair ended without a schedule that fits though it had time.
        self.stuck = True
        self.small: tuple[int, ...] | None = None

    def at(self, share: float) -> float:
        """The clock's time when a share of the limit is over."""
        return self.begin + share * self.limit

    @property
    def bound(self) -> int:
        """A time that no schedule is below."""
        return self.graph.base_cost + self.bounder.best

    @property
    def proven(self) -> bool:
        """Whether the schedule is known to be the best."""
        state = self.searcher.state
        return self.small is not None or (state.fits() and state.cost <= self.bound)

    def work(self, effort: Effort) -> None:
        """All that belongs to an effort, in shares of the limit."""
        self._construct(self.at(0.3))
        if effort == "fast":
            self._exchange(self.at(1), fit=True)
            self._anneal(self.at(0.7), moves=_MOVES)
            self._raise_bound(self.at(1))
            return
        if effort == "optimal" and len(self.graph) <= _SMALL:
            self._search()
        self._exchange(self._share(0.85), fit=True)
        # What is easy is proven here.
        self._raise_bound(self._share(0.1))
        self._exchange(self._share(0.05))
        self._anneal(self._share(0.65))
        self._exchange(self.at(0.9), fit=True)
        for share in (1.0,) if effort == "balanced" else (0.2, 0.4, 1.0):
            self._exchange(self._share(0.25 * share))
            self._raise_bound(self._share(share))
        # Only if the bound cannot be raised any more.
        self._exchange(self.at(1))

    def _share(self, share: float) -> float:
        """The clock's time when a share of what is left of the limit is over."""
        now = time.monotonic()
        return now + share * max(0.0, self.at(1) - now)

    def result(self) -> ScheduleResult:
        """The best schedule, judged; an error if there is none."""
        state = self.searcher.state
        best = state.schedule() if self.small is None else self.small
        seen = simulate(self.graph, best)
        if seen.peak_bytes > self.budget:
            raise NoScheduleFoundError(
                f"no schedule under {self.budget:,} bytes was found in {self.limit:g} s; the lowest peak reached is "
                f"{seen.peak_bytes:,} bytes. That is no proof that there is none: the floor is {self.floor.nbytes:,} "
                f"bytes, set by op {self.graph.name(self.floor.op)}. More time may help",
                lowest_bytes=seen.peak_bytes,
                floor_bytes=self.floor.nbytes,
            )
        low = seen.cost if self.small is not None else self.bound
        late = time.monotonic() >= self.at(0.98)
        ended = ScheduleStatus.TIME_LIMIT if late else ScheduleStatus.FINISHED
        return ScheduleResult(
            schedule=best,
            timeline=seen,
            budget_bytes=self.budget,
            lower_bound=low,
            status=ScheduleStatus.OPTIMAL if low == seen.cost else ended,
            seconds=time.monotonic() - self.begin,
        )

    def _construct(self, deadline: float) -> None:
        """A first schedule: the best of a quick and a patient repair, or the one that is least over the budget."""
        state = self.searcher.state
        found: list[tuple[int, int, set[Rerun]]] = []
        for patience in (0.0, 0.98):
            state.replace(set())
            if self.searcher.repair(patience=patience, deadline=deadline):
                self.searcher.prune()
                self.stuck = False
                # What fits will be improved otherwise: a second one is worth little time.
                deadline = min(deadline, self.at(0.05))
            elif time.monotonic() >= deadline:
                self.stuck = False
            found.append((int(state.excess().sum()), state.cost, state.reruns()))
        state.replace(min(found, key=lambda f: f[:2])[2])

    def _anneal(self, deadline: float, *, moves: int = 0) -> None:
        if self.proven:
            return
        # Where greedy repair gets stuck, annealing would too, without a schedule that fits.
        self.annealer.run(deadline=deadline, enough=self.bound, fresh=not self.stuck, moves=moves)
        if self.searcher.state.fits():
            self.searcher.prune()

    def _exchange(self, deadline: float, *, fit: bool = False) -> None:
        if not self.proven:
            self.neighbourhoods.run(deadline=deadline, enough=self.bound, fit=fit)

    def _raise_bound(self, deadline: float) -> None:
        if not self.proven:
            state = self.searcher.state
            self.bounder.run(deadline=deadline, known=state if state.fits() else None)

    def _search(self) -> None:
        """The exact search, unless the schedule is proven or the graph has too many states."""
        state = self.searcher.state
        if self.proven:
            return
        below = state.cost - self.graph.base_cost if state.fits() else None
        try:
            found = search(self.graph, self.budget, limit=_STATES, below=below)
        except TimeoutError:
            return
        if found is not None:
            self.small = found
        elif state.fits():
            self.small = state.schedule()
        else:
            reason = "all schedules with first executions in input order were searched"
            raise _infeasible(self.graph, self.budget, self.floor, reason)
