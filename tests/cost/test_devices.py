"""The roofline, and the device table."""

import dataclasses
import math

import pytest

from autoremat._errors import TargetError
from autoremat.cost import DEVICES, Cost, device, graph_costs, op_picoseconds, picoseconds, seconds
from autoremat.graph import Graph, Op, Value

V5E = device("tpu:v5e")


@pytest.mark.parametrize("name", ["cpu", "tpu:v5e", "tpu:v5p", "tpu:v6e", "gpu:a100-40gb", "gpu:a100-80gb",
                                  "gpu:h100", "gpu:h200"])  # fmt: skip
def test_the_table_is_complete(name):
    found = device(name)
    assert found.name == name
    for f in dataclasses.fields(found):
        value = getattr(found, f.name)
        assert value or f.name == "measured", f"{f.name} of {name} is {value!r}"
    assert not found.measured  # the table holds what makers publish
    assert found.matrix_rate("bfloat16") >= found.vector_flops_per_s
    assert len(found.source) > 40
    hash(found)


def test_names_are_read_leniently_and_refused_helpfully():
    assert device(" TPU:v5e ") is V5E
    with pytest.raises(TargetError, match=r"'tpu:v9'; known are cpu, gpu:a100-40gb"):
        device("tpu:v9")


def test_time_is_the_slower_of_arithmetic_and_memory():
    assert seconds(Cost(matrix_flops=197 * 10**12), V5E, "bfloat16") == pytest.approx(1)
    assert seconds(Cost(matrix_flops=1, bytes_moved=819 * 10**9), V5E, "bfloat16") == pytest.approx(1)
    both = Cost(matrix_flops=197 * 10**12, bytes_moved=819 * 10**9)
    assert seconds(both, V5E, "bfloat16") == pytest.approx(1)


def test_fusible_work_moves_nothing():
    cost = Cost(vector_flops=6_100, bytes_moved=10**12)
    assert seconds(cost, V5E, fusible=True) == pytest.approx(1e-9)
    assert seconds(cost, V5E, fusible=False) > 1


def test_communication_comes_on_top():
    assert seconds(Cost(collective_bytes=10**11), V5E) == pytest.approx(1)


def test_types_without_a_rate():
    assert V5E.matrix_rate("float8_e4m3fn") == V5E.matrix_rate("bfloat16")
    assert V5E.matrix_rate("float64") == V5E.vector_flops_per_s
    h100 = device("gpu:h100")
    assert h100.matrix_rate("float8_e4m3fn") == pytest.approx(2 * h100.matrix_rate("float16"), rel=1e-3)


def test_picoseconds_are_never_zero():
    assert picoseconds(Cost(), V5E) == 1
    assert picoseconds(Cost(), V5E, least=0) == 0
    assert picoseconds(Cost(vector_flops=1), DEVICES["cpu"]) == 10


def test_time_on_cpu_is_proportional_to_flops():
    cpu = device("cpu")
    for cost in (Cost(matrix_flops=1000), Cost(vector_flops=1000), Cost(vector_flops=1000, bytes_moved=4000)):
        assert picoseconds(cost, cpu) == 10_000


def graph(*shapes, op):
    """One op over inputs of the given shapes (the last is the output's), float32."""
    *ins, out = [Value(id=i, shape=s, dtype="float32", nbytes=4 * math.prod(s)) for i, s in enumerate(shapes)]
    out = dataclasses.replace(out, producer=0)
    full = Op(id=0, inputs=tuple(v.id for v in ins), outputs=(out.id,), **op)
    return Graph(values=(*ins, out), ops=(full,), inputs=full.inputs, outputs=full.outputs)


def test_inner_graphs_keep_their_fusion_and_multiply():
    cpu = device("cpu")
    body = graph((8,), (8,), op={"primitive": "sin"})
    (once,) = graph_costs(body, cpu)
    assert once == 80
    scan = graph((8,), (8,), op={"primitive": "scan", "inner": (body,), "trips": 5})
    assert graph_costs(scan, cpu) == (400,)
    call = graph((8,), (8,), op={"primitive": "jit", "inner": (scan,)})
    assert op_picoseconds(call, call.ops[0], cpu) == 400


def test_cond_takes_the_slowest_branch():
    cpu = device("cpu")
    cheap, dear = (graph((8,), (8,), op={"primitive": p}) for p in ("reshape", "sin"))
    cond = graph((8,), (8,), op={"primitive": "cond", "inner": (cheap, dear)})
    assert graph_costs(cond, cpu) == (80,)


def test_an_op_without_elements_is_free():
    empty = graph((0,), (0,), op={"primitive": "sin"})
    assert graph_costs(empty, device("cpu")) == (0,)
    view = graph((8,), (8,), op={"primitive": "reshape"})
    assert graph_costs(view, device("cpu")) == (1,)
