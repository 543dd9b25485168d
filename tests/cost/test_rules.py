"""The registry: complete for JAX's primitives, loud about others."""

import warnings

import jax.extend.core
import jax.extend.core.primitives
import pytest

from autoremat._errors import UnknownPrimitiveWarning
from autoremat.cost import (
    Cost,
    _registry,
    elementwise,
    graph_costs,
    is_fusible,
    op_cost,
    register_cost,
    registered_primitives,
)
from autoremat.cost import _names as names
from autoremat.cost import device as find_device
from autoremat.graph import Graph, Op, Value

WITHOUT_RULE = {
    "custom_lin": "stands for a tangent while JAX linearizes; no finished jaxpr has it",
}


def public_primitives():
    module = jax.extend.core.primitives
    found = (getattr(module, n) for n in dir(module))
    return sorted({p.name for p in found if isinstance(p, jax.extend.core.Primitive)})


def test_every_public_primitive_has_a_rule_or_a_reason():
    missing = set(public_primitives()) - registered_primitives() - set(WITHOUT_RULE)
    assert not missing, (
        f"no cost rule for {sorted(missing)}; add one to autoremat/cost/_names.py or _rules.py"
    )
    assert len(public_primitives()) > 150


def test_no_exclusion_is_stale():
    assert not set(WITHOUT_RULE) & registered_primitives()
    assert set(WITHOUT_RULE) <= set(public_primitives())


def test_no_primitive_stands_in_two_groups():
    groups = [v for k, v in vars(names).items() if k.isupper()]
    listed = [n for group in groups for n in group]
    assert len(listed) == len(set(listed))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(_registry, "_ENTRIES", dict(_registry._ENTRIES))
    monkeypatch.setattr(_registry, "_WARNED", set())


def one_op(primitive, **kwargs):
    values = (
        Value(id=0, shape=(4, 8), dtype="float32", nbytes=128),
        Value(id=1, shape=(4,), dtype="int8", nbytes=4, producer=0),
    )
    op = Op(id=0, primitive=primitive, inputs=(0,), outputs=(1,), **kwargs)
    return Graph(values=values, ops=(op,), inputs=(0,), outputs=(1,))


@pytest.mark.usefixtures("registry")
class TestUnknown:
    def test_the_warning_names_all_that_is_needed(self):
        graph = one_op("no_kernel", source="model.py:7:3 (attend)")
        with pytest.warns(UnknownPrimitiveWarning) as caught:
            cost = op_cost(graph, graph.ops[0])
        assert cost == Cost(vector_flops=4, bytes_moved=132)
        assert str(caught[0].message) == (
            "No cost rule for the primitive 'no_kernel': (float32[4,8]) -> (int8[4]) at model.py:7:3 (attend).\n"
            "A conservative default is used: one FLOP per output element, every operand and result moved "
            "through\nmemory, not fused. If that is wrong, register a rule before planning:\n\n"
            '    @autoremat.register_cost("no_kernel")\n'
            "    def cost(op, inputs, outputs):\n"
            "        return autoremat.Cost(vector_flops=..., bytes_moved=...)\n"
        )

    def test_it_warns_once_for_each_primitive(self):
        for name in ("one", "two"):
            graph = one_op(name)
            with pytest.warns(UnknownPrimitiveWarning, match=name):
                op_cost(graph, graph.ops[0])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                op_cost(graph, graph.ops[0])

    def test_inner_programs_count_on_top(self):
        graph = one_op("my_loop", inner=(one_op("neg"),), trips=3)
        with pytest.warns(UnknownPrimitiveWarning, match="its inner programs"):
            assert op_cost(graph, graph.ops[0]).flops == 4 + 3 * 4

    def test_it_is_not_fused(self):
        assert not is_fusible("no_kernel")

    def test_a_call_without_a_program_is_unknown(self):
        graph = one_op("custom_partitioning")
        with pytest.warns(UnknownPrimitiveWarning, match="custom_partitioning"):
            op_cost(graph, graph.ops[0])


@pytest.mark.usefixtures("registry")
class TestRegister:
    def test_a_registered_rule_is_used(self):
        @register_cost("no_kernel")
        def rule(op, inputs, outputs):
            return Cost(matrix_flops=2 * inputs[0].size, bytes_moved=outputs[0].nbytes)

        graph = one_op("no_kernel")
        assert op_cost(graph, graph.ops[0]) == Cost(matrix_flops=64, bytes_moved=4)

    def test_a_rule_can_be_replaced(self):
        register_cost("exp", fusible=True)(elementwise(8))
        graph = one_op("exp")
        assert op_cost(graph, graph.ops[0]).flops == 32

    def test_a_rule_for_a_call_hides_its_program(self):
        graph = one_op("custom_vjp_call", inner=(one_op("neg"),))
        cpu = find_device("cpu")
        register_cost("custom_vjp_call")(lambda op, inputs, outputs: Cost(vector_flops=10**6))
        assert graph_costs(graph, cpu) == (10**7,)

    def test_the_decorator_needs_names(self):
        with pytest.raises(TypeError, match="names of primitives"):
            register_cost()
        with pytest.raises(TypeError, match="names of primitives"):
            register_cost(elementwise())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["add", "exp", "eq", "select_n", "broadcast_in_dim", "reshape",
                                  "convert_element_type", "iota", "transpose", "name"])  # fmt: skip
def test_elementwise_work_is_fusible(name):
    assert is_fusible(name)


@pytest.mark.parametrize("name", ["dot_general", "conv_general_dilated", "reduce_sum", "sort", "gather",
                                  "concatenate", "scan", "psum", "pallas_call", "cumsum"])  # fmt: skip
def test_heavy_work_is_not(name):
    assert not is_fusible(name)


def test_costs_add_and_multiply():
    cost = Cost(1, 2, 3, 4)
    assert cost + cost == cost * 2 == 2 * cost == Cost(2, 4, 6, 8)
    assert cost.flops == 3
