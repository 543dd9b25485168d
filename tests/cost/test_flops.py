"""FLOPs against formulas by hand, and against XLA's own analysis where that counts the same thing."""

import jax
import jax.numpy as jnp
import jax.random
import pytest
from jax import lax

from autoremat.cost import graph_cost, graph_flops
from autoremat.graph import check
from autoremat.graph._trace import trace_graph
from autoremat.measure._flops import jaxpr_flops


def flops(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    graph, _ = trace_graph(jaxpr)
    check(graph)
    # Dead code, which derivative rules leave behind, counts in a graph but not in a program.
    assert jaxpr_flops(jaxpr) <= graph_flops(graph)
    return jaxpr_flops(jaxpr)


def cost(fun, *args):
    graph, _ = trace_graph(jax.make_jaxpr(fun)(*args))
    return graph_cost(graph)


def xla_flops(fun, *args):
    analysis = jax.jit(fun).lower(*args).compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def conv(**kwargs):
    options = {
        "window_strides": (1, 1),
        "padding": "VALID",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    } | kwargs
    return lambda x, k: lax.conv_general_dilated(x, k, **options)


DOTS = {
    "matrix": (jnp.matmul, [array(8, 16), array(16, 32)], 2 * 8 * 16 * 32),
    "vector": (jnp.dot, [array(64), array(64)], 2 * 64),
    "batched": (
        lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b),
        [array(2, 3, 8, 4), array(2, 3, 16, 4)],
        2 * 2 * 3 * 8 * 16 * 4,
    ),
    "two contracted": (
        lambda a, b: jnp.einsum("bsd,bse->de", a, b),
        [array(2, 8, 4), array(2, 8, 6)],
        2 * 2 * 8 * 4 * 6,
    ),
}

CONVS = {
    "valid": (conv(), [array(2, 16, 16, 8), array(3, 3, 8, 12)], 2 * 2 * 14 * 14 * 12 * 8 * 9),
    "strided": (
        conv(window_strides=(2, 2)),
        [array(2, 17, 17, 8), array(3, 3, 8, 12)],
        2 * 2 * 8 * 8 * 12 * 8 * 9,
    ),
    "grouped": (
        conv(feature_group_count=4),
        [array(2, 16, 16, 8), array(3, 3, 2, 12)],
        2 * 2 * 14 * 14 * 12 * 2 * 9,
    ),
    "depthwise": (
        conv(feature_group_count=8),
        [array(2, 16, 16, 8), array(3, 3, 1, 8)],
        2 * 2 * 14 * 14 * 8 * 9,
    ),
    "batch groups": (
        conv(batch_group_count=2),
        [array(4, 16, 16, 8), array(3, 3, 8, 12)],
        2 * 2 * 14 * 14 * 12 * 8 * 9,
    ),
    # A 3-wide window over 16 padded to 16 misses one tap at each end: 46 of 48 positions are real.
    "padded": (
        conv(padding="SAME"),
        [array(2, 16, 16, 8), array(3, 3, 8, 12)],
        2 * 2 * 46 * 46 * 12 * 8,
    ),
    # Every second input is a hole: of 31-2 outputs, 15 meet one real tap of three and 14 meet two.
    "transposed": (
        conv(lhs_dilation=(2, 1), padding=[(0, 0), (0, 0)]),
        [array(1, 16, 8, 4), array(3, 1, 4, 4)],
        2 * (15 * 2 + 14 * 1) * 8 * 4 * 4,
    ),
    "dilated": (
        conv(rhs_dilation=(2, 2)),
        [array(2, 16, 16, 8), array(3, 3, 8, 12)],
        2 * 2 * 12 * 12 * 12 * 8 * 9,
    ),
}


@pytest.mark.parametrize("name", [*DOTS, *CONVS])
def test_products_equal_the_formula_and_xla(name):
    fun, args, expected = (DOTS | CONVS)[name]
    counted = cost(fun, *args)
    assert counted.matrix_flops == expected
    assert counted.vector_flops == 0
    assert xla_flops(fun, *args) == pytest.approx(expected, rel=0.01)


def test_the_gradient_of_a_strided_convolution_equals_xla():
    def loss(x, k):
        return (conv(window_strides=(2, 2), padding="SAME")(x, k) ** 2).sum()

    args = [array(2, 15, 15, 4), array(3, 3, 4, 8)]
    grad = jax.grad(loss, (0, 1))
    assert flops(grad, *args) == pytest.approx(xla_flops(grad, *args), rel=0.02)


def test_a_complex_product_is_four_real_ones():
    x = array(4, 4, dtype="complex64")
    assert cost(jnp.matmul, x, x).matrix_flops == 4 * 2 * 4**3


ELEMENTWISE = {
    "add": (jnp.add, 2),
    "multiply": (jnp.multiply, 2),
    "maximum": (jnp.maximum, 2),
    "cube": (lambda x: lax.integer_pow(x, 3), 1),
    "select": (lambda x, y: lax.select(x > y, x, y), 2),
    "chain": (lambda x, y: (x * y + x) / y - y, 2),
    "negate": (jnp.negative, 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_equals_xla(name):
    fun, arity = ELEMENTWISE[name]
    args = [array(128, 128)] * arity
    assert flops(fun, *args) == pytest.approx(xla_flops(fun, *args), rel=0.01)


@pytest.mark.parametrize("fun", [jnp.exp, jnp.tanh, jnp.sin, lax.erf, lax.lgamma, lax.logistic])
def test_a_function_is_one_flop_an_element(fun):
    assert flops(fun, array(16, 8)) == 128


@pytest.mark.parametrize("fun", [jnp.sum, jnp.max, jnp.prod, lambda x: jnp.sum(x, axis=0)])
def test_a_reduction_is_one_flop_an_input_element(fun):
    x = array(256, 64)
    assert flops(fun, x) == 256 * 64
    assert flops(fun, x) == pytest.approx(xla_flops(fun, x), rel=0.02)


MOVES = [
    lambda x: x.reshape(-1),
    lambda x: x.T,
    lambda x: x[1:3],
    lambda x: jnp.broadcast_to(x, (2, 8, 8)),
    lambda x: lax.pad(x, 0.0, [(1, 1, 0)] * 2),
    lambda x: jnp.concatenate([x, x]),
    lambda x: lax.stop_gradient(x),
    lambda x: lax.optimization_barrier(x),
    lambda x: jnp.flip(x),
]


@pytest.mark.parametrize("fun", MOVES)
def test_moving_is_no_arithmetic(fun):
    assert flops(fun, array(8, 8)) == 0


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: jnp.cumsum(x, axis=0), 64),
        (lambda x: lax.sort(x, dimension=0), 64 * 3),
        (lambda x: lax.top_k(x, 2), 64 * 3),
        (lambda x: lax.argmax(x, 0, jnp.int32), 64),
        (lambda x: jnp.fft.fft(x.astype("complex64")), 64 + 5 * 64 * 3),
        (lambda x: jnp.fft.rfft(x), 2.5 * 64 * 3),
        (lambda x: lax.linalg.triangular_solve(x, x, left_side=True), 8**3),
        (lambda x: x.at[jnp.arange(2), 0].add(1.0, mode="promise_in_bounds", unique_indices=True), 2),
    ],
)  # fmt: skip
def test_formulas(fun, expected):
    counted = flops(fun, array(8, 8))
    assert expected <= counted <= expected + 16  # index arithmetic on the side


def test_decompositions_are_cubic():
    fun = lambda x: lax.linalg.lu(x)[0]
    assert flops(fun, array(2, 30, 30)) / flops(fun, array(2, 15, 15)) == pytest.approx(8, rel=0.05)


def test_windows_count_every_position():
    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")

    assert flops(pool, array(8, 8)) == 16 * 4

    def custom(x):
        return lax.reduce_window(x, jnp.float32(0), lambda a, b: a + b * b, (2, 2), (2, 2), "VALID")

    assert flops(custom, array(8, 8)) == 16 * 4 * 2


def test_a_custom_reduction_runs_its_program_for_every_element():
    fun = lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * b, (0,))
    assert flops(fun, array(8, 8)) == 64 * 2


def test_a_ragged_product_counts_each_row_once():
    args = [array(32, 8), array(4, 8, 16), array(4, dtype="int32")]
    assert cost(lax.ragged_dot, *args).matrix_flops == 2 * 32 * 8 * 16


def test_indexing_moves_what_it_touches():
    table, rows = array(1000, 16), array(4, dtype="int32")
    taken = cost(lambda t, i: t.at[i].get(mode="promise_in_bounds"), table, rows)
    assert taken.bytes_moved < 1000 * 16
    updated = cost(lambda t, u: lax.dynamic_update_slice(t, u, (0, 0)), table, array(4, 16))
    assert updated.bytes_moved == 2 * 4 * 16 * 4


class TestControlFlow:
    x = array(8, 8)
    product = 2 * 8**3

    @pytest.mark.parametrize("length", [1, 10])
    def test_scan_counts_its_length(self, length):
        def fun(x):
            return lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=length)[0]

        assert flops(fun, self.x) == length * (self.product + 64)

    def test_scans_nest(self):
        def inner(x):
            return lax.scan(lambda c, _: (c @ c, None), x, length=3)[0]

        def outer(x):
            return lax.scan(lambda c, _: (inner(c), None), x, length=5)[0]

        assert flops(outer, self.x) == 15 * self.product

    def test_while_counts_its_body_once(self):
        fun = lambda x: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ c, x)
        assert flops(fun, self.x) == self.product + 1

    def test_cond_counts_its_dearest_branch(self):
        fun = lambda p, x: lax.cond(p, lambda c: c @ c, jnp.sin, x)
        assert flops(fun, array(dtype="bool"), self.x) == self.product + 1  # the index is converted

    @pytest.mark.parametrize(
        "wrap", [jax.jit, jax.checkpoint, jax.remat, jax.vmap, lambda f: jax.jit(jax.jit(f))]
    )
    def test_calls_are_transparent(self, wrap):
        assert flops(wrap(jnp.sin), self.x) == 64

    def test_custom_derivatives_count_the_primal_once(self):
        jvp = jax.custom_jvp(jnp.sin)
        jvp.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))
        vjp = jax.custom_vjp(jnp.sin)
        vjp.defvjp(lambda x: (jnp.sin(x), x), lambda r, g: (jnp.cos(r) * g,))
        assert flops(jvp, self.x) == flops(vjp, self.x) == 64

    def test_a_linear_solve_runs_its_solve_alone(self):
        def fun(x):
            return lax.custom_linear_solve(lambda v: v @ x, x, lambda mv, b: b / 2, symmetric=True)

        assert flops(fun, self.x) == 64

    def test_a_recomputed_gradient_costs_more(self):
        def loss(f):
            return jax.value_and_grad(lambda x: f(x).sum())

        f = lambda x: jnp.sin(x @ x)
        assert flops(loss(jax.checkpoint(f)), self.x) > flops(loss(f), self.x)

    def test_shard_map_costs_one_shard(self):
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("i")
        fun = jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=spec,
                            check_vma=False)  # fmt: skip
        counted = cost(fun, self.x)
        assert counted.collective_bytes == 2 * 64 * 4
        assert counted.flops == 64

    def test_a_kernel_counts_its_grid(self):
        pl = pytest.importorskip("jax.experimental.pallas")

        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.sin(x_ref[...])

        block = pl.BlockSpec((2, 4), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)

        def fun(x, **kw):
            return pl.pallas_call(kernel, shape, grid=(4, 2), in_specs=[block], out_specs=block, **kw)(x)

        assert flops(fun, self.x) == 64
        assert cost(fun, self.x).bytes_moved == 2 * 64 * 4
        stated = pl.CostEstimate(flops=5, transcendentals=7, bytes_accessed=9)
        assert cost(lambda x: fun(x, cost_estimate=stated), self.x).flops == 12


def test_a_transformer_block_equals_xla():
    def block(p, x):
        h = jax.nn.standardize(x) * p["g"]
        q, k, v = (h @ p[n] for n in ("q", "k", "v"))
        scores = jax.nn.softmax(q @ k.T / 8.0)
        h = x + scores @ v @ p["o"]
        return (h + jax.nn.gelu(h @ p["u"]) @ p["d"]).sum()

    d, s = 64, 128
    p = {n: array(d, d) for n in "qkvo"} | {"u": array(d, 4 * d), "d": array(4 * d, d), "g": array(d)}
    step = jax.value_and_grad(block)
    assert flops(step, p, array(s, d)) == pytest.approx(xla_flops(step, p, array(s, d)), rel=0.05)
