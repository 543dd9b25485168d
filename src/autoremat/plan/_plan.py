"""`plan`, `Plan`, `frontier`, `Frontier`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoremat._errors import BudgetError, CompileError, InfeasibleBudgetError, PlanMismatchError
from autoremat.cost import Costs
from autoremat.graph import Graph
from autoremat.measure import MemoryUse, default_compiler_options, environment
from autoremat.plan._bound import Relaxation, room
from autoremat.plan._candidates import Candidates, Measured, Progress
from autoremat.plan._floor import name_floor
from autoremat.plan._processes import agree
from autoremat.plan._program import LossProgram, planned_function
from autoremat.plan._rewrite import Decisions, LoopBlock, blocks, nested_blocks
from autoremat.plan._search import MAX_COMPILES, Search
from autoremat.plan._trace import argnum_tuple, check_differentiable, trace
from autoremat.target import Target, resolve
from autoremat.transform._planned import Budget, parse_budget

BASELINE = (0, -1)


class Silent:
    """Progress that says nothing."""

    def compiling(self, what: str) -> None:
        """Nothing."""

    def compiled(self, what: str, use: MemoryUse) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to keep and what to compute again so that a function's gradient meets a memory budget.

    - `budget_bytes`, `peak_bytes`: the budget, and the compiled peak of `value_and_grad` under this plan, on one device;
        arguments and outputs included.
    - `predicted_bytes`: the peak that was predicted before the plan was compiled (see `autoremat.predict`).
    - `unplanned_bytes`: the compiled peak without any recomputation; `None` where that program does not compile.
    - `recompute_flops`: FLOPs that run a second time in one step; `forward_flops` of the forward pass, to compare with.
    - `recompute_seconds`: time that these take by the cost model; `step_seconds` of a step that recomputes nothing.
    - `bound_seconds`: no program within the budget recomputes less, by the same model, whatever its compiler fuses (see `gap`).
    - `seconds`: planning time without compilations; `compile_seconds` of those; `compiles` how many they were.
    - `decisions`: which stages are checkpoints, and which values each keeps.
    - `compiler_options`: what the peak was verified under. Pass them to `jax.jit`: what is verified must be what runs.
    - `arguments`, `operations`: types and primitives of the function, to say how another one differs.
    - `environment`: the versions and flags under which the peak was verified.
    - `notes`: what a user should know, in sentences.
    """

    function: str
    fingerprint: str
    argnums: tuple[int, ...]
    has_aux: bool
    target: str
    compiler_options: dict[str, Any]
    budget_bytes: int
    peak_bytes: int
    predicted_bytes: int
    unplanned_bytes: int | None
    memory: MemoryUse
    kept_bytes: int
    recompute_flops: int
    forward_flops: int
    recompute_seconds: float
    bound_seconds: float
    step_seconds: float
    seconds: float
    compile_seconds: float
    compiles: int
    grouping: str
    decisions: Decisions
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = field(default=(), repr=False)
    operations: tuple[str, ...] = field(default=(), repr=False)
    environment: dict[str, str] = field(default_factory=dict[str, str], repr=False)

    def apply(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fun` with this plan: same arguments, same values, same gradients.

        The function must have the operations, shapes and wiring of the one that the plan was made for; the numbers in it may
        differ. Raises `PlanMismatchError`, when it is called, if `fun` is not the function that the plan was made for, or the
        arguments have other shapes.
        """

        @functools.wraps(fun)
        def planned(*args: Any, **kwargs: Any) -> Any:
            traced = trace(fun, args, (), kwargs)
            if traced.fingerprint != self.fingerprint:
                raise PlanMismatchError(_mismatch(self, traced.graph, traced.name))
            return planned_function(traced, self.decisions)(*args, **kwargs)

        return planned

    def save(self, path: Any) -> None:
        """Write the plan to a file, as JSON."""
        from autoremat.plan._files import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: Any) -> Plan:
        """Read a plan from a file.

        Raises `PlanFileError` if the file is damaged or was written by another version.
        """
        from autoremat.plan._files import load_plan

        return load_plan(path)

    @property
    def report(self) -> str:
        """The plan in words and tables, as the command line prints it."""
        from autoremat.report import plan_text

        return plan_text(summarize(self))

    @property
    def gap(self) -> float:
        """How far the plan can be from the best one: (recomputation - its lower bound) / (a step without recomputation).

        A share of the step's time by the cost model; 0 where nothing is recomputed. The bound counts operations that
        compilers do not fuse, and what is alive between the forward and the backward pass: a plan of this gap may be the best.
        """
        return (self.recompute_seconds - self.bound_seconds) / self.step_seconds if self.step_seconds else 0.0

    @property
    def checkpoints(self) -> int:
        """How many stages recompute."""
        return sum(1 for _ in blocks(self.decisions))

    @property
    def nested(self) -> int:
        """How many runs of stages keep nothing but what they read, and are checkpoints with checkpoints inside."""
        return sum(1 for _ in nested_blocks(self.decisions))

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Of each loop that keeps its carry at a few iterations only, at how many (see `autoremat.scan`)."""
        return tuple(d.snapshots for d in self.decisions if isinstance(d, LoopBlock) and d.snapshots)


def summarize(plan: Plan) -> dict[str, Any]:
    """The figures of a plan as plain data."""
    return {
        "function": plan.function,
        "target": plan.target,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "unplanned_bytes": plan.unplanned_bytes,
        "argument_bytes": plan.memory.argument_bytes,
        "output_bytes": plan.memory.output_bytes,
        "temp_bytes": plan.memory.temp_bytes,
        "alias_bytes": plan.memory.alias_bytes,
        "kept_bytes": plan.kept_bytes,
        "recompute_flops": plan.recompute_flops,
        "forward_flops": plan.forward_flops,
        "recompute_seconds": plan.recompute_seconds,
        "bound_seconds": plan.bound_seconds,
        "step_seconds": plan.step_seconds,
        "gap": plan.gap,
        "planning_seconds": plan.seconds,
        "compile_seconds": plan.compile_seconds,
        "compiles": plan.compiles,
        "grouping": plan.grouping,
        "checkpoints": plan.checkpoints,
        "nested": plan.nested,
        "snapshots": list(plan.snapshots),
        "compiler_options": dict(plan.compiler_options),
        "notes": list(plan.notes),
    }


def argument_types(graph: Graph) -> tuple[str, ...]:
    """The dtype and shape of each argument array of a graph."""
    return tuple(f"{graph.values[i].dtype}{list(graph.values[i].shape)}" for i in graph.inputs)


def _mismatch(plan: Plan, graph: Graph, name: str) -> str:
    types, ops = argument_types(graph), tuple(op.primitive for op in graph.ops)
    start = (
        f"this plan was made for `{plan.function}` with {len(plan.operations)} operations, and was applied to `{name}` "
        f"with {len(ops)}. "
    )
    if plan.arguments != types:
        i, then, now = _first_difference(plan.arguments, types)
        same_number = len(plan.arguments) == len(types)
        counts = (
            f" of {len(types)}" if same_number else f"; planned for {len(plan.arguments)}, got {len(types)}"
        )
        detail = f"The arguments differ, first in array {i}{counts}: planned for {then}, got {now}. "
    elif plan.operations[: len(ops)] == ops[: len(plan.operations)]:
        detail = "The first operations are the same; their shapes, parameters or number differ. "
    else:
        i, then, now = _first_difference(plan.operations, ops)
        detail = f"They differ first at operation {i}: planned for `{then}`, got `{now}`. "
    return start + detail + "Cheapest fix: call autoremat.plan again for this function and these shapes."


def _first_difference(planned: Sequence[str], got: Sequence[str]) -> tuple[int, str, str]:
    """Where two sequences differ first, and what stands there in each."""
    pairs = itertools.zip_longest(planned, got, fillvalue="nothing")
    return next((i, a, b) for i, (a, b) in enumerate(pairs) if a != b)


def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | Target | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    effort: str = "balanced",
    costs: Costs = None,
    progress: Progress | None = None,
) -> Plan:
    """Find what to keep and what to recompute so that the gradient of `fun` fits into `budget`.

    The plan found recomputes least among the candidates that the compiler was asked about; its peak is read from the
    program compiled for the target.

    **Arguments:**

    - `fun`, `args`: the function to differentiate, and example arguments: arrays, or `jax.ShapeDtypeStruct`s.
    - `budget`: bytes of compiled peak on one device for `jax.value_and_grad(fun)`, arguments and outputs included: an int,
        a string such as `"12GiB"`, or a share such as `"50%"` of the peak without any recomputation.
    - `argnums`, `has_aux`: as in `jax.grad`.
    - `target`: where it will run, such as `"tpu:v5e"` or `"gpu:h100"` (see `autoremat.targets`); left out, this machine's backend. A
        device that is elsewhere needs its compiler here, nothing else.
    - `compiler_options`: as in `jax.jit`. Left out: on CPU the memory-minimizing scheduler, elsewhere none. They are
        stored in the plan.
    - `effort`: `"fast"` tries one way to cut the program into stages and compiles few plans, `"balanced"` all promising ways;
        `"optimal"` compiles every plan that may fit and recompute less than the best one known.
    - `costs`: what recomputation is priced by: measured times of operations (`autoremat.calibrate`), or `"flops"`, which counts
        arithmetic alone; left out, the published rates of the target.
    - `progress`: told of each compilation. Ctrl-C ends the search with the best plan so far, if there is one.

    **Returns:** a `Plan`. Equal calls return equal plans; a smaller budget never a higher peak.

    **Raises:** `BudgetError` if the budget cannot be read; `InfeasibleBudgetError` if nothing fits, with the lowest peak
    reached and what sets it; `DifferentiationError` if there is nothing to differentiate or the result is no scalar;
    `CompileError`; `TargetError`; `CostTableError` if `costs` are no prices, or of another device or program; `PlanMismatchError` if several processes (`jax.distributed`) find different plans.
    """
    candidates = prepare(fun, args, argnums, has_aux, target, compiler_options, progress, costs)
    wanted = parse_budget(budget, "autoremat.plan")
    check_effort(effort, "autoremat.plan")
    return best_plan(candidates, wanted, effort, "autoremat.plan")


def check_effort(effort: str, what: str) -> None:
    """Raise `ValueError` for an effort that is none."""
    if effort not in MAX_COMPILES:
        raise ValueError(
            f'`{what}(effort=...)` needs "fast", "balanced" or "optimal", got {effort!r}. Cheapest fix: leave it out.'
        )


def best_plan(candidates: Candidates, budget: Budget, effort: str, what: str) -> Plan:
    """The plan with the least recomputation of those compiled that meet the budget. `what` is asked for it, for messages."""
    before = set(candidates.record.measured)
    baseline = _baseline(candidates, budget, what)
    limit = budget.resolve(baseline.use.peak_bytes if baseline else 0)
    _check_memory(candidates.target, limit, what)
    search = Search(candidates, limit, effort)
    chosen = search.run()
    if chosen is None:
        agree(candidates.traced.fingerprint, None, what)
        raise _infeasible(candidates, search, limit, what)
    found = _to_plan(candidates, chosen, baseline, limit, before, search)
    agree(found.fingerprint, found.decisions, what)
    return found


def _check_memory(target: Target, limit: int, what: str) -> None:
    """Raise `BudgetError` where a budget is beyond what a device that is elsewhere has; of this machine the table knows no memory."""
    memory = target.device.memory_bytes
    if not target.attached and limit > memory:
        raise BudgetError(
            f"`{what}`: got a budget of {limit:,} bytes, but a {target.device.name} has {memory:,}. Cheapest fix: a budget of at "
            "most that, or a larger device."
        )


def _baseline(candidates: Candidates, budget: Budget, what: str) -> Measured | None:
    """The function as it is, compiled; `None` if the compiler runs out of memory over it. A budget in bytes needs no such peak."""
    try:
        return candidates.measure(*BASELINE)
    except CompileError as error:
        if not error.out_of_memory:
            raise
        if budget.nbytes is None:
            raise CompileError(
                f"{error} `{what}(budget=...)` was asked for a share of the peak without recomputation, which this program "
                "does not have: or state the budget in bytes.",
                out_of_memory=True,
            ) from error.__cause__
        return None


def prepare(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    target: str | Target | None,
    compiler_options: Mapping[str, Any] | None,
    progress: Progress | None,
    costs: Costs = None,
) -> Candidates:
    """Trace and check the function; nothing is compiled yet."""
    where = resolve(target)
    chosen = argnum_tuple(argnums, len(args))
    start = time.perf_counter()
    traced = trace(fun, args, chosen)
    check_differentiable(traced, args, chosen, has_aux)
    options = default_compiler_options(where.platform) if compiler_options is None else dict(compiler_options)
    program = LossProgram(traced, args, chosen, isinstance(argnums, int), has_aux)
    candidates = Candidates(traced, program, where, options, progress or Silent(), costs)
    candidates.trace_seconds = time.perf_counter() - start
    return candidates


def _to_plan(
    candidates: Candidates,
    chosen: Measured,
    baseline: Measured | None,
    limit: int,
    before: set[Any],
    search: Search,
) -> Plan:
    from autoremat.cost import graph_flops

    traced, record = candidates.traced, candidates.record
    new = [m for key, m in record.measured.items() if key not in before and not m.use.cached]
    return Plan(
        function=traced.name,
        fingerprint=traced.fingerprint,
        argnums=candidates.program.argnums,
        has_aux=candidates.program.has_aux,
        target=candidates.target.name,
        compiler_options=candidates.options,
        budget_bytes=limit,
        peak_bytes=chosen.use.peak_bytes,
        predicted_bytes=candidates.predicted(chosen.variant, chosen.index),
        unplanned_bytes=baseline.use.peak_bytes if baseline else None,
        memory=replace(chosen.use, cached=False),
        kept_bytes=chosen.nbytes,
        recompute_flops=chosen.flops,
        forward_flops=graph_flops(traced.graph),
        recompute_seconds=chosen.cost / 1e12,
        bound_seconds=_bound(candidates.relaxation(), chosen, limit) / 1e12,
        step_seconds=candidates.relaxation().step_cost / 1e12,
        seconds=candidates.trace_seconds + record.seconds,
        compile_seconds=sum(m.use.seconds for m in new),
        compiles=len(new),
        grouping="as it is" if chosen.index < 0 else candidates.record.variants[chosen.variant].name,
        decisions=candidates.decisions(chosen.variant, chosen.index),
        notes=(
            *candidates.notes,
            *_notes(chosen, baseline, traced.dissolved, candidates.target),
            *_unfinished(search),
        ),
        arguments=argument_types(traced.graph),
        operations=tuple(op.primitive for op in traced.graph.ops),
        environment=environment() | {"compiler": candidates.target.compiler},
    )


def _bound(relaxation: Relaxation, chosen: Measured, limit: int) -> int | float:
    """Picoseconds of recomputation that the budget costs any program.

    A plan below its bound fits because the compiler does what the bound does not cover: then nothing is known, which is 0.
    """
    least = relaxation.least_cost(room(chosen.use, limit)) if chosen.cost else 0
    return least if least <= chosen.cost else 0


def _notes(chosen: Measured, baseline: Measured | None, dissolved: int, target: Target) -> Iterator[str]:
    if dissolved:
        yield f"The function holds {dissolved} checkpoint(s) already; the plan replaces them."
    if baseline is None:
        yield "Without recomputation the compiler itself runs out of memory, so there is no peak to compare with."
        return
    use = baseline.use
    if not use.fits:
        yield (
            f"Without recomputation the program does not fit {target.name}: its compiler refuses it, and says that it needs "
            f"{use.peak_bytes:,} bytes."
        )
    fixed = use.argument_bytes + use.output_bytes - use.alias_bytes
    if chosen.index < 0:
        yield "The function meets the budget as it is: nothing is recomputed."
    if use.temp_bytes < fixed:
        yield (
            f"Activations are not the bulk of the memory here: without recomputation temporaries take {use.temp_bytes:,} "
            f"bytes, arguments and outputs {fixed:,}. A larger batch, not a plan, is what this function has room for; "
            "recomputation cannot go below arguments and outputs."
        )


def _unfinished(search: Search) -> Iterator[str]:
    if search.interrupted:
        yield (
            f"The search was interrupted after {search.compiles} compilations: this is the best plan until then. Called again, autoremat.plan "
            "goes on from what is known."
        )
    elif search.exhausted:
        yield (
            f"The search ended after {search.compiles} compilations, with plans left that may recompute less. Cheapest fix, if the gap "
            'matters: effort="optimal", or call autoremat.plan again: it goes on from what is known.'
        )


def _infeasible(candidates: Candidates, search: Search, limit: int, what: str) -> InfeasibleBudgetError:
    lowest = search.floor()
    if lowest is None:
        return InfeasibleBudgetError(
            f"`{what}({candidates.traced.name}, budget=...)`: got {limit:,} bytes, but the compiler ran out of memory over "
            "every plan tried, that which recomputes everything included. Cheapest fix: a smaller batch."
        )
    floor = lowest.use.peak_bytes
    proof = _proof(candidates, lowest.use, limit)
    op = name_floor(candidates, candidates.decisions(lowest.variant, lowest.index)).text
    return InfeasibleBudgetError(
        f"`{what}({candidates.traced.name}, budget=...)`: got {limit:,} bytes, but the lowest compiled peak "
        f"reached is {floor:,} bytes, {proof or _tried(candidates, search)}. {op + ' ' if op else ''}Cheapest fix: a budget of at least {floor:,} "
        f"bytes, or {_SMALLER if op and not proof else 'a smaller batch'}.",
        floor_bytes=floor,
        budget_bytes=limit,
        op=op,
    )


_SMALLER = "what makes that operation smaller: a smaller batch, a fused kernel in its place, sharding"


def _tried(candidates: Candidates, search: Search) -> str:
    """How far a search came that found nothing."""
    if not search.exhausted:
        return "for any recomputation tried"
    known = len(candidates.record.measured) - 1
    more = "" if search.effort == "optimal" else ', effort="optimal"'
    return f"of {known} plan{'s' * (known != 1)} compiled, where the search ended, so this is no proof: calling again{more} tries more"


def _proof(candidates: Candidates, use: MemoryUse, limit: int) -> str:
    """Why no recomputation whatever meets the budget; empty where that is not proven."""
    fixed = use.argument_bytes + use.output_bytes - use.alias_bytes
    if fixed > limit:
        return f"and it is proven that none fits: arguments and outputs alone take {fixed:,} bytes"
    least = candidates.relaxation().least_bytes
    if least > room(use, limit):
        return f"and it is proven that none fits: beside the arguments {least:,} bytes are kept that may not be computed twice"
    return ""


# ------------------------------------------------------------------------------------------------------------- frontier


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One plan of a frontier: kept bytes and recomputed FLOPs as the model counts them, and the compiled peak if measured."""

    kept_bytes: int
    recompute_flops: int
    recompute_seconds: float
    peak_bytes: int | None
    vertex: bool


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Memory against recomputation, from nothing recomputed to everything.

    `points` come by falling kept bytes. With `compiled` they carry the compiled peak. `seconds` is planning time without
    compilations, of which `trace_seconds` went to tracing; `ops` is the size of the joint graph in equations.
    """

    function: str
    target: str
    unplanned_bytes: int | None
    points: tuple[FrontierPoint, ...]
    grouping: str
    seconds: float
    trace_seconds: float
    ops: int

    def __iter__(self) -> Iterator[FrontierPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


def frontier(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | Target | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    compiled: int = 0,
    costs: Costs = None,
    progress: Progress | None = None,
) -> Frontier:
    """The trade of memory against recomputation for the gradient of `fun`.

    **Arguments:** as for `plan`. `compiled` is the number of points, spread evenly over the kept bytes, to compile and read the
    peak of; 0 compiles nothing.

    **Returns:** a `Frontier`.
    """
    candidates = prepare(fun, args, argnums, has_aux, target, compiler_options, progress, costs)
    first = candidates.variant(0)
    if first is None:
        return Frontier(
            function=candidates.traced.name,
            target=candidates.target.name,
            unplanned_bytes=None,
            points=(),
            grouping="",
            seconds=candidates.trace_seconds + candidates.record.seconds,
            trace_seconds=candidates.trace_seconds,
            ops=0,
        )
    name, path = first.name, first.path
    chosen = _spread(path.states, compiled)
    unplanned = candidates.measure(*BASELINE).use.peak_bytes if compiled else None
    peaks = {i: candidates.measure(0, i).use.peak_bytes for i in chosen}
    edges = set(path.edges)
    points = tuple(
        FrontierPoint(
            kept_bytes=s.nbytes,
            recompute_flops=s.flops,
            recompute_seconds=s.cost / 1e12,
            peak_bytes=peaks.get(s.index),
            vertex=s.index in edges,
        )
        for s in path.states
    )
    return Frontier(
        function=candidates.traced.name,
        target=candidates.target.name,
        unplanned_bytes=unplanned,
        points=points,
        grouping=name,
        seconds=candidates.trace_seconds + candidates.record.seconds,
        trace_seconds=candidates.trace_seconds,
        ops=path.program.ops,
    )


def _spread(states: Sequence[Any], count: int) -> list[int]:
    """Indices of `count` states, evenly spread over kept bytes, ends included."""
    if count <= 0 or not states:
        return []
    top, bottom = states[0].nbytes, states[-1].nbytes
    chosen = {0, len(states) - 1}
    for k in range(1, count - 1):
        wanted = top - (top - bottom) * k / (count - 1)
        chosen.add(min(states, key=lambda s: abs(s.nbytes - wanted)).index)
    return sorted(chosen)
