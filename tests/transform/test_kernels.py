"""A fused attention kernel with a rule of its own: what it names is kept, and then it does not run again.

The kernel is Pallas's, interpreted. As in flash attention, its forward pass returns the output and the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import autoremat as ar
from autoremat._compat import open_jaxpr
from autoremat.transform._jaxpr import subjaxprs

Q = jax.random.normal(jax.random.key(0), (16, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
both = ar.checkpoint_policies.save_only_these_names("out", "lse")


def _kernel(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    scores = q[...] @ k[...].T
    total = jax.nn.logsumexp(scores, axis=-1)
    out[...] = jnp.exp(scores - total[:, None]) @ v[...]
    lse[...] = total


def _run(q: Any, k: Any, v: Any) -> Any:
    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(q.shape[:1], q.dtype))
    out, lse = pl.pallas_call(_kernel, out_shape=shapes, interpret=True)(q, k, v)
    return ar.checkpoint_name(out, "out"), ar.checkpoint_name(lse, "lse")


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    return _run(q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> Any:
    out, lse = _run(q, k, v)
    return out, (q, k, v, out, lse)


def _backward(residuals: Any, ct: Any) -> Any:
    q, k, v, out, lse = residuals
    weights = jnp.exp(q @ k.T - lse[:, None])
    d_scores = weights * (ct @ v.T - (ct * out).sum(-1, keepdims=True))
    return d_scores @ k, d_scores.T @ q, weights.T @ ct


attention.defvjp(_forward, _backward)


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


def block(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: x + jnp.tanh(attend(x @ w, jnp.sin(x @ w), x)) @ w


def loss(fun: Callable[..., Any], *, scan: bool) -> Callable[..., Any]:
    def looped(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (fun(x, w), None), x, None, length=2)[0].sum()

    return looped if scan else lambda x, w: fun(fun(x, w), w).sum()


def kernels(gradient: Any, *args: Any) -> int:
    """How many calls of a kernel the program holds, those in loops once."""

    def count(jaxpr: Any) -> int:
        return sum(
            e.primitive.name == "pallas_call" or sum(map(count, subjaxprs(e)))
            for e in open_jaxpr(jaxpr)[0].eqns
        )

    return count(jax.make_jaxpr(gradient)(*args))


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, True),
        (both, False),
        (ar.checkpoint_policies.save_only_these_names("out"), True),  # the log-sum-exp is missing
        (ar.checkpoint_policies.everything_saveable, False),
        (lambda prim, *_, **__: prim.name == "pallas_call", False),
    ],
    ids=["nothing", "both names", "one name", "everything", "the kernel"],
)
def test_a_named_kernel_does_not_run_again(policy: Any, again: bool, scan: bool) -> None:
    of = lambda attend, c: jax.grad(loss(c(block(attend)), scan=scan), (0, 1))
    ours = of(attention, lambda f: ar.checkpoint(f, policy=policy))
    for got, expected in zip(jax.jit(ours)(Q, W), of(plain_attention, lambda f: f)(Q, W), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    calls = 1 if scan else 2
    assert kernels(ours, Q, W) == calls * (1 + again)


def test_the_kernel_under_vmap_and_as_one_of_several_heads() -> None:
    policy = both
    heads = jnp.stack([Q, jnp.cos(Q)])

    def of(attend: Callable[..., Any], c: Callable[..., Any]) -> Any:
        return jax.grad(lambda x, w: jax.vmap(c(block(attend)), (0, None))(x, w).sum(), (0, 1))

    ours = of(attention, lambda f: ar.checkpoint(f, policy=policy))
    for got, expected in zip(
        jax.jit(ours)(heads, W), of(plain_attention, lambda f: f)(heads, W), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    assert kernels(ours, heads, W) == 1


# ------------------------------------------------------------------------------------------------------ JAX's own checks


def _gradients(f: Callable[..., Any]) -> Any:
    def step(c: Any, _: Any) -> Any:
        return lax.cond(c.sum() > 0, f, lambda c: 0.5 * f(c), c), None

    return jax.jit(jax.grad(lambda x: lax.scan(step, x, None, length=3)[0].sum()))(Q)


@pytest.mark.parametrize(
    "flag", ["jax_enable_checks", "jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks"]
)
def test_under_the_checks_of_jax(flag: str) -> None:
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        for policy in (None, ar.checkpoint_policies.everything_saveable):
            f = ar.checkpoint(lambda x: jnp.sin(jnp.tanh(x) + 1.0), policy=policy)
            got, expected = _gradients(f), _gradients(lambda x: jnp.sin(jnp.tanh(x) + 1.0))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    finally:
        jax.config.update(flag, before)


def test_debug_nans_finds_what_is_not_a_number_in_the_backward_pass() -> None:
    f = ar.checkpoint(lambda x: jnp.sqrt(jnp.sin(x)).sum())
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(jax.grad(lambda x: f(x) * 0.0))(jnp.zeros(3)).block_until_ready()
