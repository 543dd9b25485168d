"""`autoremat.scan` has the values and derivatives of `jax.lax.scan`, in the memory of so many snapshots and in the least steps."""

# pyright: reportOptionalMemberAccess=false
# (hypothesis types `settings()` as optional)
from __future__ import annotations

import functools
import gc
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoremat as ar
from autoremat.solve import forward_steps
from support.compare import assert_same
from support.interpreter import interpreted
from support.modes import forward_over_reverse, grad_of_vmap, reverse_over_reverse, value_and_grads
from support.programs import N, Program, arguments, as_function, programs, without_reverse_rules

OPTIONS: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def same(actual: Any, expected: Any) -> None:
    assert_same(actual, expected, rtol=1e-9)


def with_snapshots(snapshots: int | None) -> Callable[..., Any]:
    return functools.partial(ar.scan, snapshots=snapshots)


# ---------------------------------------------------------------------------------------------- values and derivatives


def looped(scan: Callable[..., Any], program: Program, length: int, reverse: bool) -> Callable[..., Any]:
    """A loop over a random program: a vector and a counter are carried, a matrix is closed over, rows come in, several kinds go out."""

    def wrap(fun: Callable[..., Any], i: int) -> Callable[..., Any]:
        return ar.checkpoint(fun, prevent_cse=bool(i % 2))

    step = as_function(program, wrap)

    def fun(vec: Any, mat: Any, ints: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            v, n = carry
            value, (last, flags, _) = step(jnp.sin(v + 0.1 * x), mat, (ints + n) % N)
            return (jnp.tanh(last + 0.3 * v), n + 1), (value, flags[0], n, {"x": x * last})

        rows = jnp.outer(jnp.cos(jnp.arange(length)), vec)
        (v, n), (values, flags, counts, more) = scan(body, (vec, 0), rows, reverse=reverse)
        weights = jnp.sin(jnp.arange(length))
        return v.sum() + (values * weights).sum() + (more["x"] ** 2).sum(), (v, n, flags, counts)

    return fun


def forward_mode(fun: Callable[..., Any]) -> Callable[..., Any]:
    def pushed(vec: Any, mat: Any, ints: Any) -> Any:
        return jax.jvp(lambda v, m: fun(v, m, ints), (vec, mat), (jnp.cos(vec), jnp.sin(mat)))[0]

    return pushed


def linearized(fun: Callable[..., Any]) -> Callable[..., Any]:
    def pushed(vec: Any, mat: Any, ints: Any) -> Any:
        value, push = jax.linearize(lambda v: fun(v, mat, ints)[0], vec)
        return value, push(jnp.cos(vec)), push(jnp.sin(vec))

    return pushed


def vmap_of_grad(fun: Callable[..., Any]) -> Callable[..., Any]:
    def batched(vec: Any, mat: Any, ints: Any) -> Any:
        vecs = jnp.stack([vec, jnp.flip(vec)], axis=1)
        return jax.vmap(jax.grad(lambda v, m: fun(v, m, ints)[0], (0, 1)), (1, None))(vecs, mat)

    return batched


def reverse_over_forward(fun: Callable[..., Any]) -> Callable[..., Any]:
    def second(vec: Any, mat: Any, ints: Any) -> Any:
        def along(v: Any, m: Any) -> Any:
            return jax.jvp(lambda v: fun(v, m, ints)[0], (v,), (jnp.cos(v),))[1]

        return jax.grad(along, (0, 1))(vec, mat)

    return second


def batched_second_order(fun: Callable[..., Any]) -> Callable[..., Any]:
    def second(vec: Any, mat: Any, ints: Any) -> Any:
        mats = jnp.stack([mat, mat.T], axis=2)
        return jax.vmap(lambda m: forward_over_reverse(fun)(vec, m, ints), in_axes=2)(mats)

    return second


_loops = {
    "program": programs.map(lambda program: program[:2]),
    "length": st.integers(1, 6),
    "snapshots": st.integers(1, 4),
    "reverse": st.booleans(),
    "seed": st.integers(0, 2**16),
}


def check(
    mode: Callable[..., Any], program: Program, length: int, snapshots: int, reverse: bool, seed: int
) -> None:
    plain, ours = (
        interpreted(mode(looped(scan, program, length, reverse)))
        for scan in (lax.scan, with_snapshots(snapshots))
    )
    same(ours(*arguments(seed)), plain(*arguments(seed)))


@settings(max_examples=max(6, settings().max_examples // 4))
@given(**_loops)
def test_values_and_gradients(**loop: Any) -> None:
    check(value_and_grads, **loop)


@settings(max_examples=max(5, settings().max_examples // 5))
@given(mode=st.sampled_from([vmap_of_grad, grad_of_vmap, forward_mode, linearized]), **_loops)
def test_other_modes(mode: Callable[..., Any], program: Program, **loop: Any) -> None:
    if mode in (forward_mode, linearized):  # JAX refuses functions with a reverse-mode rule only
        program = without_reverse_rules(program)
    check(mode, program=program, **loop)


@settings(max_examples=max(4, settings().max_examples // 6))
@given(
    mode=st.sampled_from(
        [forward_over_reverse, reverse_over_forward, reverse_over_reverse, batched_second_order]
    ),
    **_loops,
)
def test_second_order(mode: Callable[..., Any], program: Program, **loop: Any) -> None:
    check(mode, program=without_reverse_rules(program), **loop)


def cell(w: Any, carry: Any, x: Any) -> Any:
    c, n = carry
    c = jnp.tanh(c @ w + x) * jnp.cos(0.1 * n * c)
    return (c, n + 1), (c.sum(), n)


LENGTH = 23
# NumPy's: the precision is that of the test.
W = np.linspace(-0.7, 0.9, 9).reshape(3, 3)
C = np.linspace(0.3, 1.0, 3)
XS = np.sin(np.arange(3.0 * LENGTH)).reshape(LENGTH, 3)


def cell_loss(scan: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(w: Any, c: Any, xs: Any) -> Any:
        (c, _), (sums, _) = scan(functools.partial(cell, w), (c, 0), xs, **options)
        return (c**2).sum() + (sums * jnp.cos(jnp.arange(len(sums)))).sum()

    return loss


@pytest.mark.parametrize(
    ("snapshots", "reverse"),
    [(1, True), (2, False), (5, True), (22, False), (1000, True), (np.int64(4), False)],
)
def test_compiled_and_not(snapshots: int, reverse: bool) -> None:
    ours, plain = (
        jax.value_and_grad(cell_loss(s, reverse=reverse), (0, 1, 2))
        for s in (with_snapshots(snapshots), lax.scan)
    )
    expected = jax.jit(plain)(W, C, XS)
    same(jax.jit(ours)(W, C, XS), expected)
    same(ours(W, C, XS), expected)


def test_hessians_of_all_four_modes() -> None:
    ours, plain = cell_loss(with_snapshots(3)), cell_loss(lax.scan)
    expected = jax.jit(jax.hessian(plain, (0, 2)))(W, C, XS[:5])
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            same(jax.jit(outer(inner(ours, (0, 2)), (0, 2)))(W, C, XS[:5]), expected)


def test_third_order() -> None:
    def third(scan: Callable[..., Any]) -> Any:
        def along(x: Any) -> Any:
            return scan(lambda c, x: (jnp.sin(c * x), None), x, jnp.linspace(0.5, 1.5, 6))[0]

        return jax.jit(lambda x: (jax.grad(jax.grad(jax.grad(along)))(x), jax.jacfwd(jax.hessian(along))(x)))(
            1.1
        )

    same(third(with_snapshots(2)), third(lax.scan))


def test_gradient_of_a_batched_gradient() -> None:
    cs, xs = jnp.stack([C, 2 * C]), jnp.stack([XS, jnp.cos(XS)], axis=2)

    def second(scan: Callable[..., Any]) -> Any:
        grads = jax.vmap(jax.grad(cell_loss(scan)), (None, 0, 2))
        return jax.jit(jax.grad(lambda w: (grads(w, cs, xs) ** 2).sum()))(W)

    same(second(with_snapshots(3)), second(lax.scan))


def test_a_batch_of_tangents_and_of_cotangents() -> None:
    """The linear map by itself: pushed for several tangents, transposed, and differentiated again."""
    tangents = np.stack([C, np.cos(C), np.sin(C)], axis=1)

    def all_of(scan: Callable[..., Any]) -> Any:
        value, push = jax.linearize(lambda c: cell_loss(scan)(W, c, XS), C)
        several = jax.vmap(push, 1)
        along = lambda c, ts: jax.vmap(
            lambda t: jax.jvp(lambda c: cell_loss(scan)(W, c, XS), (c,), (t,))[1], 1
        )(ts)
        twice = jax.vmap(several, 0)(np.stack([tangents, 2 * tangents]))
        grads = jax.grad(lambda ts: (several(ts) ** 2).sum())(tangents)
        return value, several(tangents), twice, grads, jax.jacrev(along, (0, 1))(C, tangents)

    same(jax.jit(all_of, static_argnums=0)(with_snapshots(3)), jax.jit(all_of, static_argnums=0)(lax.scan))


@pytest.mark.parametrize("length", [0, 1])
def test_shortest_loops(length: int) -> None:
    for snapshots in (1, 5):
        ours, plain = cell_loss(with_snapshots(snapshots)), cell_loss(lax.scan)
        same(jax.grad(ours, (0, 1, 2))(W, C, XS[:length]), jax.grad(plain, (0, 1, 2))(W, C, XS[:length]))


def test_none_is_the_plain_scan() -> None:
    text = str(jax.make_jaxpr(jax.grad(cell_loss(with_snapshots(None))))(W, C, XS))
    assert "autoremat" not in text


def test_length_without_xs_and_pytrees() -> None:
    def fun(scan: Callable[..., Any], c: Any) -> Any:
        out, ys = scan(lambda c, x: ({"a": jnp.sin(c["a"]), "b": (c["a"],)}, None), c, None, 9)
        assert ys is None
        return out["a"] + out["b"][0]

    c = {"a": 1.3, "b": (jnp.zeros(()),)}
    same(
        jax.grad(functools.partial(fun, with_snapshots(2)))(c), jax.grad(functools.partial(fun, lax.scan))(c)
    )


def test_keys_are_carried() -> None:
    def fun(scan: Callable[..., Any], h: Any, key: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            key, h = carry
            key, now = jax.random.split(key)
            return (key, jnp.tanh(1.1 * h + 0.1 * jax.random.normal(now, h.shape))), jax.random.key_data(key)

        (_, h), seen = scan(step, (key, h), None, length=11)
        return h.sum(), seen

    def all_of(scan: Callable[..., Any]) -> Any:
        grad = jax.value_and_grad(functools.partial(fun, scan), has_aux=True)
        keys = jax.random.split(jax.random.key(3), 2)
        return grad(C, keys[0]), jax.vmap(grad, (None, 0))(C, keys)

    same(all_of(with_snapshots(3)), all_of(lax.scan))


def test_a_second_run_may_use_keys_again() -> None:
    def step(carry: Any, _: Any) -> Any:
        key, h = carry
        key, now = jax.random.split(key)
        return (key, h * jax.random.normal(now)), None

    def loss(h: Any) -> Any:
        return ar.scan(step, (jax.random.key(0), h), None, 5, snapshots=2)[0][1]

    def twice(h: Any) -> Any:
        key = jax.random.key(0)
        first = ar.scan(step, (key, h), None, 5, snapshots=2)[0][1]
        return first + ar.scan(step, (key, h), None, 5, snapshots=2)[0][1]

    with jax.debug_key_reuse(True):
        jax.jit(jax.grad(loss))(1.0)
        jax.jit(lambda h: jax.jvp(jax.grad(loss), (h,), (h,)))(1.0)
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(twice)(1.0)


def test_integers_and_what_is_not_differentiated_have_no_cotangents() -> None:
    (dw, dxs), pull = jax.vjp(
        lambda w, xs: with_snapshots(2)(functools.partial(cell, w), (C, 0), xs)[0], W, XS
    )
    assert dxs.dtype == jnp.result_type(0)
    float0 = np.zeros((), jax.dtypes.float0)
    expected = jax.vjp(lambda w, xs: lax.scan(functools.partial(cell, w), (C, 0), xs)[0], W, XS)[1]
    same(pull((jnp.ones_like(dw), float0)), expected((jnp.ones_like(dw), float0)))
    text = str(jax.make_jaxpr(jax.grad(cell_loss(with_snapshots(2)), 1))(W, C, XS))
    assert "num_adjoint=1\n" in text, "constants that are not differentiated have no sums of cotangents"


def test_inside_other_loops_and_checkpoints() -> None:
    def nested(scan: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
        def loss(w: Any, c: Any, xs: Any) -> Any:
            def outer(c: Any, k: Any) -> Any:
                step = lambda c, x: (
                    lax.scan(lambda c, _: (jnp.sin(c @ w + x), None), c, None, 2)[0],
                    c.sum(),
                )
                inner = wrap(lambda c, xs: scan(step, c, xs))
                return lax.cond(k % 2 == 0, inner, lambda c, xs: (c, xs[:, 0]), c, xs)

            c, ys = lax.scan(outer, c, jnp.arange(3))
            return (c**2).sum() + ys.sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    expected = nested(lax.scan, lambda f: f)(W, C, XS)
    for wrap in (lambda f: f, ar.checkpoint, jax.checkpoint):
        same(nested(with_snapshots(3), wrap)(W, C, XS), expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def losses(scan: Callable[..., Any]) -> Callable[..., Any]:
        def body(x: Any, w: Any) -> Any:
            def step(c: Any, t: Any) -> Any:
                y = jnp.sin(c @ w + t)
                return y * (1 + 0.1 * lax.pmean(y, "i").mean()), lax.psum(y.sum(), "i")

            return scan(step, x, jnp.linspace(0.0, 1.0, 7))

        fun = jax.shard_map(
            body, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P()), check_vma=check_vma
        )
        loss = lambda x, w: sum((y**2).sum() for y in fun(x, w))
        return jax.jit(
            lambda x, w: (jax.grad(loss, (0, 1))(x, w), jax.jvp(jax.grad(loss, 1), (x, w), (x * x, w)))
        )

    x = jnp.arange(12.0).reshape(4, 3) / 10
    same(losses(with_snapshots(3))(x, W), losses(lax.scan)(x, W))


def test_disabled_jit() -> None:
    with jax.disable_jit():
        ours = jax.grad(cell_loss(with_snapshots(2)))(W, C, XS[:3])
    same(ours, jax.grad(cell_loss(lax.scan))(W, C, XS[:3]))


# ---------------------------------------------------------------------------------------------------- counts of steps


def executed(length: int, snapshots: int) -> tuple[int, Counter[int]]:
    """How often the steps of a compiled gradient ran, in all and each."""
    ran: Counter[int] = Counter()

    def step(c: Any, i: Any) -> Any:
        jax.debug.callback(lambda i: ran.update([int(i)]), i)
        return jnp.sin(c), None

    grad = jax.jit(jax.grad(lambda c: ar.scan(step, c, jnp.arange(length), snapshots=snapshots)[0]))
    jax.block_until_ready(grad(1.0))
    jax.effects_barrier()
    return ran.total(), ran


@pytest.mark.parametrize(("length", "snapshots"), [(1, 1), (7, 1), (40, 3), (60, 60), (1000, 20), (1000, 10)])
def test_steps_are_the_binomial_optimum(length: int, snapshots: int) -> None:
    total, ran = executed(length, snapshots)
    linearizations, value = length, 1  # one for each step; the last step of the forward pass, for its value
    assert total == forward_steps(length, snapshots) + linearizations + value
    assert set(ran) == set(range(length))


# ------------------------------------------------------------------------------------------------- memory, program size

WIDTH = 512


def wide_loss(scan: Callable[..., Any], length: int) -> Callable[..., Any]:
    def step(c: Any, _: Any) -> Any:
        for k in range(3):
            c = jnp.sin(c) * jnp.cos(k * c)
        return c, None

    return lambda c: (scan(step, c, None, length)[0] ** 2).sum()


def temporaries(loss: Callable[..., Any]) -> int:
    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(WIDTH, jnp.float32)).compile(compiler_options=OPTIONS)
    return compiled.memory_analysis().temp_size_in_bytes


def in_square_roots(f: Any, init: Any, xs: Any, length: int) -> Any:
    inner = math.isqrt(length)
    outer = -(-length // inner)
    body = jax.checkpoint(f, prevent_cse=False)
    block = jax.checkpoint(lambda c, _: (lax.scan(body, c, None, inner)[0], None), prevent_cse=False)
    return lax.scan(block, init, None, outer)


STATE = 4 * WIDTH


def test_memory_is_that_of_the_snapshots() -> None:
    few, more = (temporaries(wide_loss(with_snapshots(s), 1000)) for s in (10, 20))
    assert more - few == pytest.approx(10 * STATE, rel=0.05)
    assert more < 40 * STATE
    assert more < temporaries(wide_loss(in_square_roots, 1000)) / 1.5
    assert few < temporaries(wide_loss(in_square_roots, 1000)) / 2


def test_memory_does_not_grow_with_the_length() -> None:
    short, long = (temporaries(wide_loss(with_snapshots(10), n)) for n in (100, 2000))
    tables = 6 * 4 * 2000
    assert long - short <= 2 * tables


def test_memory_of_second_derivatives() -> None:
    def second(scan: Callable[..., Any], mode: str) -> int:
        loss, v = wide_loss(scan, 1000), jnp.ones(WIDTH, jnp.float32)
        modes = {
            "forward over reverse": lambda c: jnp.vdot(v, jax.jvp(jax.grad(loss), (c,), (v,))[1]),
            "reverse over forward": lambda c: jnp.vdot(
                v, jax.grad(lambda c: jax.jvp(loss, (c,), (v,))[1])(c)
            ),
            "reverse over reverse": lambda c: jnp.vdot(
                v, jax.grad(lambda c: jnp.vdot(jax.grad(loss)(c), v))(c)
            ),
        }
        compiled = jax.jit(modes[mode]).lower(v).compile(compiler_options=OPTIONS)
        return compiled.memory_analysis().temp_size_in_bytes

    for mode, states in (
        ("forward over reverse", 80),
        ("reverse over forward", 110),
        ("reverse over reverse", 350),
    ):
        assert second(with_snapshots(20), mode) < states * STATE, mode


def test_program_does_not_grow_with_the_length() -> None:
    def size(length: int) -> tuple[int, int]:
        lowered = jax.jit(jax.grad(wide_loss(with_snapshots(10), length))).lower(jnp.ones(WIDTH))
        without_tables = re.sub(r"dense<[^>]*>", "dense<>", lowered.as_text())
        instructions = lowered.compile().as_text().count(" = ")
        return len(without_tables.splitlines()), instructions

    assert size(100) == size(1000)


def test_what_is_kept_is_reported() -> None:
    residuals = ar.saved_residuals(
        lambda c: ar.scan(lambda c, _: (jnp.sin(jnp.sin(c)), None), c, None, 100, snapshots=5)[0].sum(), C
    )
    assert residuals.intermediate_bytes == 6 * C.nbytes  # with the state in hand


def test_costs_count_every_step() -> None:
    def flops(snapshots: int) -> int:
        return ar.jaxpr_flops(jax.grad(wide_loss(with_snapshots(snapshots), 100)), jnp.ones(WIDTH))

    once = ar.jaxpr_flops(wide_loss(lax.scan, 2), jnp.ones(WIDTH)) - ar.jaxpr_flops(
        wide_loss(lax.scan, 1), jnp.ones(WIDTH)
    )
    assert flops(3) - flops(5) == once * (forward_steps(100, 3) - forward_steps(100, 5))


def test_a_planned_region_may_hold_one() -> None:
    def net(scan: Callable[..., Any], w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ w) * jnp.sin(x)
        x, _ = scan(lambda c, _: (jnp.sin(c @ w), None), x, None, 20)
        return (jnp.tanh(x @ w) ** 2).sum()

    w, x = jnp.eye(8) * 0.5, jnp.ones((16, 8))
    ours = jax.grad(ar.checkpoint(functools.partial(net, with_snapshots(4)), budget="50%"))
    same(jax.jit(ours)(w, x), jax.jit(jax.grad(functools.partial(net, lax.scan)))(w, x))


def test_a_body_is_compiled_once() -> None:
    traced = 0

    def step(c: Any, x: Any) -> Any:
        nonlocal traced
        traced += 1
        return jnp.sin(c) * x, None

    for _ in range(3):
        jax.grad(lambda c: ar.scan(step, c, XS[:, 0], snapshots=3)[0])(1.0)
    assert traced == 1


def test_caches_keep_nothing_alive() -> None:
    def differentiate() -> list[Any]:
        big = jnp.ones(1000)
        step = lambda c, _: ((jnp.sin(c) * big).mean(), None)
        loss = lambda c: ar.scan(step, c, None, 9, snapshots=2)[0]
        jax.grad(loss)(1.0)
        jax.jit(jax.grad(jax.grad(loss)))(1.0)
        return [weakref.ref(big), weakref.ref(step)]

    references = differentiate()
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_no_leaks() -> None:
    with jax.checking_leaks():
        jax.jit(jax.grad(cell_loss(with_snapshots(3))))(W, C, XS)


# ------------------------------------------------------------------------------------------------------------ bad input


def step(c: Any, x: Any) -> Any:
    return jnp.sin(c), x


@pytest.mark.parametrize("snapshots", [0, -3])
def test_too_few_snapshots(snapshots: int) -> None:
    with pytest.raises(
        ValueError, match=f"at least 1 snapshot.*got snapshots={snapshots}.*Cheapest fix: snapshots=1"
    ):
        ar.scan(step, 1.0, None, 3, snapshots=snapshots)


@pytest.mark.parametrize("snapshots", [2.0, "4", True, [3]])
def test_snapshots_that_are_no_number(snapshots: Any) -> None:
    with pytest.raises(
        TypeError,
        match=f"needs an int.*got {re.escape(repr(snapshots))} of type.*Cheapest fix: give a Python int",
    ):
        ar.scan(step, 1.0, None, 3, snapshots=snapshots)


def test_traced_snapshots() -> None:
    with pytest.raises(TypeError, match="traced value cannot decide how much memory"):
        jax.jit(lambda s: ar.scan(step, 1.0, None, 3, snapshots=s))(3)


def test_snapshots_must_be_given() -> None:
    with pytest.raises(TypeError, match="snapshots"):
        ar.scan(step, 1.0, None, 3)  # pyright: ignore[reportCallIssue]


def test_what_jax_says() -> None:
    with pytest.raises(
        TypeError, match="scan body function carry input and carry output must have equal types"
    ):
        ar.scan(lambda c, x: (jnp.ones(3), None), 1.0, None, 3, snapshots=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a pair"):
        ar.scan(lambda c, x: c, jnp.ones(3), None, 3, snapshots=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scan got"):
        ar.scan(step, 1.0, jnp.ones(4), 3, snapshots=2)


def test_effects_are_refused_where_they_would_repeat() -> None:
    def noisy(c: Any, x: Any) -> Any:
        io_callback(lambda c: None, None, c, ordered=True)
        return jnp.sin(c), None

    fun = lambda c: ar.scan(noisy, c, None, 3, snapshots=2)[0]
    same(fun(1.0), jnp.sin(jnp.sin(jnp.sin(1.0))))
    with pytest.raises(
        ar.EffectError, match=r"derivative of `autoremat.scan`: \[.*IO.*Cheapest fix: move the call"
    ):
        jax.grad(fun)(1.0)


def test_references_are_refused() -> None:
    ref = jax.new_ref(jnp.zeros(()))

    def writing(c: Any, x: Any) -> Any:
        ref[...] = c
        return jnp.sin(c), None

    with pytest.raises(
        ar.EffectError, match=r"mutable reference.*would write twice.*Cheapest fix: carry the array"
    ):
        jax.jit(lambda c: ar.scan(writing, c, None, 3, snapshots=2)[0])(1.0)
