"""`calibrate`: what the operations of a function take on the device that is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from autoremat._compat import JaxprEqn, eval_jaxpr, is_ref, new_jaxpr
from autoremat._errors import CostTableError
from autoremat.cost import CostTable, is_fusible, op_key, runs_programs
from autoremat.graph._trace import trace_graph
from autoremat.measure import environment
from autoremat.plan._trace import Traced, argnum_tuple, check_differentiable, trace
from autoremat.target import Target, resolve
from autoremat.transform._jaxpr import all_eqns, free_vars
from autoremat.transform._linearize import linearize
from autoremat.transform._planned import forward_jaxpr

SAMPLE_SECONDS = 2e-3
"""A sample runs an operation so often that it takes at least this long."""

COPIED, CHAIN = 2**24, 128
"""Elements that are copied to measure bandwidth; multiply-adds in a row, on a sixteenth of them, to measure arithmetic."""

SIDE = {"cpu": 1024}
"""Rows and columns of the matrices whose product is timed; 4096 on accelerators."""

T = TypeVar("T")


class Over(Protocol):
    """Progress through a number of measurements."""

    def over(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items, one after the other."""
        ...


@dataclass(frozen=True, eq=False)
class _Operation:
    """One operation of the program, and its name in a table."""

    key: str
    eqn: JaxprEqn

    @property
    def avals(self) -> list[Any]:
        """The types of its operands, those that are variables."""
        return [v.aval for v in free_vars([self.eqn])]

    def run(self, *operands: Any) -> Sequence[Any]:
        """Run it alone."""
        inputs = free_vars([self.eqn])
        return eval_jaxpr(new_jaxpr(inputs, list(self.eqn.outvars), [self.eqn]), *operands)


def calibrate(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    repeats: int = 7,
    progress: Over | None = None,
) -> CostTable:
    """Time the distinct operations of the gradient of `fun` on this machine's device, and the rates of the device.

    What compilers fuse into other operations (elementwise arithmetic) is not timed alone: it is priced by the measured rates.

    **Arguments:**

    - `fun`, `args`, `argnums`, `has_aux`: as in `autoremat.plan`; shapes are enough.
    - `repeats`: samples of each operation, of which the median counts.
    - `progress`: told of each measurement.

    **Returns:** a `CostTable`, for `autoremat.plan(costs=...)`. Times are seconds, of whole arrays on one device.

    **Raises:** `DifferentiationError` if there is nothing to differentiate; `ValueError` for `repeats` below 1.
    """
    if repeats < 1:
        raise ValueError(
            f"`autoremat.calibrate(repeats=...)` needs at least 1, got {repeats}. Cheapest fix: leave it out."
        )
    where = resolve(None)
    chosen = argnum_tuple(argnums, len(args))
    traced = trace(fun, args, chosen)
    check_differentiable(traced, args, chosen, has_aux)
    operations = list(distinct_operations(traced))
    clock = _Clock.start(repeats)
    bandwidth, vector, matrix = _rates(where, _product_dtypes(operations), clock)
    seconds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    timed = progress.over(operations, "Timing operations", len(operations)) if progress else operations
    for operation in timed:
        try:
            seconds[operation.key] = clock.time(operation.run, [_example(a) for a in operation.avals])
        except (NameError, TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            skipped[operation.key] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    return CostTable(
        target=where.device.name,
        seconds=seconds,
        memory_bandwidth=bandwidth,
        vector_flops_per_s=vector,
        matrix_flops_per_s=matrix,
        skipped=skipped,
        environment=environment(),
    )


def distinct_operations(traced: Traced) -> Iterator[_Operation]:
    """The operations that a planner prices one by one, each kind once: of the forward pass, and of what derivatives add to it."""
    joint = linearize(traced.jaxpr, tuple(v in traced.differentiated for v in traced.jaxpr.invars))
    seen: set[str] = set()
    for eqn in all_eqns(forward_jaxpr(joint)):
        if is_fusible(eqn.primitive.name) or any(is_ref(v.aval) for v in eqn.invars):
            continue
        graph, _ = trace_graph(
            new_jaxpr(free_vars([eqn]), list(eqn.outvars), [eqn]), source_of=lambda eqn: ""
        )
        key = op_key(graph, graph.ops[0])
        if key not in seen and not runs_programs(graph.ops[0]):
            seen.add(key)
            yield _Operation(key, eqn)


def coverage(costs: CostTable, traced: Traced) -> str:
    """How much of a program a table knows, as a note. Raises `CostTableError` if that is nothing."""
    keys = [o.key for o in distinct_operations(traced)]
    known = sum(key in costs.seconds for key in keys)
    if keys and not known:
        raise CostTableError(
            f"the cost table has {len(costs.seconds)} operations, and none of the {len(keys)} of `{traced.name}`: it was made for another "
            "program, or for other shapes. Cheapest fix: autoremat.calibrate with this function and these shapes."
        )
    return (
        f"Recomputation is priced by times measured on {costs.target}: {known} of {len(keys)} distinct operations; the others, and what is "
        "fused, by measured rates."
    )


def _product_dtypes(operations: Sequence[_Operation]) -> list[str]:
    products = ("dot_general", "conv_general_dilated")
    found = {str(o.eqn.invars[0].aval.dtype) for o in operations if o.eqn.primitive.name in products}
    return sorted(found) or ["float32"]


def _rates(where: Target, dtypes: Sequence[str], clock: _Clock) -> tuple[float, float, dict[str, float]]:
    """Bytes per second of a copy; FLOPs per second of fused arithmetic, and of a product by dtype."""
    copied = jnp.zeros(COPIED, jnp.float32)
    bandwidth = 2 * copied.nbytes / clock.time(lambda x: [x + 1], [copied])
    small = jnp.zeros(COPIED // 16, jnp.float32)
    vector = 2 * CHAIN * small.size / clock.time(_chain, [small])
    matrix = {}
    for dtype in dtypes:
        n = SIDE.get(where.platform, 4096)
        x = jnp.ones((n, n), dtype)
        matrix[dtype] = 2 * n**3 / clock.time(lambda x: [x @ x], [x])
    return bandwidth, vector, matrix


def _chain(x: Any) -> list[Any]:
    """Multiply-adds, one after the other, that a compiler fuses into one pass."""
    for _ in range(CHAIN):
        x = x * 1.0001 + 0.5
    return [x]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times programs: medians of `repeats` samples, less what it takes to dispatch one that does nothing."""

    repeats: int
    dispatch_seconds: float

    @classmethod
    def start(cls, repeats: int) -> _Clock:
        """A clock for this machine."""
        return cls(repeats, _sample(lambda x: [x], [jnp.zeros(())], repeats))

    def time(self, run: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> float:
        """The seconds of one run."""
        return max(1e-9, _sample(run, operands, self.repeats) - self.dispatch_seconds)


def _sample(run: Callable[..., Sequence[Any]], operands: Sequence[Any], repeats: int) -> float:
    compiled = jax.jit(run).lower(*operands).compile()

    def several(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = compiled(*operands)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    several(1)
    count = max(1, int(SAMPLE_SECONDS / max(several(1), 1e-6)))
    return statistics.median(several(count) for _ in range(repeats))


def _example(aval: Any) -> Any:
    """An array of a type: random numbers between zero and one, zeros for integers, keys of one seed."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0), aval.shape)
        if keys.dtype != aval.dtype:
            raise NotImplementedError(f"keys of type {aval.dtype}, and the default is {keys.dtype}")
        return keys
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jax.random.uniform(jax.random.key(0), aval.shape, jnp.float32).astype(aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)
