"""Plans of small models: budgets met by an independent compilation, gradients unchanged, and the same plan every time."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoremat as ar
from autoremat.cost import device
from autoremat.plan import _candidates
from autoremat.plan._candidates import Variant, build_variants
from autoremat.plan._rewrite import Decisions, LoopBlock, LoopFences, blocks, decide, without_prices
from autoremat.plan._stages import Loop, Stage
from autoremat.plan._trace import trace
from support.interpreter import interpreted

WIDTH, BATCH, LAYERS = 16, 128, 3


# ------------------------------------------------------------------------------------------------------------- models


def layer(x: Any, w: Any) -> Any:
    """Activations are its bulk, and most of them are cheap to make again."""
    y = jnp.sin(x @ w)
    return jax.nn.relu((jnp.sin(y) * jnp.cos(x)) @ w) + x


def mlp(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0] ** 2)


def branching(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        x = lax.cond(x[0, 0] > i, layer, lambda x, w: layer(jnp.sin(x), w), x, w)
    return jnp.mean(x**2)


@jax.custom_vjp
def _scaled_sin(x: Any) -> Any:
    return jnp.sin(x)


_scaled_sin.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, ct: (2 * cos * ct,))


def own_derivative(ws: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda c, w: (layer(_scaled_sin(c), w), None), x, ws)[0] ** 2)


def checkpointed(ws: Any, x: Any) -> Any:
    for w in ws:
        x = ar.checkpoint(layer)(x, w)
    return jnp.mean(x**2)


def checkpointed_scan(ws: Any, x: Any) -> Any:
    body = jax.checkpoint(lambda c, w: (layer(c, w), None))
    return jnp.mean(lax.scan(body, x, ws)[0] ** 2)


def with_aux(ws: Any, x: Any) -> Any:
    return scanned(ws, x), {"norm": jnp.sum(x), "n": 3}


def in_three(w: Any, x: Any, scale: Any, *, shift: Any = 0.0) -> Any:
    x, _ = lax.scan(lambda c, _: (layer(c * scale + shift, w), None), x, None, length=LAYERS)
    return jnp.mean(x**2)


@functools.cache
def arguments(*, stacked: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    ws = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(LAYERS)]
    x = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)
    return (jnp.stack(ws) if stacked else ws), x


_STACKED = (scanned, own_derivative, checkpointed_scan, with_aux)


def args_of(fun: Callable[..., Any]) -> tuple[Any, Any]:
    return arguments(stacked=fun in _STACKED)


@functools.cache
def planned(fun: Callable[..., Any], budget: str) -> ar.Plan:
    """A plan, made once for all tests."""
    return ar.plan(fun, *args_of(fun), budget=budget, effort="fast")


def assert_close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    """Equal up to rounding, relative to the largest element of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.max(np.abs(np.asarray(b, np.float64)), initial=1e-30)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, rtol=0, atol=tolerance)


MODELS = {
    # On JAX 0.10 the compiler gives back little of what an unrolled model of this size saves.
    mlp: "90%",
    branching: "75%",
    scanned: "60%",
    own_derivative: "60%",
    checkpointed: "90%",
    checkpointed_scan: "60%",
}


# -------------------------------------------------------------------------------------------- what is promised is kept


@pytest.mark.parametrize(("fun", "budget"), MODELS.items())
def test_budget_is_met_and_the_gradient_unchanged(fun: Any, budget: str) -> None:
    plan, args = planned(fun, budget), args_of(fun)
    assert plan.decisions
    assert plan.unplanned_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes < plan.unplanned_bytes
    gradient = jax.value_and_grad(plan.apply(fun))
    use = ar.measure(gradient, *args, compiler_options=plan.compiler_options)
    assert use.peak_bytes == plan.peak_bytes == plan.memory.peak_bytes
    options = dict(plan.compiler_options)
    assert_close(
        jax.jit(gradient, compiler_options=options)(*args),
        jax.jit(jax.value_and_grad(fun), compiler_options=options)(*args),
    )


@pytest.mark.parametrize("fun", [mlp, scanned])
def test_the_figures_of_a_plan(fun: Any) -> None:
    _candidates._RECORDS.clear()
    plan = ar.plan(fun, *args_of(fun), budget=MODELS[fun], effort="fast")
    assert plan.function == fun.__name__
    assert plan.argnums == (0,)
    assert not plan.has_aux
    assert plan.target == jax.default_backend()
    assert plan.unplanned_bytes == ar.measure(jax.value_and_grad(fun), *args_of(fun)).peak_bytes
    assert 0 < plan.recompute_flops < plan.forward_flops
    assert plan.forward_flops == ar.jaxpr_flops(jax.make_jaxpr(fun)(*args_of(fun)))
    assert plan.kept_bytes > 0
    assert plan.seconds > 0
    assert plan.compiles >= 2
    assert plan.compile_seconds > 0
    assert plan.checkpoints == len(list(blocks(plan.decisions))) > 0
    assert any(isinstance(b, LoopBlock) for b in plan.decisions) == (fun is scanned)


def test_recomputed_flops_are_those_of_the_emitted_program() -> None:
    """A budget is paid for in FLOPs, and the plan says how many: no more are in the program, but for the fences."""
    plan, args = planned(scanned, MODELS[scanned]), args_of(scanned)

    def flops(fun: Any) -> int:
        return ar.jaxpr_flops(jax.make_jaxpr(jax.grad(fun))(*args))

    extra = flops(plan.apply(scanned)) - flops(scanned)
    fences = LAYERS * (BATCH * WIDTH + 100)  # a subtraction for each element of one input of a stage
    assert plan.recompute_flops <= extra <= plan.recompute_flops + fences


@pytest.mark.parametrize(("fun", "of"), [(checkpointed, mlp), (checkpointed_scan, scanned)])
def test_checkpoints_of_the_user_are_replaced(fun: Any, of: Any) -> None:
    """The plan of a function whose body is checkpointed already is the plan of the function without."""
    budget = MODELS[fun]
    plan, plain = planned(fun, budget), planned(of, budget)
    assert plan.decisions == plain.decisions
    assert plan.fingerprint == plain.fingerprint
    assert (plan.peak_bytes, plan.unplanned_bytes) == (plain.peak_bytes, plain.unplanned_bytes)
    (note,) = [n for n in plan.notes if "checkpoint(s) already" in n]
    assert note.startswith(f"The function holds {LAYERS if fun is checkpointed else 1} checkpoint(s)")
    assert not any("already" in n for n in plain.notes)


def test_nothing_to_do() -> None:
    for budget in ("100%", "250%", 10**9):
        plan = ar.plan(mlp, *arguments(), budget=budget)
        assert plan.decisions == ()
        assert plan.checkpoints == plan.recompute_flops == 0
        assert plan.unplanned_bytes is not None
        assert plan.peak_bytes == plan.unplanned_bytes <= plan.budget_bytes
        assert plan.grouping == "as it is"
        assert "The function meets the budget as it is: nothing is recomputed." in plan.notes
    assert_close(jax.grad(plan.apply(mlp))(*arguments()), jax.grad(mlp)(*arguments()), 0)


def test_a_function_whose_activations_are_not_its_bulk() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w))

    plan = ar.plan(loss, jnp.ones((200, 200)), jnp.ones((1, 200)), budget="100%")
    (note,) = [n for n in plan.notes if "not the bulk" in n]
    assert "recomputation cannot go below arguments and outputs" in note
    assert not any("bulk" in n for n in planned(scanned, MODELS[scanned]).notes)


# ------------------------------------------------------------------------------------------------------- ways to call it


def test_auxiliary_output() -> None:
    args = args_of(with_aux)
    plan = ar.plan(with_aux, *args, budget="60%", has_aux=True, effort="fast")
    assert plan.has_aux
    assert plan.decisions
    gradient = jax.value_and_grad(plan.apply(with_aux), has_aux=True)
    use = ar.measure(gradient, *args, compiler_options=plan.compiler_options)
    assert use.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    (value, aux), grads = gradient(*args)
    (want_value, want_aux), want_grads = jax.value_and_grad(with_aux, has_aux=True)(*args)
    assert aux.keys() == want_aux.keys()
    assert_close((value, aux, grads), (want_value, want_aux, want_grads))


@pytest.mark.parametrize(
    ("argnums", "resolved"), [(0, (0,)), (-2, (1,)), ([1], (1,)), ((0, 2), (0, 2)), ((-1, 0), (2, 0))]
)
def test_argnums(argnums: Any, resolved: tuple[int, ...]) -> None:
    ws, x = arguments()
    args = (ws[0], x, jnp.float32(1.1))
    # One of them is searched for; for the others the compiled signature tells.
    budget = "60%" if argnums == (0, 2) else "100%"
    plan = ar.plan(in_three, *args, budget=budget, argnums=argnums, effort="fast")
    assert plan.argnums == resolved
    assert bool(plan.decisions) == (budget != "100%")
    gradient = jax.value_and_grad(plan.apply(in_three), argnums)
    use = ar.measure(gradient, *args, compiler_options=plan.compiler_options)
    assert use.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert use.output_bytes == plan.memory.output_bytes
    if plan.decisions:
        assert_close(gradient(*args), jax.value_and_grad(in_three, argnums)(*args), 1e-5)


def test_keywords_when_applied() -> None:
    ws, x = args_of(scanned)
    apply = planned(scanned, MODELS[scanned]).apply(scanned)
    want = jax.grad(scanned)(ws, x)
    assert_close(jax.grad(apply)(ws, x=x), want)
    assert_close(jax.grad(lambda ws: apply(ws=ws, x=x))(ws), want)
    with_default = ar.plan(in_three, ws[0], x, 1.1, budget="60%", effort="fast").apply(in_three)
    assert_close(with_default(ws[0], x, 1.1), in_three(ws[0], x, 1.1))
    with pytest.raises(ar.PlanMismatchError):
        with_default(ws[0], x, 1.1, shift=0.5)


def test_shapes_in_place_of_arrays() -> None:
    _candidates._RECORDS.clear()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args_of(scanned))
    plan = ar.plan(scanned, *shapes, budget="60%", effort="fast")
    _candidates._RECORDS.clear()
    assert plan.decisions == ar.plan(scanned, *args_of(scanned), budget="60%", effort="fast").decisions
    assert_close(jax.grad(plan.apply(scanned))(*args_of(scanned)), jax.grad(scanned)(*args_of(scanned)))


def test_any_callable() -> None:
    class Model:
        def __call__(self, ws: Any, x: Any) -> Any:
            return mlp(ws, x)

    args = arguments()
    plan = planned(mlp, MODELS[mlp])
    for fun in (Model(), functools.partial(mlp), jax.jit(mlp), lambda ws, x: mlp(ws, x)):
        assert_close(plan.apply(fun)(*args), mlp(*args))


def test_an_applied_plan_looks_like_the_function() -> None:
    apply = planned(mlp, MODELS[mlp]).apply(mlp)
    assert apply.__name__ == "mlp"
    assert apply.__wrapped__ is mlp


def test_closed_over_arrays_and_tracers() -> None:
    """The constants of a function may be tracers of whatever surrounds the plan; a second trace must not see the first's."""
    ws, x = args_of(scanned)

    def of(x: Any) -> Callable[..., Any]:
        return lambda ws: scanned(ws, x)

    plan = ar.plan(of(x), ws, budget="60%", effort="fast")
    assert plan.decisions
    assert_close(jax.grad(plan.apply(of(x)))(ws), jax.grad(of(x))(ws))
    outer = jax.jit(lambda ws, x: jax.grad(plan.apply(of(x)))(ws))
    for y in (x, 2 * x):
        assert_close(outer(ws, y), jax.grad(scanned)(ws, y))
    xs = jnp.stack([x, 2 * x])
    batched = interpreted(jax.vmap(lambda x: jax.grad(plan.apply(of(x)))(ws)))(xs)
    assert_close(batched, interpreted(jax.vmap(lambda x: jax.grad(scanned)(ws, x)))(xs), 1e-5)


# -------------------------------------------------------------------------------------------------------- transformations


@pytest.mark.parametrize("fun", [mlp, scanned])
def test_under_jit_vmap_and_checkpoint(fun: Any) -> None:
    ws, x = args_of(fun)
    apply = planned(fun, MODELS[fun]).apply(fun)
    xs = jnp.stack([x, 0.5 * x])

    def batch(f: Any) -> Any:
        return interpreted(jax.vmap(jax.grad(f), (None, 0)))(ws, xs)

    assert_close(batch(apply), batch(fun))
    for wrap in (jax.jit, jax.checkpoint, ar.checkpoint):
        assert_close(interpreted(jax.grad(wrap(apply)))(ws, x), interpreted(jax.grad(fun))(ws, x))
    assert_close(
        jax.jit(jax.grad(lambda ws, x: 2 * apply(ws, x)))(ws, x), jax.grad(lambda *a: 2 * fun(*a))(ws, x)
    )


@pytest.mark.parametrize("fun", [mlp, scanned])
def test_grad_of_grad(fun: Any) -> None:
    ws, x = args_of(fun)
    apply = planned(fun, MODELS[fun]).apply(fun)

    def curvature(f: Any) -> Any:
        return interpreted(
            jax.grad(lambda ws, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(ws, x))))
        )(ws, x)

    assert_close(curvature(apply), curvature(fun), 1e-5)


def test_forward_mode() -> None:
    ws, x = arguments()
    apply = planned(mlp, MODELS[mlp]).apply(mlp)

    def pushed(f: Any) -> Any:
        return interpreted(lambda x: jax.jvp(lambda x: f(ws, x), (x,), (jnp.cos(x),)))(x)

    assert_close(pushed(apply), pushed(mlp))


# ------------------------------------------------------------------------------------------------------------ the search

_FRESH = """
import sys
sys.path[:0] = {path!r}
from plan import test_plan
plan = test_plan.planned(test_plan.scanned, test_plan.MODELS[test_plan.scanned])
print(plan.peak_bytes, plan.recompute_flops, plan.fingerprint, repr(plan.decisions))
"""


def test_equal_calls_give_equal_plans() -> None:
    _candidates._RECORDS.clear()
    one, two = (ar.plan(scanned, *args_of(scanned), budget="60%", effort="fast") for _ in range(2))
    assert one.decisions == two.decisions
    assert one.peak_bytes == two.peak_bytes
    assert two.compiles == 0
    _candidates._RECORDS.clear()
    again = ar.plan(scanned, *args_of(scanned), budget="60%", effort="fast")
    assert again.decisions == one.decisions
    code = _FRESH.format(path=[p for p in sys.path if p])
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stderr
    assert (
        fresh.stdout.strip() == f"{one.peak_bytes} {one.recompute_flops} {one.fingerprint} {one.decisions!r}"
    )


def _plans(fun: Any, budgets: list[int]) -> dict[int, ar.Plan]:
    """A plan for each budget that can be met. Those that cannot are below all others, and say what would do."""
    plans: dict[int, ar.Plan] = {}
    for budget in budgets:
        try:
            plans[budget] = ar.plan(fun, *args_of(fun), budget=budget, effort="fast")
        except ar.InfeasibleBudgetError as error:
            floor = error.floor_bytes
            if floor <= budget:
                pytest.fail(f"a budget of {budget} is above the floor {floor}")
    assert all(b < min(plans) for b in budgets if b not in plans)
    return plans


@pytest.mark.parametrize(("fun", "lowest"), [(branching, 0.5), (scanned, 0.4)])
def test_budgets_are_monotone(fun: Any, lowest: float) -> None:
    """In one record: a smaller budget never has a higher peak, a larger one never recomputes more.

    The record grows while budgets are asked for, so what it says is compared when all have been.
    """
    _candidates._RECORDS.clear()
    whole = ar.measure(jax.value_and_grad(fun), *args_of(fun)).peak_bytes
    budgets = [int(whole * (lowest + (1.02 - lowest) * i / 7)) for i in range(8)]
    _plans(fun, budgets if fun is branching else budgets[::-1])
    plans = _plans(fun, budgets)
    assert len(plans) >= 4
    assert plans[max(plans)].decisions == ()
    for small, large in itertools.pairwise(sorted(plans)):
        assert plans[small].peak_bytes <= plans[large].peak_bytes
        assert plans[small].recompute_flops >= plans[large].recompute_flops
        assert plans[small].compiles == 0


class Recorded:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[tuple[str, int]] = []

    def compiling(self, what: str) -> None:
        self.started.append(what)

    def compiled(self, what: str, use: ar.MemoryUse) -> None:
        assert self.started[-1] == what
        self.ended.append((what, use.peak_bytes))


def test_progress_is_told_of_each_compilation() -> None:
    _candidates._RECORDS.clear()
    seen = Recorded()
    plan = ar.plan(scanned, *args_of(scanned), budget=MODELS[scanned], effort="fast", progress=seen)
    assert len(seen.started) == len(seen.ended) == plan.compiles
    assert seen.started[0] == "no recomputation"
    assert seen.ended[0][1] == plan.unplanned_bytes
    assert plan.peak_bytes in [peak for _, peak in seen.ended]


# ------------------------------------------------------------------------------------------------------------ mismatches


def _refused(plan: ar.Plan, fun: Any, *args: Any) -> str:
    with pytest.raises(ar.PlanMismatchError) as caught:
        plan.apply(fun)(*args)
    text = str(caught.value)
    assert text.startswith(f"this plan was made for `{plan.function}` with")
    assert text.endswith("Cheapest fix: call autoremat.plan again for this function and these shapes.")
    return text


def test_another_function() -> None:
    ws, x = arguments()
    plan = planned(mlp, MODELS[mlp])

    def other(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    text = _refused(plan, other, ws, x)
    assert "was applied to `other` with" in text
    assert "They differ first at operation 1: planned for `sin`, got `tanh`." in text


def test_other_shapes() -> None:
    ws, x = arguments()
    plan = planned(mlp, MODELS[mlp])
    text = _refused(plan, mlp, ws, x[:64])
    count = len(jax.tree.leaves((ws, x)))
    assert (
        f"The arguments differ, first in array {count - 1} of {count}: planned for float32[{BATCH}, {WIDTH}], "
        f"got float32[64, {WIDTH}]." in text
    )
    assert (
        f"first in array 0 of {count}: planned for float32[{WIDTH}, {WIDTH}], got bfloat16[{WIDTH}, {WIDTH}]"
        in _refused(plan, mlp, jax.tree.map(lambda w: w.astype(jnp.bfloat16), ws), x)
    )


def test_another_number_of_layers() -> None:
    ws, x = arguments()
    text = _refused(planned(mlp, MODELS[mlp]), mlp, ws[:2], x)
    assert f"The arguments differ, first in array 2; planned for {len(ws) + 1}, got 3: planned for" in text


def test_another_length_of_a_loop() -> None:
    def loop(x: Any, *, length: int) -> Any:
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=length)[0])

    x = jnp.ones((64, 64))
    plan = ar.plan(functools.partial(loop, length=3), x, budget="100%")
    plan.apply(functools.partial(loop, length=3))(x)
    text = _refused(plan, functools.partial(loop, length=4), x)
    assert "The first operations are the same; their shapes, parameters or number differ." in text


# -------------------------------------------------------------------------------------------------------------- frontier


def test_frontier() -> None:
    found = ar.frontier(mlp, *arguments())
    assert found.function == "mlp"
    assert found.unplanned_bytes is None
    assert len(found) == len(list(found)) == len(found.points) > 3
    assert found.points[0].recompute_flops == 0
    assert found.points[0].recompute_seconds == 0
    assert found.points[0].vertex
    assert sum(p.vertex for p in found) > 1
    for a, b in itertools.pairwise(found):
        assert a.kept_bytes > b.kept_bytes
        assert a.recompute_seconds <= b.recompute_seconds
        assert a.peak_bytes is None
    assert found.ops > 10
    assert found.seconds >= found.trace_seconds > 0
    assert found.grouping


def test_compiled_frontier() -> None:
    found = ar.frontier(scanned, *args_of(scanned), compiled=3)
    peaks = [p.peak_bytes for p in found if p.peak_bytes is not None]
    assert 2 <= len(peaks) <= 3
    assert found.points[0].peak_bytes is not None
    assert found.points[-1].peak_bytes is not None
    assert found.points[-1].peak_bytes < found.points[0].peak_bytes
    assert found.unplanned_bytes is not None
    assert peaks[-1] < found.unplanned_bytes


def test_frontier_without_choice() -> None:
    found = ar.frontier(lambda x: jnp.sum(2 * x), jnp.ones(3))
    assert len(found) == 0 or [p.recompute_flops for p in found] == [0]


def test_the_hull_of_a_frontier_is_convex() -> None:
    found = [p for p in ar.frontier(mlp, *arguments()) if p.vertex]
    slopes = [
        (b.recompute_seconds - a.recompute_seconds) / (a.kept_bytes - b.kept_bytes)
        for a, b in itertools.pairwise(found)
    ]
    assert all(s <= t * (1 + 1e-9) for s, t in itertools.pairwise(slopes))


@pytest.mark.parametrize(("length", "spared"), [(2, False), (64, True)])
def test_a_small_last_stage_may_be_left_as_it_is(length: int, *, spared: bool) -> None:
    """Small beside what the loop can give back; of two iterations it is not."""

    def fun(w: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda c, _: (layer(c, w), None), x, None, length=length)
        return jnp.exp(jnp.sin(x)).sum()

    ws, x = arguments()
    traced = trace(fun, (ws[0], x), (0,))
    chip = device("tpu:v5e")
    assert not any("last stage" in v.name for v in build_variants(traced, chip, ("barrier",)))
    found = list(build_variants(traced, chip, ("barrier",), spared_tail=True))
    assert [type(n) for n in found[0].path.program.nodes] == [Loop, Stage]
    without = [v for v in found if "last stage as it is" in v.name]
    assert bool(without) == spared
    assert all([type(n) for n in v.path.program.nodes] == [Loop] for v in without)
    found = list(build_variants(traced, chip, ("barrier",), products_alone=True))
    (alone,) = [v for v in found if v.doubt]
    assert "all but products for nothing" in alone.name
    assert [type(n) for n in alone.path.program.nodes] == ([Loop] if spared else [Loop, Stage])


def test_products_alone_are_worth_keeping() -> None:
    """So solved, attention first keeps what `dots_saveable` does, two products; what it recomputes has its price all the same."""

    def turn(x: Any) -> Any:
        return x * jnp.cos(x) + jnp.concatenate([x[:, 32:], x[:, :32]], 1)

    def fun(q: Any, k: Any) -> Any:
        return jnp.sin(jax.nn.softmax(turn(q @ k.T), -1) @ k).sum()

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace(fun, (shape, shape), (0,))
    chip = device("gpu:h100")
    assert not any("products" in v.name for v in build_variants(traced, chip, ("barrier",)))
    found = list(build_variants(traced, chip, ("barrier",), products_alone=True))
    (alone,) = [v for v in found if "all but products for nothing" in v.name]
    first = alone.path.states[0]
    assert first.nbytes == 2 * 64 * 64 * 4
    assert first.cost > 0
    assert first.flops > 64 * 64  # more than one operation is run again

    def decided(variant: Variant, index: int) -> Decisions:
        return decide(variant.path.program, variant.path.states[index], variant.fence, LoopFences())

    one, other = decided(alone, -1), decided(found[0], -1)
    assert one != other
    assert without_prices(one) == without_prices(other)
    assert without_prices(decided(alone, 0)) != without_prices(other)


def test_unrolled_layers_give_back_what_is_recomputed() -> None:
    """On every version, also where the compiler drops barriers before it schedules (CPU, JAX 0.10)."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w) * jax.nn.gelu(x))

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(x, w)
        return (x**2).mean()

    args = [jnp.eye(128) * 0.5] * 8, jax.random.normal(jax.random.key(0), (512, 128))
    plan = ar.plan(loss, *args, budget="53%", effort="fast")
    assert plan.peak_bytes <= plan.budget_bytes
    np.testing.assert_allclose(
        jax.grad(plan.apply(loss))(*args)[0], jax.grad(loss)(*args)[0], rtol=1e-5, atol=1e-9
    )


class Impatient:
    """Progress that ends the search once a plan fits."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.enough = self.ended = False

    def compiling(self, what: str) -> None:
        if self.enough:
            self.ended = True
            raise KeyboardInterrupt

    def compiled(self, what: str, use: ar.MemoryUse) -> None:
        self.enough = use.peak_bytes <= self.budget


def test_an_interrupt_ends_with_the_best_plan_so_far() -> None:
    def f(w: Any, x: Any) -> Any:
        for _ in range(6):
            x = jnp.sin(jnp.cos(x @ w)) * 1.25
        return x.sum()

    w, x = jnp.eye(32), jnp.ones((4096, 32))
    whole = ar.measure(jax.value_and_grad(f), w, x).peak_bytes
    budget = int(0.7 * whole)
    progress = Impatient(budget)
    plan = ar.plan(f, w, x, budget=budget, effort="optimal", progress=progress)
    assert plan.peak_bytes <= budget
    # With some compilers nothing is left to try once a plan fits.
    assert any("The search was interrupted after" in note for note in plan.notes) == progress.ended
    again = ar.plan(f, w, x, budget=budget, effort="optimal")
    assert again.recompute_flops <= plan.recompute_flops
    assert not any("interrupted" in note for note in again.notes)
