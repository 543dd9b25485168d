"""Times that are measured, and plans that are priced by them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import autoremat as ar
from autoremat.cost import device, graph_costs, graph_flops, op_key, priced
from autoremat.graph._trace import trace_graph
from autoremat.plan._candidates import build_variants
from autoremat.plan._trace import trace

WIDTH = 64


def loss(ws: Any, x: Any) -> Any:
    """Products of two sizes, reductions, a sort in a loop."""
    for w in ws:
        x = x + jax.nn.softmax(x @ w, -1) @ w.T
    x, _ = lax.scan(lambda c, _: (jnp.sort(c, -1) * 0.5, None), x, None, length=3)
    return (x @ jnp.ones((WIDTH, 2 * WIDTH)) ** 2).mean()


ARGS = ([jnp.full((WIDTH, WIDTH), 0.01)] * 3, jnp.ones((256, WIDTH)))


@pytest.fixture(scope="module")
def table() -> ar.CostTable:
    return ar.calibrate(loss, *ARGS, repeats=3)


def test_each_distinct_operation_is_timed_once(table: ar.CostTable) -> None:
    primitives = sorted(key.split(" ")[0] for key in table.seconds)
    assert primitives.count("dot_general") == 2
    assert primitives.count("sort") == 1
    assert "reduce_max" in primitives
    assert "exp" not in primitives  # fused
    assert all(0 < seconds < 10 for seconds in table.seconds.values())
    assert not table.skipped
    assert table.target == device("cpu").name
    assert table.environment["jax"] == jax.__version__
    assert table.matrix_flops_per_s.keys() == {"float32"}
    assert table.memory_bandwidth > 1e6
    assert table.vector_flops_per_s > 1e6


def test_measured_times_are_the_price(table: ar.CostTable) -> None:
    graph, _ = trace_graph(jax.make_jaxpr(lambda x, w: jnp.sin(x @ w))(ARGS[1], ARGS[0][0]))
    measured = table.price(device("cpu"))
    product, sine = graph_costs(graph, measured)
    assert product == pytest.approx(table.seconds[op_key(graph, graph.ops[0])] * 1e12, rel=1e-6)
    assert sine == pytest.approx(256 * WIDTH / table.vector_flops_per_s * 1e12, rel=1e-3)
    other, _ = trace_graph(jax.make_jaxpr(lambda x, w: x @ w)(ARGS[1][:8], ARGS[0][0]))
    assert graph_costs(other, measured) != graph_costs(other, device("cpu"))


def test_a_plan_keeps_what_is_slow(table: ar.CostTable) -> None:
    """Of two results of one size, that of the operation that was measured as slow, against the published rates."""

    def two(x: Any, w: Any) -> Any:
        a = jnp.sort(x, -1)
        b = jnp.exp(x @ w)
        return (jnp.sin(a * a) * jnp.sin(b * b)).sum()

    args = (jnp.ones((2048, WIDTH)), jnp.ones((WIDTH, WIDTH)))
    measured = ar.calibrate(two, *args, repeats=3)
    kept = {}
    for slow in ("sort", "dot_general"):
        seconds = {k: (1.0 if k.startswith(slow + " ") else 1e-7) for k in measured.seconds}
        costs = replace(measured, seconds=seconds)
        points = ar.frontier(two, *args, costs=costs).points
        kept[slow] = [(p.kept_bytes, round(p.recompute_seconds, 2)) for p in points]
    assert kept["sort"] != kept["dot_general"]
    for found in kept.values():
        assert found[-1][1] >= 0.99  # the last one runs it again, and nothing else is worth a hundredth of it
        assert any(cost == 0 for _, cost in found[1:])


def test_plans_say_how_they_are_priced(table: ar.CostTable) -> None:
    plan = ar.plan(loss, *ARGS, budget="90%", costs=table, effort="fast")
    (note,) = (n for n in plan.notes if "priced by times measured on cpu" in n)
    assert f"{len(table.seconds)} of {len(table.seconds)} distinct operations" in note
    assert not any("priced by" in n for n in ar.plan(loss, *ARGS, budget="90%", effort="fast").notes)


def test_a_step_is_priced_by_a_table(table: ar.CostTable) -> None:
    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    found = ar.fit(step, *ARGS, memory="1GiB", costs=table)
    assert any("priced by times measured" in n for n in found.plan.notes)


def test_flops_alone_are_the_price() -> None:
    """On a TPU by the published rates a reduction costs its memory traffic; by FLOPs alone it is nearly free beside a product."""
    chip = device("tpu:v5e")
    graph, _ = trace_graph(jax.make_jaxpr(lambda x, w: (x @ w).max(-1))(ARGS[1], ARGS[0][0]))
    by_flops = graph_costs(graph, priced(chip, "flops"))
    rate = chip.matrix_rate("bfloat16")
    assert sum(by_flops) == pytest.approx(graph_flops(graph) / rate * 1e12, abs=2)
    assert by_flops[1] / by_flops[0] < 0.1 * graph_costs(graph, chip)[1] / graph_costs(graph, chip)[0]
    assert priced(chip, None) is chip


def test_a_plan_by_flops() -> None:
    plan = ar.plan(loss, *ARGS, budget="90%", costs="flops", effort="fast")
    assert any("priced by its FLOPs alone" in n for n in plan.notes)
    traced, chip = trace(loss, ARGS, (0,)), device("tpu:v5e")
    by_flops, by_rates = (
        [s.flops for s in next(build_variants(traced, on, ("barrier",))).path.states]
        for on in (priced(chip, "flops"), chip)
    )
    assert by_flops == sorted(by_flops)
    assert by_rates != by_flops


def test_a_table_is_saved_and_loaded(table: ar.CostTable, tmp_path: Path) -> None:
    table.save(tmp_path / "costs.json")
    assert ar.CostTable.load(tmp_path / "costs.json") == table


def test_operations_that_do_not_run_alone_are_named() -> None:
    def of(x: Any) -> Any:
        return jax.vmap(lambda x: lax.psum(jnp.sin(x), "i"), axis_name="i")(x).sum() + lax.sort(x).sum()

    assert not ar.calibrate(of, jnp.ones((4, 8)), repeats=1).skipped
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    spec = PartitionSpec("i")
    inside = jax.shard_map(
        lambda x: lax.all_gather(jnp.sin(x), "i"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    found = ar.calibrate(lambda x: inside(x).sum(), jnp.ones((4, 8)), repeats=1)
    assert all(reason for reason in found.skipped.values())
    assert any(key.startswith("all_gather") for key in found.skipped)


# ------------------------------------------------------------------------------------------------------------- bad input


def other(x: Any) -> Any:
    return (x @ x.T).sum()


def test_bad_input(table: ar.CostTable, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`autoremat.calibrate\(repeats=...\)` needs at least 1, got 0"):
        ar.calibrate(loss, *ARGS, repeats=0)
    with pytest.raises(ar.DifferentiationError, match="returns one floating-point scalar"):
        ar.calibrate(lambda x: x, ARGS[1])
    with pytest.raises(ar.CostTableError, match=r"measured on 'gpu:h100', and the plan is for 'cpu'"):
        ar.plan(loss, *ARGS, budget="90%", costs=replace(table, target="gpu:h100"))
    with pytest.raises(ar.CostTableError, match=r"`costs` must be a CostTable .* or 'flops'; got 'bytes'"):
        ar.plan(loss, *ARGS, budget="90%", costs="bytes")  # type: ignore[arg-type]
    with pytest.raises(ar.CostTableError, match=r"`costs` must be a CostTable .*; got \{'seconds': 1\}"):
        ar.plan(loss, *ARGS, budget="90%", costs={"seconds": 1})  # type: ignore[arg-type]
    with pytest.raises(ar.CostTableError, match=r"has \d+ operations, and none of the \d+ of `other`"):
        ar.plan(other, jnp.ones((7, 3)), budget="90%", costs=table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no cost table: it is not JSON"),
        ("[]", "is no cost table of version 1: got None"),
        ('{"version": 2}', "is no cost table of version 1: got 2"),
        ('{"version": 1, "target": "cpu"}', "is no cost table: .*missing"),
        ("negative", "times and rates must be positive"),
    ],
)
def test_files_that_are_none(table: ar.CostTable, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    table.save(path)
    if text == "negative":
        text = json.dumps({**json.loads(path.read_text()), "memory_bandwidth": -1.0})
    path.write_text(text)
    with pytest.raises(ar.CostTableError, match=message):
        ar.CostTable.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ar.CostTableError, match=r"cannot read the cost table .*No such file"):
        ar.CostTable.load(tmp_path / "none.json")
