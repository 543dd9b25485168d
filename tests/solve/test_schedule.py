"""The judge of schedules against the definition, on small graphs and on the published ones."""

from __future__ import annotations

import random

import pytest
from benchmarks.graphs import load
from hypothesis import given
from hypothesis import strategies as st

from autoremat.solve import OpGraph, simulate
from support.opgraphs import FOLDER, PUBLISHED, naive_alive, op_graph, op_graphs

CHAIN = op_graph((4, 1, ()), (3, 2, (0,)), (5, 3, (1,)), (1, 4, (0, 2)))

# Nodes, links, peak, floor, total cost: the table that comes with the published graphs.
TABLE = [
    ("vgg16_train", 45, 87, 15_825_108_992, 13_153_337_344, 15_500),
    ("vgg19_train", 51, 99, 17_058_234_368, 13_153_337_344, 9_493_135),
    ("unet_train", 71, 148, 20_959_461_376, 8_287_944_704, 31_005),
    ("fcn8_train", 73, 149, 13_484_795_520, 8_287_944_704, 10_275_337_746_048),
    ("segnet_train", 77, 151, 19_943_884_288, 8_287_944_704, 4_933_130),
    ("mobilenet_train", 185, 367, 34_701_056_000, 6_635_651_072, 162_080),
    ("resnet50_train", 353, 751, 38_059_356_160, 3_699_376_128, 405_670),
    ("random_layered_n100", 100, 236, 46_319, 20_020, 47_769),
    ("random_layered_n250", 250, 944, 146_840, 87_600, 125_569),
    ("random_layered_n500", 500, 2_461, 284_439, 49_399, 255_302),
    ("random_layered_n1000", 1_000, 5_875, 608_619, 48_950, 497_270),
]


def test_a_schedule_by_hand() -> None:
    seen = simulate(CHAIN, (0, 1, 2, 0, 3))
    assert seen.alive == (4, 7, 8, 9, 10)
    assert (seen.peak_bytes, seen.peak_step, seen.peak_op) == (10, 4, 3)
    assert (seen.cost, seen.recompute_cost, seen.executions) == (11, 1, (2, 1, 1, 1))


def test_without_the_rerun_the_first_value_waits() -> None:
    seen = simulate(CHAIN, range(4))
    assert seen.alive == (4, 7, 12, 10)
    assert (seen.peak_op, seen.recompute_cost) == (2, 0)


def test_the_first_of_equal_peaks_is_named() -> None:
    seen = simulate(op_graph((2, 1, ()), (2, 1, ()), (0, 0, (1,))), (0, 1, 2))
    assert seen.alive == (2, 2, 2)
    assert (seen.peak_step, seen.peak_op) == (0, 0)


@given(op_graphs(), st.integers(0, 2**32))
def test_liveness_is_that_of_the_definition(graph: OpGraph, seed: int) -> None:
    rng = random.Random(seed)
    schedule: list[int] = []
    for v in range(len(graph)):
        schedule += [rng.randrange(v) for _ in range(rng.randrange(3) if v else 0)]
        schedule.append(v)
    seen = simulate(graph, schedule)
    assert list(seen.alive) == naive_alive(graph, schedule)
    assert seen.peak_bytes == max(seen.alive) >= graph.working_set(graph.floor_op)
    assert seen.cost - seen.recompute_cost == graph.base_cost


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((0, 2, 1, 3), "step 1 runs op 2, whose input 1 was not made before"),
        ((0, 1, 2), "1 ops never run, the first is 3"),
        ((), "4 ops never run, the first is 0"),
        ((0, 1, 4), "step 2 runs op 4; the graph has ops 0 to 3"),
        ((-1,), "step 0 runs op -1"),
    ],
)
def test_bad_schedules(schedule: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(CHAIN, schedule)


def test_messages_use_names() -> None:
    graph = OpGraph(nbytes=(1, 1), cost=(1, 1), inputs=((), (0,)), names=("load", "matmul"))
    with pytest.raises(ValueError, match="runs op matmul, whose input load was not made"):
        simulate(graph, (1, 0))


@pytest.mark.parametrize(
    ("nbytes", "cost", "inputs", "message"),
    [
        ((), (), (), "at least one op"),
        ((1,), (1, 2), ((),), "one entry for each op"),
        ((-1,), (1,), ((),), "may not be negative"),
        ((1, 1), (1, 1), ((), (1,)), "reads op 1, which does not come before it"),
        ((1, 1), (1, 1), ((), (0, 0)), "names an input twice"),
    ],
)
def test_bad_graphs(nbytes: tuple[int], cost: tuple[int], inputs: tuple[tuple[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpGraph(nbytes=nbytes, cost=cost, inputs=inputs)


@PUBLISHED
@pytest.mark.parametrize(("name", "nodes", "links", "peak", "floor", "cost"), TABLE)
def test_published_graphs(name: str, nodes: int, links: int, peak: int, floor: int, cost: int) -> None:
    graph = load(FOLDER / f"{name}.json")
    seen = simulate(graph, range(len(graph)))
    assert (len(graph), sum(map(len, graph.inputs))) == (nodes, links)
    assert (seen.peak_bytes, graph.working_set(graph.floor_op)) == (peak, floor)
    assert (seen.cost, seen.recompute_cost) == (cost, 0)
