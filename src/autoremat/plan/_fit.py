"""`fit`: a whole training step into the memory of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoremat._errors import BudgetError, DifferentiationError, PlanMismatchError
from autoremat.cost import Costs
from autoremat.measure import default_compiler_options
from autoremat.plan._account import Account, account
from autoremat.plan._candidates import Candidates, Progress
from autoremat.plan._plan import Plan, Silent, best_plan, check_effort, summarize
from autoremat.plan._processes import agree
from autoremat.plan._step import PlannedStep, Site, Sites, StepProgram, find_sites
from autoremat.target import Target, resolve
from autoremat.transform._planned import Budget, parse_budget

BULK = 0.5
"""Activations that are less than this share of the peak are not what fills the memory."""

OTHER = 0.05
"""A gradient that keeps less than this share of what the planned one keeps is not worth a word."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """A training step that fits, and the account of its memory.

    - `step`: to be called in place of the one that was given; same arguments, same results.
    - `plan`: the plan for the gradient inside, its peak that of the whole step. It can be saved, and given to `fit` again.
    - `account`: what fills the memory at the peak; `unplanned_account` without any recomputation.
    - `memory_bytes`, `reserve_bytes`: of one device; the budget is the difference.
    - `notes`: what a user should know, in sentences.
    """

    step: PlannedStep
    plan: Plan
    account: Account
    unplanned_account: Account | None
    memory_bytes: int
    reserve_bytes: int
    notes: tuple[str, ...]

    @property
    def report(self) -> str:
        """The account and the plan in words and tables."""
        from autoremat.report import fit_text

        return fit_text(fit_data(self))


def fit_data(found: Fit) -> dict[str, Any]:
    """The figures of a fit as plain data."""
    before = found.unplanned_account
    return {
        "memory_bytes": found.memory_bytes,
        "reserve_bytes": found.reserve_bytes,
        "account": dict(found.account.items()),
        "unplanned_account": dict(before.items()) if before else None,
        "plan": summarize(found.plan),
        "notes": list(found.notes),
    }


def fit(
    step: Callable[..., Any],
    *args: Any,
    memory: int | str | None = None,
    target: str | Target | None = None,
    reserve: int | str = "5%",
    compiler_options: Mapping[str, Any] | None = None,
    effort: str = "balanced",
    costs: Costs = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Make a training step fit into the memory of a device, recomputing as little as possible.

    The step is any function that takes a gradient (`jax.grad`, `jax.value_and_grad`, `jax.vjp`, or what a framework makes of them) and
    whatever else: an optimizer, statistics, donation, shardings. The function that is differentiated is found by tracing, and planned; the
    memory of the whole step is compiled and judged.

    **Arguments:**

    - `step`, `args`: the step, jitted as you jit it or not at all, and example arguments: arrays, or `jax.ShapeDtypeStruct`s, with
        their shardings.
    - `memory`: bytes of one device: an int, or a string such as `"16GiB"`. Left out: what the target has.
    - `target`, `compiler_options`, `effort`, `costs`, `progress`: as in `autoremat.plan`.
    - `reserve`: of the memory, what must stay free for what no program shows: fragmentation, the runtime, other programs. Bytes, or a
        share of the memory.
    - `plan`: a plan that was made by `fit` before, for the same step: it is compiled and checked, and nothing is searched.

    **Returns:** a `Fit`. Its `step` runs what was verified.

    **Raises:** `InfeasibleBudgetError` if nothing fits; `DifferentiationError` if the step takes no gradient; `PlanMismatchError` if
    `plan` is for another step, or several processes (`jax.distributed`) have different ones; `BudgetError`, `CompileError`, `TargetError`.
    """
    check_effort(effort, "autoremat.fit")
    where = resolve(target)
    whole = _memory(memory, where)
    spared = parse_budget(reserve, "autoremat.fit").resolve(whole) if reserve else 0
    if spared >= whole:
        raise BudgetError(
            f"`autoremat.fit(reserve=...)`: got {spared:,} bytes of {whole:,}, which leaves nothing. Cheapest fix: leave it out."
        )
    start = time.perf_counter()
    sites = find_sites(step, args)
    options = default_compiler_options(where.platform) if compiler_options is None else dict(compiler_options)
    site, others = _choose(step, sites, args, where, options, plan)
    candidates = _candidates(step, args, site, sites, where, options, progress, costs)
    candidates.trace_seconds = time.perf_counter() - start
    if plan is None:
        found = best_plan(candidates, Budget(nbytes=whole - spared), effort, "autoremat.fit")
    else:
        found = _checked(candidates, plan, whole - spared)
    return _result(step, args, sites, site, candidates, found, whole, spared, others)


def _memory(memory: int | str | None, target: Target) -> int:
    """Bytes of one device."""
    if memory is not None:
        found = parse_budget(memory, "autoremat.fit").nbytes
        if found is None:
            raise BudgetError(
                f'`autoremat.fit(memory=...)` needs bytes, such as "16GiB"; got {memory!r}, a share. Cheapest fix: leave it out for all '
                "of the target's memory."
            )
        return found
    if target.attached:
        stats = target.devices[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"])
    if target.platform == "cpu":
        raise BudgetError(
            '`autoremat.fit` does not know how much memory a CPU may use. Cheapest fix: memory="16GiB", or a target such as "tpu:v5e".'
        )
    return target.device.memory_bytes


def _choose(
    step: Callable[..., Any],
    sites: Sites,
    args: tuple[Any, ...],
    target: Target,
    options: Mapping[str, Any],
    plan: Plan | None,
) -> tuple[Site, tuple[str, ...]]:
    """The gradient that keeps most, or the one that a plan is for; and the names of others that keep much."""
    name = getattr(step, "__name__", type(step).__name__)
    if not sites.found:
        why = f" What it differentiates could not be traced: {sites.refused[0]}" if sites.refused else ""
        raise DifferentiationError(
            f"`autoremat.fit({name}, ...)`: the step takes no gradient, so there is nothing to recompute.{why} Cheapest fix: pass the whole "
            "training step, with `jax.grad`, `jax.value_and_grad` or `jax.vjp` inside it."
        )
    if plan is not None:
        if plan.fingerprint not in sites.found:
            there = ", ".join(s.traced.name for s in sites.found.values())
            raise PlanMismatchError(
                f"`autoremat.fit({name}, plan=...)`: the plan was made for `{plan.function}` with {len(plan.operations)} operations, and the "
                f"step differentiates others: {there}. Cheapest fix: call autoremat.fit without a plan, and save the one that it finds."
            )
        return sites.found[plan.fingerprint], ()
    if len(sites.found) == 1:
        return next(iter(sites.found.values())), ()
    kept = {
        key: _kept(_candidates(step, args, site, sites, target, dict(options), None))
        for key, site in sites.found.items()
    }
    most = max(kept, key=lambda key: kept[key])
    others = tuple(
        site.traced.name
        for key, site in sites.found.items()
        if key != most and kept[key] > OTHER * kept[most]
    )
    return sites.found[most], others


def _candidates(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    site: Site,
    sites: Sites,
    target: Target,
    options: dict[str, Any],
    progress: Progress | None,
    costs: Costs = None,
) -> Candidates:
    program = StepProgram(step, args, site, sites.fingerprint)
    return Candidates(site.traced, program, target, options, progress or Silent(), costs)


def _kept(candidates: Candidates) -> int:
    """The bytes that a gradient keeps where nothing is recomputed."""
    first = candidates.variant(0)
    return first.path.states[0].nbytes if first is not None else 0


def _checked(candidates: Candidates, plan: Plan, limit: int) -> Plan:
    """A plan that was made before, compiled here. Raises `BudgetError` if it does not fit."""
    agree(plan.fingerprint, plan.decisions, "autoremat.fit")
    use = candidates.compile(plan.decisions)
    if not use.fits or use.peak_bytes > limit:
        raise BudgetError(
            f"`autoremat.fit(plan=...)`: compiled here, the plan needs {use.peak_bytes:,} bytes, and there are {limit:,}. Cheapest fix: call "
            "autoremat.fit without a plan."
        )
    return replace(
        plan,
        budget_bytes=limit,
        peak_bytes=use.peak_bytes,
        memory=replace(use, cached=False),
        target=candidates.target.name,
        compiler_options=candidates.options,
        compiles=int(not use.cached),
        compile_seconds=0.0 if use.cached else use.seconds,
    )


def _result(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    sites: Sites,
    site: Site,
    candidates: Candidates,
    plan: Plan,
    memory: int,
    reserve: int,
    others: Sequence[str],
) -> Fit:
    shapes = sites.args
    everything = _kept(candidates)
    kept = plan.kept_bytes if plan.checkpoints else everything
    divided = account(shapes, sites.out, site.primals, kept, plan.memory)
    baseline = candidates.record.measured.get((0, -1))
    before = (
        account(shapes, sites.out, site.primals, everything, baseline.use) if baseline is not None else None
    )
    return Fit(
        step=PlannedStep(step, {plan.fingerprint: plan.decisions}, plan.compiler_options),
        plan=plan,
        account=divided,
        unplanned_account=before,
        memory_bytes=memory,
        reserve_bytes=reserve,
        notes=(*plan.notes, *_notes(before or divided, plan, others)),
    )


def _notes(before: Account, plan: Plan, others: Sequence[str]) -> Iterator[str]:
    if before.activations < BULK * before.total:
        largest = sorted(before.items(), key=lambda item: -item[1])[:2]
        what = " and ".join(f"{name} ({size:,} bytes)" for name, size in largest)
        yield (
            f"Activations are not what fills the memory: without recomputation they take {before.activations:,} of {before.total:,} bytes, "
            f"and {what} most. What would help: {_HELP[largest[0][0]]}."
        )
    if plan.memory.compiler_reruns:
        yield (
            f"The compiler recomputes {plan.memory.compiler_reruns} operations by itself, which costs time that the plan does not count: "
            "the program was near the memory of the device. A smaller budget lets the plan choose instead."
        )
    if others:
        yield (
            f"The step takes other gradients, too, which keep what they keep: of {', '.join(others)}. The plan is for `{plan.function}`, "
            "which keeps most."
        )


_HELP = {
    "parameters": "sharding them over more devices, or a narrower type",
    "optimizer state": "an optimizer with less state, a narrower type for it, or sharding it over more devices",
    "batch": "a smaller batch, or narrower inputs",
    "outputs": "donating the arguments that they replace (`donate_argnums`)",
    "gradients": "accumulating them in a narrower type, or sharding",
    "temporaries": "a smaller batch, or a fused kernel for the operation that needs most (autoremat.plan names it)",
    "activations": "recomputation",
}
