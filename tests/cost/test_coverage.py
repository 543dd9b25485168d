"""Nothing that ordinary models trace to is unknown. Warnings are errors here, so a missing rule fails."""

import jax
import jax.numpy as jnp
import jax.random
import jax.scipy as jsp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autoremat.cost import device, graph_costs
from autoremat.cost._rules import valid_taps
from autoremat.graph import check
from autoremat.graph._trace import trace_graph

X = jax.ShapeDtypeStruct((32, 32), "float32")
V5E = device("tpu:v5e")


def assert_known(fun, *args):
    graph, _ = trace_graph(jax.make_jaxpr(fun)(*args))
    check(graph)
    assert sum(graph_costs(graph, V5E)) > 0


ACTIVATIONS = [
    "relu",
    "gelu",
    "silu",
    "softplus",
    "elu",
    "selu",
    "celu",
    "glu",
    "log_softmax",
    "softmax",
    "logsumexp",
    "standardize",
    "hard_swish",
    "mish",
    "squareplus",
    "sparse_plus",
    "log_sigmoid",
    "relu6",
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name):
    fun = getattr(jax.nn, name)
    assert_known(jax.grad(lambda x: fun(x).sum()), X)


def test_attention():
    def attend(x):
        q = x.reshape(1, 32, 4, 8)
        return jax.nn.dot_product_attention(q, q, q, is_causal=True).sum()

    assert_known(jax.value_and_grad(attend), X)


DRAWS = {
    "normal": lambda k: jax.random.normal(k, (8,)),
    "gamma": lambda k: jax.random.gamma(k, 2.0, (8,)),
    "categorical": lambda k: jax.random.categorical(k, jnp.ones((4, 4))),
    "permutation": lambda k: jax.random.permutation(k, 10),
    "poisson": lambda k: jax.random.poisson(k, 3.0, (2,)),
    "truncated_normal": lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (3,)),
    "orthogonal": lambda k: jax.random.orthogonal(k, 4),
    "choice": lambda k: jax.random.choice(k, 10, (3,), replace=False),
    "binomial": lambda k: jax.random.binomial(k, 5, 0.3, (2,)),
    "multivariate_normal": lambda k: jax.random.multivariate_normal(k, jnp.zeros(2), jnp.eye(2)),
    "bernoulli": jax.random.bernoulli,
}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers(name, impl):
    if (name, impl) == ("poisson", "rbg") or (name, impl) == ("poisson", "unsafe_rbg"):
        pytest.skip("JAX implements poisson for threefry2x32 alone")
    assert_known(DRAWS[name], jax.random.key(0, impl=impl))


LINALG = {
    "svd": jnp.linalg.svd,
    "qr": jnp.linalg.qr,
    "eigh": jnp.linalg.eigh,
    "eig": jnp.linalg.eig,
    "inv": jnp.linalg.inv,
    "cholesky": jnp.linalg.cholesky,
    "det": jnp.linalg.det,
    "lstsq": lambda x: jnp.linalg.lstsq(x, x),
    "expm": jsp.linalg.expm,
    "schur": jsp.linalg.schur,
    "hessenberg": lax.linalg.hessenberg,
    "tridiagonal": lax.linalg.tridiagonal,
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[0], x[1], x[2], x[:, :2]),
    "sqrtm": jsp.linalg.sqrtm,
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra(name):
    assert_known(LINALG[name], X)


ARRAYS = {
    "sort": jnp.sort,
    "argsort": jnp.argsort,
    "median": jnp.median,
    "cumsum": jnp.cumsum,
    "cumlogsumexp": lax.cumlogsumexp,
    "unique": lambda x: jnp.unique(x, size=4),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "fft": jnp.fft.fft2,
    "irfft": jnp.fft.irfft,
    "interp": lambda x: jnp.interp(x[0], x[1], x[2]),
    "einsum": lambda x: jnp.einsum("ij,jk,kl", x, x, x),
    "histogram": jnp.histogram,
    "searchsorted": lambda x: jnp.searchsorted(x[0], x[1]),
    "nonzero": lambda x: jnp.nonzero(x, size=4),
    "frexp": jnp.frexp,
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x), 0),
    "multiply at": lambda x: x.at[1].mul(2.0),
    "apply at": lambda x: x.at[1].apply(jnp.sin),
    "packbits": lambda x: jnp.packbits(x > 0),
    "resize": lambda x: jax.image.resize(x, (64, 64), "bicubic"),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.zeros(32, int), 4),
    "special": lambda x: jsp.special.betainc(x, x, x) + jsp.special.gammainc(x, x) + jsp.special.zeta(x, x),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "approx_max_k": lambda x: lax.approx_max_k(x, 2),
    "pool": lambda x: jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()
    )(x),
    "platform": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "composite": lambda x: lax.composite(jnp.sin, "my.sin")(x),
    "custom_root": lambda x: lax.custom_root(lambda y: y - x, x, lambda f, y: y, lambda g, y: y),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    assert_known(ARRAYS[name], X)


def test_optimizers():
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones((32, 32))}
    for optimizer in (optax.adamw(1e-3), optax.adafactor(1e-3), optax.lamb(1e-3), optax.lion(1e-3)):
        state = optimizer.init(params)
        assert_known(optimizer.update, params, state, params)


def test_keras_models():
    keras = pytest.importorskip("keras")
    layers = keras.layers
    models = [
        keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(8, 3, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.MaxPooling2D(),
                layers.Conv2DTranspose(8, 3, strides=2),
                layers.Dropout(0.3),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10, activation="softmax"),
            ]
        ),
        keras.Sequential([keras.Input((12,)), layers.Embedding(100, 16), layers.LSTM(16), layers.Dense(4)]),
    ]
    for model in models:
        trained = [v.value for v in model.trainable_variables]
        other = [v.value for v in model.non_trainable_variables]

        def loss(trained, other, x, model=model):
            return (model.stateless_call(trained, other, x, training=True)[0] ** 2).mean()

        x = np.ones((2, *model.input_shape[1:]), np.float32)
        assert_known(jax.value_and_grad(loss), trained, other, x)


@given(
    size=st.integers(0, 9),
    kernel=st.integers(1, 6),
    out=st.integers(0, 9),
    stride=st.integers(1, 4),
    pad_low=st.integers(-3, 5),
    lhs_dilation=st.integers(1, 4),
    rhs_dilation=st.integers(1, 4),
)
def test_taps_are_counted_as_by_enumeration(size, kernel, out, stride, pad_low, lhs_dilation, rhs_dilation):
    real = {i * lhs_dilation for i in range(size)}
    expected = sum(o * stride + k * rhs_dilation - pad_low in real for o in range(out) for k in range(kernel))
    counted = valid_taps(
        size,
        kernel,
        out,
        stride=stride,
        pad_low=pad_low,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
    )
    assert counted == expected
