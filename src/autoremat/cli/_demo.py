"""What the demo does: one model, one text, three ways to train, everything measured.

    model -> residuals -> frontier -> plan -> JAX's policies -> training

`run` yields each part as plain data as soon as it is known. What autoremat adds to an ordinary training loop is two lines:
`plan(...)` in `run`, `.apply(loss)` in `_ways`.
"""

# pyright: basic
# JAX and Optax are typed in part only.
from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from autoremat.cli._data import frontier_data, residuals_data
from autoremat.cli._demo_model import Size, batches, init, make_block, make_loss, read_text
from autoremat.cli._errors import MissingPackageError
from autoremat.measure import MemoryUse, compile_memory, jaxpr_flops
from autoremat.plan import Plan, frontier, plan
from autoremat.plan._plan import summarize
from autoremat.report import TerminalProgress
from autoremat.transform import saved_residuals

BUDGET = "50%"
LEARNING_RATE = 2e-3
POLICIES = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
"""The entries of `jax.checkpoint_policies` that need neither names nor a second memory, less their aliases."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What all ways have in common."""

    size: Size
    steps: int
    text: np.ndarray
    params: Any
    batch: Any
    loss: Callable[..., Any]

    @classmethod
    def make(cls, size: Size, steps: int) -> Task:
        """The same parameters and batches at every call."""
        text = read_text()
        return cls(
            size=size,
            steps=steps,
            text=text,
            params=init(jax.random.key(0), size),
            batch=next(batches(text, size)),
            loss=make_loss(make_block(size.heads)),
        )


@dataclass(eq=False, kw_only=True)
class Way:
    """One way to compute the gradient, compiled; and what the training found out about it."""

    name: str
    policy: str
    use: MemoryUse
    gradient: Any
    flops: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def compile(
        cls,
        name: str,
        policy: str,
        loss: Callable[..., Any],
        task: Task,
        options: Any,
        progress: TerminalProgress,
    ) -> Way:
        """Compile `value_and_grad`: the very program that is measured is the one that trains."""
        function = jax.value_and_grad(loss)
        progress.compiling(f"{name}, {policy}")
        use, gradient = compile_memory(function, task.params, task.batch, compiler_options=options)
        progress.compiled(f"{name}, {policy}", use)
        flops = jaxpr_flops(function, task.params, task.batch)
        return cls(name=name, policy=policy, use=use, gradient=gradient, flops=flops)


def run(
    size: Size, *, steps: int, compiled: int, effort: str, progress: TerminalProgress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts of the demo, `(name, data)`.

    `compiled` is the number of points of the frontier to compile, `effort` that of the planner.
    """
    start = time.perf_counter()
    optax = _optax()
    task = Task.make(size, steps)
    yield "model", _model_part(task)
    yield "residuals", residuals_data(saved_residuals(task.loss, task.params, task.batch), "loss")
    front = frontier(task.loss, task.params, task.batch, compiled=compiled, progress=progress)
    yield "frontier", frontier_data(front, jaxpr_flops(task.loss, task.params, task.batch))
    chosen = plan(task.loss, task.params, task.batch, budget=BUDGET, effort=effort, progress=progress)
    yield "plan", summarize(chosen)
    policies = _compile_policies(task, chosen, progress)
    best = _best_policy(policies, chosen.budget_bytes)
    yield "policies", _policies_part(policies, best, chosen)
    ways = _ways(task, chosen, best, progress)
    gradients = _train(task, ways, optax.adamw(LEARNING_RATE), progress)
    training = _training_part(task, ways, gradients, chosen)
    yield "training", {**training, "seconds": time.perf_counter() - start}


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise MissingPackageError(
            "`autoremat demo` needs Optax, which is not installed. Cheapest fix: pip install 'autoremat[demo]'"
        ) from error
    return optax


# ------------------------------------------------------------------------------------------------------------- the ways


def _compile_policies(task: Task, chosen: Plan, progress: TerminalProgress) -> list[Way]:
    """Each policy of JAX on each layer, as the documentation of `jax.checkpoint` advises under `scan`."""
    ways: list[Way] = []
    for name in POLICIES:
        policy = getattr(jax.checkpoint_policies, name)
        block = jax.checkpoint(make_block(task.size.heads), policy=policy, prevent_cse=False)
        loss = make_loss(block)
        ways.append(Way.compile("jax.checkpoint", name, loss, task, chosen.compiler_options, progress))
    return ways


def _best_policy(policies: list[Way], budget: int) -> Way | None:
    """The one that fits with the fewest FLOPs; of equal ones the smaller."""
    fitting = [way for way in policies if way.use.peak_bytes <= budget]
    return min(fitting, key=lambda way: (way.flops, way.use.peak_bytes), default=None)


def _ways(task: Task, chosen: Plan, best: Way | None, progress: TerminalProgress) -> list[Way]:
    options = chosen.compiler_options
    plain = Way.compile("no remat", "everything", task.loss, task, options, progress)
    planned = Way.compile("autoremat", "by the plan", chosen.apply(task.loss), task, options, progress)
    return [plain, *([best] if best else []), planned]


# ------------------------------------------------------------------------------------------------------------- training


def _train(task: Task, ways: list[Way], optimizer: Any, progress: TerminalProgress) -> list[list[Any]]:
    """Train all ways in turn, batch by batch; returns their gradients at the first and at the last parameters.

    They take turns so that whatever else the machine does meets all of them alike.
    """
    import optax

    @jax.jit
    def update(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = [task.params for _ in ways]
    states = [optimizer.init(task.params) for _ in ways]
    before = _gradients(ways, task.params, task.batch)
    jax.block_until_ready(update(before[0], states[0], task.params))  # compile
    data = itertools.islice(batches(task.text, task.size), task.steps)
    for step, batch in enumerate(progress.over(data, "Training", task.steps)):
        for turn in range(len(ways)):
            i = (step + turn) % len(ways)
            start = time.perf_counter()
            loss, gradient = ways[i].gradient(params[i], batch)
            params[i], states[i] = jax.block_until_ready(update(gradient, states[i], params[i]))
            ways[i].seconds.append(time.perf_counter() - start)
            ways[i].losses.append(float(loss))
    return [before, _gradients(ways, params[0], task.batch)]


def _gradients(ways: list[Way], params: Any, batch: Any) -> list[Any]:
    return [jax.block_until_ready(way.gradient(params, batch)[1]) for way in ways]


def relative_difference(gradient: Any, reference: Any) -> float:
    """The largest over all arrays of: largest difference of two entries, over the largest entry of the reference."""

    def one(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))

    return max(jax.tree.leaves(jax.tree.map(one, gradient, reference)))


# ----------------------------------------------------------------------------------------------------------- plain data


def _model_part(task: Task) -> dict[str, Any]:
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(task.params)),
        **asdict(task.size),
        "text_bytes": len(task.text),
        "steps": task.steps,
        "jax": jax.__version__,
        "backend": jax.default_backend(),
    }


def _policies_part(policies: list[Way], best: Way | None, chosen: Plan) -> dict[str, Any]:
    return {
        "budget_bytes": chosen.budget_bytes,
        "unplanned_bytes": chosen.unplanned_bytes,
        "best": best.policy if best else None,
        "policies": [
            {
                "name": way.policy,
                "peak_bytes": way.use.peak_bytes,
                "flops": way.flops,
                "fits": way.use.peak_bytes <= chosen.budget_bytes,
            }
            for way in policies
        ],
    }


def _training_part(task: Task, ways: list[Way], gradients: list[list[Any]], chosen: Plan) -> dict[str, Any]:
    notes: list[str] = []
    if len(ways) == 2:
        notes.append("No policy of JAX meets this budget, so there is none to compare with.")
    return {
        "unplanned_bytes": chosen.unplanned_bytes,
        "budget_bytes": chosen.budget_bytes,
        "steps": task.steps,
        "ways": [_way_data(ways, i, gradients) for i in range(len(ways))],
        "notes": notes,
    }


def _way_data(ways: list[Way], i: int, gradients: list[list[Any]]) -> dict[str, Any]:
    """One way, compared with the first. A step's ratio is taken within the step, so that slow drifts cancel."""
    way, plain = ways[i], ways[0]
    ratios = [a / b for a, b in zip(way.seconds, plain.seconds, strict=True)]
    return {
        "name": way.name,
        "policy": way.policy,
        "peak_bytes": way.use.peak_bytes,
        "temp_bytes": way.use.temp_bytes,
        "flops": way.flops,
        "step_seconds": statistics.median(way.seconds),
        "step_ratio": statistics.median(ratios),
        "losses": way.losses,
        "loss_difference": max(abs(a - b) for a, b in zip(way.losses, plain.losses, strict=True)),
        "gradient_difference": max(relative_difference(at[i], at[0]) for at in gradients),
    }
