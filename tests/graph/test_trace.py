"""Jaxpr -> Graph: ids, sizes, names, inner programs, and what may run twice."""

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.random
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoremat.graph import check
from autoremat.graph._trace import aval_size, plain, trace_graph


def jaxpr_of(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return closed.jaxpr


def graph_of(fun, *args, **kwargs):
    graph, _ = trace_graph(jaxpr_of(fun, *args), **kwargs)
    return check(graph)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


X = array(4, 4)


class TestNumbering:
    def test_ops_are_equations_and_every_variable_has_a_value(self):
        jaxpr = jaxpr_of(lambda x, y: (jnp.sin(x) * 2.0 + y, x), X, X)
        graph, ids = trace_graph(jaxpr)
        check(graph)
        assert [op.primitive for op in graph.ops] == [e.primitive.name for e in jaxpr.eqns]
        assert [graph.values[i].id for i in graph.inputs] == [ids[v] for v in jaxpr.invars]
        assert graph.outputs == tuple(ids[v] for v in jaxpr.outvars)
        for op, eqn in zip(graph.ops, jaxpr.eqns, strict=True):
            assert op.outputs == tuple(ids[v] for v in eqn.outvars)
            assert op.inputs == tuple(ids[v] for v in eqn.invars if not isinstance(v, jex.Literal))
            assert all(graph.values[i].producer == op.id for i in op.outputs)

    def test_literals_have_no_value(self):
        graph = graph_of(lambda x: x * 2.0, X)
        assert graph.ops[0].inputs == (0,)
        assert len(graph.values) == 2

    def test_constants_are_inputs(self):
        table = np.ones((4, 4), np.float32)
        jaxpr = jaxpr_of(lambda x: x @ table, X)
        graph, ids = trace_graph(jaxpr)
        assert graph.inputs == tuple(ids[v] for v in (*jaxpr.constvars, *jaxpr.invars))
        assert len(graph.inputs) == 2

    def test_a_closed_jaxpr_will_do(self):
        closed = jax.make_jaxpr(jnp.sin)(X)
        assert trace_graph(closed)[0] == trace_graph(closed.jaxpr)[0]

    def test_dropped_results_have_ids_too(self):
        jaxpr = jaxpr_of(lambda x: lax.top_k(x, 2)[0], X)
        (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "top_k")
        dropped = eqn.replace(outvars=[eqn.outvars[0], jex.DropVar(eqn.outvars[1].aval)])
        graph, _ = trace_graph(jaxpr.replace(eqns=[dropped]))
        check(graph)
        assert len(graph.ops[0].outputs) == 2

    def test_demanded_and_free(self):
        jaxpr = jaxpr_of(lambda x, y: jnp.sin(x) + y, X, X)
        product = jaxpr.eqns[0].outvars[0]
        graph, ids = trace_graph(jaxpr, demanded=[product, jaxpr.invars[1]], free=[jaxpr.invars[0]])
        assert graph.demanded == (ids[product], 1)
        assert [v.free for v in graph.values] == [True, False, False, False]
        stranger = jaxpr_of(jnp.cos, X).invars[0]
        with pytest.raises(KeyError):
            trace_graph(jaxpr, demanded=[stranger])
        with pytest.raises(KeyError, match="does not bind"):
            trace_graph(jaxpr, free=[stranger])

    def test_the_source_is_the_users_line(self):
        graph = graph_of(lambda x: x + x, X)
        assert "test_trace.py" in graph.ops[0].source
        assert graph_of(jnp.sin, X, source_of=lambda eqn: "here").ops[0].source == "here"

    def test_names(self):
        graph = graph_of(lambda x: checkpoint_name(jnp.sin(x), "wave") * 2.0, X)
        assert [v.name for v in graph.values] == [None, None, "wave", None]

    def test_graphs_are_plain_data(self):
        def fun(x, k):
            y = lax.conv_general_dilated(x, k, (1, 1), "SAME")
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
            return jnp.sort(y).sum(), lax.ragged_dot(y[0, 0], y[0], jnp.array([2, 2, 2, 2]))

        graph = graph_of(fun, array(1, 4, 8, 8), array(4, 4, 3, 3))
        for op in graph.ops:
            assert_plain(op.params)


def assert_plain(value):
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for v in value:
            assert_plain(v)
    else:
        assert value is None or type(value) in (int, float, str, bool)


def test_plain():
    assert plain((np.int64(3), [None, True], lax.GatherScatterMode.CLIP)) == (3, (None, True), "CLIP")
    assert plain(np.float32(0.5)) == 0.5
    assert plain(dict) == "<class 'dict'>"


SIZES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int4": 0.5,
    "uint4": 0.5,
    "int2": 0.25,
    "uint2": 0.25,
    "float4_e2m1fn": 0.5,
}


class TestBytes:
    @pytest.mark.parametrize("dtype", SIZES)
    def test_every_dtype(self, dtype):
        shape, name, nbytes = aval_size(jax.core.ShapedArray((3, 5), jnp.dtype(dtype)))
        assert (shape, name) == ((3, 5), dtype)
        assert nbytes == -(-15 * SIZES[dtype] // 1)

    def test_wide_types(self):
        with jax.enable_x64(True):
            for dtype, size in (("float64", 8), ("int64", 8), ("uint64", 8), ("complex128", 16)):
                graph = graph_of(lambda x: x + x, array(3, dtype=dtype))
                assert [v.nbytes for v in graph.values] == [3 * size] * 2

    def test_scalars_and_empty_arrays(self):
        graph = graph_of(lambda x, y: (x + x, y + y), array(), array(0, 4))
        assert [v.nbytes for v in graph.values] == [4, 0, 4, 0]
        assert [v.size for v in graph.values] == [1, 0, 1, 0]

    @pytest.mark.parametrize(("impl", "size"), [("threefry2x32", 8), ("rbg", 16), ("unsafe_rbg", 16)])
    def test_keys_count_their_data(self, impl, size):
        key = jax.random.key(0, impl=impl)
        graph = graph_of(lambda k: jax.random.split(k, 3), key)
        assert graph.values[0].nbytes == size
        assert max(v.nbytes for v in graph.values) == 3 * size

    def test_float0_has_no_bytes(self):
        assert aval_size(jax.core.ShapedArray((3,), jax.dtypes.float0)) == ((3,), "float0", 0)

    def test_tokens_have_no_bytes(self):
        graph = graph_of(lambda: lax.create_token())
        assert graph.values[0].nbytes == 0

    def test_references_count_what_they_refer_to(self):
        def fun(x):
            ref = jax.new_ref(x)
            ref[...] = ref[...] + 1.0
            return jax.freeze(ref)

        graph = graph_of(fun, X)
        assert {v.nbytes for v in graph.values} == {64}
        assert all(v.shape == (4, 4) for v in graph.values)

    def test_explicit_sharding_counts_one_shard(self):
        mesh = jax.sharding.AbstractMesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        with jax.sharding.use_abstract_mesh(mesh):
            closed = jax.make_jaxpr(lambda x: x * 2)(
                jax.ShapeDtypeStruct((4, 4), "float32", sharding=sharding)
            )
        graph, _ = trace_graph(closed)
        assert [(v.shape, v.nbytes) for v in graph.values] == [((4, 4), 32)] * 2


class TestInner:
    def test_scan(self):
        def fun(x, xs):
            return lax.scan(lambda c, a: (c @ a, c), x, xs)

        (op,) = graph_of(fun, X, array(5, 4, 4)).ops
        assert op.trips == 5
        assert [o.primitive for o in op.inner[0].ops] == ["dot_general"]
        assert op.params["length"] == 5

    def test_while_has_condition_and_body(self):
        (op,) = graph_of(lambda x: lax.while_loop(lambda c: c[0, 0] < 1, jnp.sin, x), X).ops
        assert len(op.inner) == 2
        assert op.trips == 1
        assert [o.primitive for o in op.inner[1].ops] == ["sin"]

    def test_cond_has_all_branches(self):
        graph = graph_of(lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), array(dtype="int32"), X)
        op = graph.ops[-1]
        assert [g.ops[0].primitive for g in op.inner] == ["sin", "cos", "exp"]

    @pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
    def test_calls(self, wrap):
        (op,) = graph_of(wrap(jnp.sin), X).ops
        assert [o.primitive for o in op.inner[0].ops] == ["sin"]

    def test_leaves_have_none(self):
        for op in graph_of(lambda x: (x.at[0].add(1.0), x @ x), X).ops:
            if op.primitive in ("scatter-add", "dot_general"):
                assert op.inner == ()

    def test_composite_operations_are_seen_through(self):
        graph = graph_of(jnp.searchsorted, array(8), array(3))  # one equation of its own in JAX 0.12
        while len(graph.ops) == 1:
            (graph,) = graph.ops[0].inner
        assert len(graph.ops) > 3

    def test_an_unknown_call_is_searched(self):
        p = jex.Primitive("my_call")
        p.def_abstract_eval(lambda x, **kw: x)
        inner = jax.make_jaxpr(jnp.sin)(X)
        (op,) = graph_of(lambda x: p.bind(x, programs=(inner,)), X).ops
        assert [o.primitive for o in op.inner[0].ops] == ["sin"]


class TestRepeatable:
    @pytest.mark.parametrize(
        ("impl", "expected"), [("threefry2x32", True), ("rbg", False), ("unsafe_rbg", False)]
    )
    def test_bits_by_key_type(self, impl, expected):
        key = jax.random.key(0, impl=impl)

        def dropout(k, x):
            return jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0)

        graph = graph_of(dropout, key, X)
        assert all(op.repeatable for op in graph.ops) is expected
        raw = graph_of(
            lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl=impl)), jax.random.key_data(key)
        )
        assert all(op.repeatable for op in raw.ops) is expected

    def test_it_is_inherited_through_loops_and_calls(self):
        key = jax.random.key(0, impl="rbg")
        draw = jax.jit(lambda k: jax.random.bits(k, (3,)))

        def fun(k, x):
            return lax.scan(lambda c, _: (c, draw(k)), x, length=3)[1], jnp.sin(x)

        graph = graph_of(fun, key, X)
        assert [op.repeatable for op in graph.ops if op.primitive in ("scan", "sin")] == [False, True]

    @pytest.mark.parametrize(("impl", "expected"), [("rbg", True), ("unsafe_rbg", False)])
    def test_splitting(self, impl, expected):
        graph = graph_of(lambda k: jax.random.split(k), jax.random.key(0, impl=impl))
        assert all(op.repeatable for op in graph.ops) is expected

    def test_the_generator_of_the_backend(self):
        state = array(4, dtype="uint32")
        assert not graph_of(lambda s: lax.rng_bit_generator(s, (4,)), state).ops[0].repeatable

    def test_effects(self):
        def fun(x):
            jax.debug.print("{}", x)
            return jnp.sin(x)

        graph = graph_of(fun, X)
        assert [op.repeatable for op in graph.ops] == [False, True]
        assert all(op.repeatable for op in graph_of(fun, X, effect_allowed=lambda e: True).ops)
        assert not graph_of(jax.jit(fun), X).ops[0].repeatable

    def test_named_axes_may_repeat(self):
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("i")
        fun = jax.shard_map(
            lambda x: lax.psum(x, "i") + lax.axis_index("i"),
            mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
        )  # fmt: skip
        (op,) = graph_of(fun, X).ops
        assert op.repeatable
        assert all(o.repeatable for o in op.inner[0].ops)

    def test_effects_that_stay_inside_a_kernel_do_not_count(self):
        pl = pytest.importorskip("jax.experimental.pallas")

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1.0

        (op,) = graph_of(pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 4), "float32")), X).ops
        assert op.repeatable
        assert op.inner
