"""The dependence fence: it changes no value, spreads nothing, and keeps reruns where they belong."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autoremat import checkpoint
from autoremat._compat import new_jaxpr, open_jaxpr
from autoremat.measure import default_compiler_options
from autoremat.transform._decide import KeepDecider
from autoremat.transform._fence import depend_on, fence_points, finish_before, hidden_zero
from autoremat.transform._jaxpr import inline_calls, is_var
from autoremat.transform._linearize import linearize
from autoremat.transform._partition import emit
from autoremat.transform._split import split_eqns
from support.interpreter import interpreted
from support.programs import Program, arguments, as_function, programs

SPECIAL = (0.0, -0.0, 1.0, -2.5, np.nan, np.inf, -np.inf, 3e38, 1.5e-38)
COTANGENTS = (*SPECIAL, 1e-40)


@dataclass(frozen=True)
class Keep:
    """A policy with a fence that keeps a random share of all values."""

    fence: str
    share: float = 0.0
    seed: int = 0
    borders: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def decider(self, joint: Any) -> KeepDecider:
        rng = random.Random(self.seed)
        made = [v for eqn in joint.forward_eqns for v in eqn.outvars]
        return KeepDecider({v: "device" for v in made if rng.random() < self.share})


# -------------------------------------------------------------------------------------------------------------- values


def _bits(x: Any) -> Any:
    if x.dtype == bool:
        return np.asarray(x)
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def _leaf(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray([complex(a, b) for a in SPECIAL for b in SPECIAL], dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(SPECIAL).astype(dtype)
    if dtype is jnp.bool_:
        return jnp.asarray([True, False])
    info = jnp.iinfo(dtype)
    return jnp.asarray([info.min, info.max, 0, 1], dtype)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
        jnp.complex64,
        jnp.int8,
        jnp.int32,
        jnp.uint32,
        jnp.uint8,
        jnp.bool_,
    ],
    ids=lambda d: d.__name__,
)
def test_bits_stay(dtype: Any, jitted: bool) -> None:
    def fenced(x: Any, ct: Any) -> Any:
        return depend_on(x, hidden_zero([ct]))

    run = jax.jit(fenced) if jitted else fenced
    x = _leaf(dtype)
    for ct in COTANGENTS:
        for ct_dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
            y = run(x, jnp.asarray([[ct, 1.0]]).astype(ct_dtype))
            assert y.dtype == x.dtype
            if jnp.issubdtype(dtype, jnp.complexfloating):
                x_parts, y_parts = (np.asarray(v).view(np.float32) for v in (x, y))
                np.testing.assert_array_equal(_bits(y_parts), _bits(x_parts))
            else:
                np.testing.assert_array_equal(_bits(y), _bits(x))


def test_payloads_of_nans_stay_and_subnormals_are_at_most_flushed() -> None:
    bits = np.asarray([0x7FC12345, 0xFFC54321, 1, 0x80000001, 0x007FFFFF], np.uint32)
    y = jax.jit(lambda x, c: depend_on(x, hidden_zero([c])))(jnp.asarray(bits.view(np.float32)), 1.0)
    after = _bits(y)
    np.testing.assert_array_equal(after[:2], bits[:2])
    for i in (2, 3, 4):
        assert after[i] in (bits[i], bits[i] & np.uint32(0x80000000))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_stay(impl: str) -> None:
    key = jax.random.key(5, impl=impl)
    for ct in COTANGENTS:
        same = jax.jit(lambda k, c: depend_on(k, hidden_zero([c])))(key, jnp.float32(ct))
        assert jax.random.key_impl(same) == jax.random.key_impl(key)
        np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(key))


def test_wide_types_stay() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([*SPECIAL, 1e300, 2.0**-1000])
        n = jnp.asarray([2**62 + 1, -(2**63)])
        for ct in (*COTANGENTS, 1e300, -1e308):  # beyond float32
            zero = jax.jit(lambda c: hidden_zero([c]))(jnp.asarray(ct))
            np.testing.assert_array_equal(_bits(depend_on(x, zero)), _bits(x))
            np.testing.assert_array_equal(depend_on(n, zero), n)


def test_the_zero_is_positive_and_reads_every_cotangent() -> None:
    cts = [
        jnp.float32(-3.0),
        jnp.ones((2, 3), jnp.bfloat16),
        jnp.ones((0, 4)),
        jnp.arange(3),
        jnp.complex64(1 - 2j),
    ]
    zero = jax.jit(hidden_zero)(cts)
    assert _bits(zero) == 0
    jaxpr = jax.make_jaxpr(hidden_zero)(cts).jaxpr
    inlined, _ = inline_calls(jaxpr)
    (out,) = inlined.outvars
    read = [_reaches(inlined, v, out) for v in inlined.invars]
    assert read == [True, True, False, False, True]
    assert hidden_zero([jnp.arange(3), jnp.ones((0,))]) is None


def _reaches(jaxpr: Any, start: Any, end: Any) -> bool:
    found = {start}
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return end in found


@pytest.mark.parametrize("ct", SPECIAL)
def test_derivatives_pass_through(ct: float) -> None:
    """Of first order in the leaf, none in the cotangent: not even where that is no number."""

    def fenced(x: Any, c: Any) -> Any:
        return depend_on(x, hidden_zero([c]))

    x = jnp.asarray([1.0, -0.0, np.inf])
    _, pulled = jax.vjp(fenced, x, jnp.float32(ct))
    dx, dc = pulled(jnp.asarray([2.0, 3.0, np.nan]))
    np.testing.assert_array_equal(dx, [2.0, 3.0, np.nan])
    assert dc == 0


# --------------------------------------------------------------------------------------------------- whole gradients


def _block(x: Any, w: Any, n: Any, b: Any, key: Any) -> Any:
    y = jnp.sin(x @ w) * n
    y = jnp.where(b, y, jnp.cos(y) * x)
    return jnp.sin(y) + jax.random.normal(key, x.shape) * y


def _loss(policy: Any) -> Callable[..., Any]:
    block = checkpoint(_block, policy=policy) if policy else _block

    def loss(x: Any, w: Any, n: Any, b: Any, key: Any, scale: Any) -> Any:
        for _ in range(2):
            x = block(x, w, n, b, key)
        return jnp.sum(x) * scale

    return loss


def _arguments(bad: float | None = None) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8)).astype(np.float32)
    x[0, :2] = -0.0, 0.0
    if bad is not None:
        x[1, 3] = bad
    w = rng.normal(size=(8, 8)).astype(np.float32) * 0.3
    return x, w, np.arange(32).reshape(4, 8) % 3, x > 0.2, jax.random.key(3)


@functools.cache
def _gradient(fenced: bool) -> Callable[..., Any]:
    return jax.jit(jax.grad(_loss(Keep("dependence") if fenced else None), argnums=(0, 1)))


@pytest.mark.parametrize("scale", [1.0, -0.0, np.nan, np.inf])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_nothing_spreads(bad: float | None, scale: float) -> None:
    """NaNs and infinities in the leaves and in the cotangent reach what they reach without a checkpoint."""
    args = (*_arguments(bad), jnp.float32(scale))
    for plain, fenced in zip(_gradient(False)(*args), _gradient(True)(*args), strict=True):
        np.testing.assert_allclose(
            fenced, plain, rtol=1e-5, atol=1e-5
        )  # a NaN equals a NaN in the same place


def test_second_order_under_a_fence() -> None:
    args = (*_arguments(), jnp.float32(0.7))

    def curvature(loss: Callable[..., Any]) -> Any:
        return interpreted(jax.grad(lambda x, *rest: jnp.sum(jax.grad(loss)(x, *rest) ** 2)))(*args)

    np.testing.assert_allclose(
        curvature(_loss(Keep("dependence"))), curvature(_loss(None)), rtol=1e-4, atol=1e-5
    )


def test_under_vmap() -> None:
    x, *rest = (*_arguments(), jnp.float32(0.7))
    xs = jnp.stack([jnp.asarray(x), jnp.flip(x, 0)])

    def batched(policy: Any) -> Any:
        grad = jax.grad(_loss(policy))
        return interpreted(jax.vmap(lambda x: grad(x, *rest)))(xs)

    np.testing.assert_allclose(batched(Keep("dependence")), batched(None), rtol=1e-5, atol=1e-6)


def test_what_earlier_stages_wait_for_stays_as_well() -> None:
    """Gradients of parameters finish first; what they are, a NaN among them, changes no other cotangent."""
    for bad in (1.0, np.nan, np.inf, -np.inf, -0.0):
        outs = [jnp.asarray(SPECIAL), jnp.full((2, 2), bad), jnp.asarray([-0.0, np.inf])]
        for carried in ([True, False, True], [False, True, False], [True, True, True], [False] * 3):
            for before, after in zip(
                outs, jax.jit(finish_before, static_argnums=1)(outs, tuple(carried)), strict=True
            ):
                np.testing.assert_array_equal(_bits(after), _bits(before))
    jaxpr, _ = inline_calls(
        jax.make_jaxpr(lambda *xs: finish_before(xs, (True, False)))(1.0, jnp.ones(3)).jaxpr
    )
    assert _reaches(jaxpr, jaxpr.invars[1], jaxpr.outvars[0])
    assert not _reaches(jaxpr, jaxpr.invars[0], jaxpr.outvars[1])


# -------------------------------------------------------------------------------------------------- what is compiled


def _compiled_ops(fun: Callable[..., Any], op: str, *args: Any) -> int:
    lowered = jax.jit(jax.grad(fun)).lower(*args)
    text = lowered.compile(compiler_options={**default_compiler_options("cpu")}).as_text()
    return len(re.findall(rf"\b{op}\(", text or ""))


def _chain(policy: Any) -> Callable[..., Any]:
    def block(x: Any, w: Any) -> Any:
        return jnp.cumsum(x @ w, axis=0) @ w

    wrapped = checkpoint(block, policy=policy) if policy else block

    def loss(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(wrapped(jnp.exp(x), w))
        return jnp.sum(x)

    return loss


def test_the_compiler_keeps_the_reruns() -> None:
    """Products: x, w and c are kept, or c runs again for the gradient in `w`; the derivative in `x` needs none."""
    x, w = jnp.ones((8, 16)), jnp.full((16, 16), 0.1)

    def in_w(policy: Any) -> Callable[..., Any]:
        loss = _chain(policy)
        return lambda w, x: loss(x, w)

    plain = _compiled_ops(in_w(None), "dot", w, x)
    fenced = _compiled_ops(in_w(Keep("dependence")), "dot", w, x)
    kept = _compiled_ops(in_w(Keep("dependence", share=1.0)), "dot", w, x)
    assert kept == plain
    assert fenced == plain + 3  # `x @ w` of each block


def test_the_compiler_keeps_random_bits_that_run_again() -> None:
    def block(x: Any, key: Any) -> Any:
        return jnp.sin(x) * (jax.random.bits(key, x.shape) > jnp.uint32(2**31))

    def loss(policy: Any) -> Callable[..., Any]:
        wrapped = checkpoint(block, policy=policy) if policy else block
        return lambda x, key: jnp.sum(wrapped(x, key))

    x, key = jnp.ones((16, 64)), jax.random.key(0)
    plain = _compiled_ops(loss(None), "xor", x, key)
    assert _compiled_ops(loss(Keep("dependence", share=1.0)), "xor", x, key) == plain
    assert _compiled_ops(loss(Keep("dependence")), "xor", x, key) > plain


# ------------------------------------------------------------------------------------------------------ fence points


def _linear_part(program: Program, share: float, seed: int) -> tuple[Any, int]:
    plain = as_function(program, lambda fun, i: fun)
    vec, mat, ints = arguments(seed)
    opened, consts = open_jaxpr(jax.make_jaxpr(lambda v, m: plain(v, m, ints))(vec, mat))
    jaxpr, hoisted = inline_calls(
        new_jaxpr([*opened.constvars, *opened.invars], opened.outvars, opened.eqns, opened)
    )
    leading = len(consts) + len(hoisted)
    joint = linearize(jaxpr, tuple(i >= leading for i in range(len(jaxpr.invars))))
    split = split_eqns(joint.forward_eqns, joint.demanded, Keep("dependence", share, seed).decider(joint))
    part = emit(joint, split)
    return part.linear, len(part.leaves) + part.num_kept


def _check_points(linear: Any, num_leaves: int) -> int:
    points = fence_points(linear, num_leaves)
    leaves = linear.invars[:num_leaves]
    assert len(points) == num_leaves
    fenced = {v for v, p in zip(leaves, points, strict=True) if p}
    tangents = set(linear.invars[num_leaves:])
    depends, covered, from_leaves = set(tangents), set(fenced), set(leaves)
    reruns = 0
    for eqn in linear.eqns:
        reads = {v for v in eqn.invars if is_var(v)}
        if reads & depends:
            depends.update(eqn.outvars)
            continue
        reruns += 1
        if reads & from_leaves:
            assert reads & covered, f"no fence before {eqn}"
            covered.update(eqn.outvars)
            from_leaves.update(eqn.outvars)
    for v in fenced:  # and none that another one makes superfluous at once
        assert any(v in eqn.invars for eqn in linear.eqns)
    return reruns


_seeds = st.integers(0, 2**16)


@settings(max_examples=15)
@given(program=programs, share=st.sampled_from([0.0, 0.3, 0.7]), seed=_seeds)
def test_every_rerun_is_fenced(program: Program, share: float, seed: int) -> None:
    _check_points(*_linear_part(program, share, seed))


def test_the_smallest_leaf_is_fenced() -> None:
    def linear(big: Any, small: Any, key: Any, t: Any) -> Any:
        r = big * small
        mask = jax.random.bits(key, r.shape) > 3
        return jnp.where(mask, t * jnp.sin(r), jnp.cos(big) * t)

    traced = jax.make_jaxpr(linear)(jnp.ones((8, 8)), jnp.ones((8, 1)), jax.random.key(0), jnp.ones((8, 8)))
    inlined, hoisted = inline_calls(open_jaxpr(traced)[0])
    assert not hoisted
    # `cos(big)` reads the large leaf alone, so that one is fenced too.
    assert fence_points(inlined, 3) == [True, True, True]
    assert _check_points(inlined, 3)


def test_nothing_to_fence() -> None:
    opened = open_jaxpr(jax.make_jaxpr(lambda x, t: x * t)(1.0, 2.0))[0]
    assert fence_points(opened, 1) == [False]
    assert fence_points(opened, 0) == []


def test_fence_points_take_linear_time() -> None:
    def linear(x: Any, t: Any) -> Any:
        for _ in range(4000):
            x = lax.sin(x)
        return x * t

    opened = open_jaxpr(jax.make_jaxpr(linear)(1.0, 2.0))[0]
    start = time.perf_counter()
    assert fence_points(opened, 1) == [True]
    assert time.perf_counter() - start < 1  # 10 ms; with a search for each equation, many seconds
