"""The lower bound of a program against executions of it that recompute, plans, and JAX's policies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoremat as ar
from autoremat.cost import device
from autoremat.measure._flops import jaxpr_flops
from autoremat.plan._bound import Relaxation, relax, room
from autoremat.plan._candidates import build_variants
from autoremat.plan._program import planned_function
from autoremat.plan._rewrite import LoopFences, decide
from autoremat.plan._search import MAX_COMPILES
from autoremat.plan._trace import trace
from support import programs
from support.schedules import Program

CPU = device("cpu")
WIDTH, BATCH, LAYERS = 16, 256, 6


# --------------------------------------------------------------------------------------------------------------- models


def layer(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    return x + jax.nn.relu(y @ w.T) * jax.nn.softmax(y, -1)


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return (x**2).mean()


def scanned(ws: Any, x: Any) -> Any:
    return (lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0] ** 2).mean()


def two_towers(ws: Any, x: Any) -> Any:
    return unrolled(ws[:3], x) + unrolled(ws[3:], jnp.sin(x))


def twice(ws: Any, x: Any) -> Any:
    """The same products a second time: the compiler makes one of two."""
    for w in ws:
        x = jnp.sin(x @ w) * jnp.cos(x @ w)
    return (x**2).mean()


def convolutional(ws: Any, x: Any) -> Any:
    y = x.reshape(BATCH, 2, 4, 2)
    for w in ws:
        kernel = w[:9, :4].reshape(3, 3, 2, 2)
        y = jax.nn.relu(
            lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
        y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-3)
    return (y**2).mean()


def nested(ws: Any, x: Any) -> Any:
    def outer(c: Any, w: Any) -> Any:
        c, ys = lax.scan(lambda d, _: (layer(d, w), jnp.sin(d)), c, None, length=2)
        return jnp.tanh(c), ys.sum(0)

    y, extra = lax.scan(outer, x, ws)
    return (y**2).mean() + (extra**3).mean()


def nested_unrolled(ws: Any, x: Any) -> Any:
    extra = []
    for w in ws:
        ys = []
        for _ in range(2):
            ys.append(jnp.sin(x))
            x = layer(x, w)
        x = jnp.tanh(x)
        extra.append(sum(ys))
    return (x**2).mean() + (jnp.stack(extra) ** 3).mean()


@functools.cache
def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) * 0.2, jax.random.normal(
        keys[1], (BATCH, WIDTH)
    )


FLAT = (unrolled, two_towers, twice, convolutional)
LOOPS = {scanned: unrolled, nested: nested_unrolled}


@functools.cache
def relaxed(fun: Callable[..., Any]) -> Relaxation:
    return relax(jax.value_and_grad(fun), arguments(), CPU)


# ----------------------------------------------------------------------------------------------------- random executions


def assert_executions_above(relaxation: Relaxation, program: Program, seeds: range) -> None:
    for seed in seeds:
        found = program.execute(seed)
        assert relaxation.least_bytes <= found.peak
        assert relaxation.least_cost(found.peak) <= found.cost, f"seed {seed}: {found.peak} bytes"


@pytest.mark.parametrize("fun", FLAT)
def test_no_execution_is_below_the_bound(fun: Callable[..., Any]) -> None:
    program = Program(jax.value_and_grad(fun), arguments(), CPU)
    assert_executions_above(relaxed(fun), program, range(40))


@pytest.mark.parametrize("fun", LOOPS)
def test_no_execution_of_the_unrolled_program_is_below_the_bound_of_the_loop(fun: Callable[..., Any]) -> None:
    program = Program(jax.value_and_grad(LOOPS[fun]), arguments(), CPU)
    assert_executions_above(relaxed(fun), program, range(40))


@given(programs.programs, st.integers(0, 10**6))
def test_no_execution_of_a_random_program_is_below_the_bound(program: programs.Program, seed: int) -> None:
    fun = programs.as_function(program, lambda f, _: f)
    gradient = jax.value_and_grad(fun, (0, 1), has_aux=True)
    args = programs.arguments(seed)
    assert_executions_above(relax(gradient, args, CPU), Program(gradient, args, CPU), range(seed, seed + 8))


# ------------------------------------------------------------------------------------------------------ what it looks like


@pytest.mark.parametrize("fun", [*FLAT, *LOOPS])
def test_falls_with_the_bytes_to_zero(fun: Callable[..., Any]) -> None:
    found = [relaxed(fun).least_cost(n) for n in range(0, 10**6, 9973)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0
    assert found[-1] == 0


def test_a_chain_of_products_is_bound_by_what_its_products_cost() -> None:
    """Every tanh is read later, and of the fewer than half of the bytes that are there only half the products are spared."""
    width, links = 64, 8

    def chain(x: Any, ws: Any) -> Any:
        for i in range(links):
            x = jnp.tanh(x @ ws[i])
        return x.sum()

    x, ws = jnp.ones((256, width)), jnp.ones((links, width, width))
    found = relax(jax.value_and_grad(chain), (x, ws), CPU)
    product, array = 2 * 256 * width * width * 10, 4 * 256 * width  # 100 GFLOP/s: ten picoseconds a FLOP
    for kept in range(1, links):
        assert found.least_cost(kept * array) >= (links - 1 - kept) * product
    assert found.least_cost((links + 2) * array) == 0


def test_one_tower_may_be_finished_before_the_other_begins() -> None:
    """So what one of them needs, beside the results of both, is enough to compute nothing twice."""
    tower = relax(jax.value_and_grad(lambda ws, x: unrolled(ws[3:], jnp.sin(x))), arguments(), CPU)
    need = next(n for n in range(0, 10**6, 1000) if tower.least_cost(n) == 0)
    outputs = 4 * LAYERS * WIDTH * WIDTH
    assert relaxed(two_towers).least_cost(need + 2 * outputs) == 0


def test_what_the_compiler_fuses_counts_nothing() -> None:
    found = relax(jax.value_and_grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))).sum()), (jnp.ones(1000),), CPU)
    assert found.least_cost(0) == 0


def test_what_depends_on_constants_alone_counts_nothing() -> None:
    table = jnp.ones((64, 64))

    def fun(x: Any) -> Any:
        return (jnp.sin(x * (table @ table)) * x).sum()

    assert relax(jax.value_and_grad(fun), (jnp.ones((64, 64)),), CPU).least_cost(4 * 64 * 64) == 0


def test_devices_share_what_is_kept_and_the_work() -> None:
    """The types say the bytes of whole arrays; a budget, and the time, are of one device."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    ws, x = arguments()
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    found = relax(jax.value_and_grad(unrolled), (ws, sharded), CPU)
    inside = relax(
        jax.value_and_grad(lambda ws, x: unrolled(ws, lax.with_sharding_constraint(x, sharded.sharding))),
        (ws, x),
        CPU,
    )
    for n in (0, 10_000, 30_000, 50_000):
        alone = relaxed(unrolled).least_cost(4 * n)
        assert found.least_cost(n) == inside.least_cost(n) == (alone // 4 if alone < math.inf else alone)


def test_random_bits_that_may_not_be_drawn_twice_are_kept() -> None:
    def fun(x: Any, key: Any) -> Any:
        bits = jax.random.bits(jax.random.wrap_key_data(key, impl="rbg"), (1000,))
        return (jnp.sin(x) * bits.astype(jnp.float32)).sum()

    found = relax(jax.value_and_grad(fun), (jnp.ones(1000), jnp.zeros(4, jnp.uint32)), CPU)
    assert found.least_bytes == 4000
    assert found.least_cost(3999) == math.inf


# ---------------------------------------------------------------------------------------------------------------- plans


def plans_as_written(fun: Callable[..., Any]) -> Iterator[tuple[int, int]]:
    """Bytes at the peak and picoseconds of recomputation of plans of all partitions, each run in program order."""
    traced = trace(fun, arguments(), (0,))
    for variant in build_variants(traced, CPU, ("dependence", "barrier")):
        program, states = variant.path.program, variant.path.states
        for state in states[:: max(1, len(states) // 6)]:
            written = planned_function(traced, decide(program, state, "barrier", LoopFences()))
            yield Program(jax.value_and_grad(written), arguments(), CPU).as_written()[0], state.cost


@pytest.mark.parametrize("fun", [*FLAT, nested_unrolled])
def test_no_plan_as_it_is_written_is_below_the_bound(fun: Callable[..., Any]) -> None:
    shares = [relaxed(fun).least_cost(peak) / max(cost, 1) for peak, cost in plans_as_written(fun)]
    assert max(shares) <= 1
    if fun in (unrolled, nested_unrolled):
        assert max(shares) > 0.4, "a bound that says little"


_POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


@pytest.mark.parametrize("name", _POLICIES)
def test_no_policy_of_jax_is_below_the_bound(name: str) -> None:
    block = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, name))

    def net(ws: Any, x: Any) -> Any:
        for w in ws:
            x = block(x, w)
        return (x**2).mean()

    gradient, plain = jax.value_and_grad(net), jax.value_and_grad(unrolled)
    use = ar.measure(gradient, *arguments())
    again = jaxpr_flops(gradient, *arguments()) - jaxpr_flops(plain, *arguments())
    assert relaxed(unrolled).least_cost(room(use, use.peak_bytes)) <= 10 * again
    written, once = (
        Program(gradient, arguments(), CPU).as_written(),
        Program(plain, arguments(), CPU).as_written(),
    )
    assert relaxed(unrolled).least_cost(written[0]) <= written[1] - once[1]


def planned(fun: Callable[..., Any], budgets: tuple[str, ...]) -> Iterator[ar.Plan]:
    for budget in budgets:
        try:
            yield ar.plan(fun, *arguments(), budget=budget, effort="fast")
        except ar.InfeasibleBudgetError:
            return


@pytest.mark.parametrize("fun", [unrolled, scanned, two_towers, nested])
def test_no_plan_is_below_its_bound(fun: Callable[..., Any]) -> None:
    bound = 0.0
    for plan in planned(fun, ("100%", "70%", "50%")):
        assert bound <= plan.bound_seconds, "a smaller budget, and a lower bound"
        bound = plan.bound_seconds
        # Not only as reported: a bound above its plan would be reported as none.
        least = relaxed(fun).least_cost(room(plan.memory, plan.budget_bytes)) / 1e12
        assert least == bound <= plan.recompute_seconds
        assert 0 <= plan.gap <= plan.recompute_seconds / plan.step_seconds
        if not plan.recompute_seconds:
            assert plan.gap == plan.bound_seconds == 0


def test_of_a_step_the_time_is_that_of_its_gradient() -> None:
    flops = jaxpr_flops(jax.value_and_grad(unrolled), *arguments())
    assert relaxed(unrolled).step_cost == pytest.approx(10 * flops, rel=0.01)  # 100 GFLOP/s


def test_a_donated_argument_makes_room() -> None:
    use = ar.measure(jax.value_and_grad(unrolled), *arguments())
    fields = {f: getattr(use, f) for f in ("output_bytes", "temp_bytes", "peak_bytes", "seconds")}
    donated = type(use)(argument_bytes=use.argument_bytes, alias_bytes=100, **fields)
    assert room(donated, 10**6) == room(use, 10**6) + 100


# ------------------------------------------------------------------------------------------------------------ infeasible


def test_a_budget_below_arguments_and_results_is_proven_infeasible() -> None:
    with pytest.raises(
        ar.InfeasibleBudgetError, match="proven that none fits: arguments and outputs alone take"
    ):
        ar.plan(unrolled, *arguments(), budget=10_000, effort="fast")


def test_a_budget_below_what_must_be_kept_is_proven_infeasible() -> None:
    def fun(x: Any, key: Any) -> Any:
        bits = jax.random.bits(jax.random.wrap_key_data(key, impl="rbg"), (4, 50_000))
        return ((jnp.sin(x) * bits.astype(jnp.float32)) @ jnp.ones(50_000)).sum()

    x = jax.ShapeDtypeStruct((50_000,), jnp.float32)
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    with pytest.raises(ar.InfeasibleBudgetError, match="proven that none fits: beside the arguments"):
        ar.plan(fun, x, key, budget=500_000, effort="fast")


def test_where_nothing_is_proven_it_is_not_said() -> None:
    with pytest.raises(ar.InfeasibleBudgetError, match="for any recomputation tried") as refused:
        ar.plan(unrolled, *arguments(), budget=4 * (2 * LAYERS * WIDTH + BATCH) * WIDTH + 200, effort="fast")
    assert (
        "or what makes that operation smaller: a smaller batch, a fused kernel in its place, sharding."
        in str(refused.value)
    )


def test_a_search_that_ended_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_COMPILES, "fast", 1)
    budget = 4 * (2 * LAYERS * WIDTH + BATCH) * WIDTH + 300
    with pytest.raises(
        ar.InfeasibleBudgetError, match=r"of 1 plan compiled, where the search ended, so this is no proof"
    ) as refused:
        ar.plan(lambda ws, x: 2 * unrolled(ws, x), *arguments(), budget=budget, effort="fast")
    assert 'calling again, effort="optimal" tries more' in str(refused.value)
