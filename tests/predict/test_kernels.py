"""The model of the compiler by itself: what is merged, fused, handed to a library, kept apart by a barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import pytest
from jax import lax

import autoremat as ar
from autoremat._compat import open_jaxpr
from autoremat.predict import XLA_CPU, XLA_CPU_0_10, Compiler
from autoremat.predict._flatten import divide, flatten
from autoremat.predict._fuse import JOIN, LAYOUT_COPY, kernels
from autoremat.predict._order import depth_first
from autoremat.predict._peak import peak
from autoremat.predict._predict import compiler_for
from autoremat.predict._program import STACK, Instruction, Program

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
NBYTES = 64 * 64 * 4
PLAIN = Compiler(name="no library")


def flat(fun: Callable[..., Any], *args: Any) -> Program:
    jaxpr = open_jaxpr(jax.make_jaxpr(fun)(*args))[0]
    return flatten(jaxpr, divide(jaxpr, args))


def names(program: Program) -> list[str]:
    return [i.primitive for i in program.instructions]


def run(fun: Callable[..., Any], *args: Any, compiler: Compiler = PLAIN) -> list[str]:
    return names(kernels(flat(fun, *args), compiler))


# -------------------------------------------------------------------------------------------------------------- flat programs


def test_calls_are_inlined_and_equal_operations_merged() -> None:
    def fun(x: Any) -> Any:
        return jax.jit(jnp.sin)(x) + jnp.sin(x) + jax.checkpoint(jnp.cos)(x)

    assert names(flat(fun, X)) == ["sin", "add", "cos", "add"]


def test_what_a_checkpoint_of_jax_keeps_is_computed_in_no_call() -> None:
    """Since JAX 0.12, the part of a checkpoint that runs once is a call, `eval_jaxpr`."""
    keep = jax.checkpoint_policies.save_only_these_names("kept")

    @functools.partial(jax.checkpoint, policy=keep)
    def block(x: Any) -> Any:
        y, _ = lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)
        return jnp.cos(ar.checkpoint_name(y, "kept"))

    gradient = jax.value_and_grad(lambda x: block(block(x)).sum())
    if jax.__version_info__ >= (0, 12):
        assert "eval_jaxpr" in str(jax.make_jaxpr(gradient)(X))
    known = {
        "scan",
        STACK,
        "cos",
        "sin",
        "mul",
        "neg",
        "reduce_sum",
        "broadcast_in_dim",
        "optimization_barrier",
    }
    assert set(names(flat(gradient, X))) <= known


def test_results_of_other_shapes_are_not_equal() -> None:
    def fun(x: Any) -> Any:
        return lax.broadcast_in_dim(x[0], (64, 64), (0,)) + lax.broadcast_in_dim(x[0], (64, 64), (1,))

    assert names(flat(fun, X)).count("broadcast_in_dim") == 2


def test_views_and_remarks_are_nothing() -> None:
    def fun(x: Any) -> Any:
        y = ar.checkpoint_name(lax.stop_gradient(x.reshape(4096)), "y")
        return lax.reduce_precision(y.astype(jnp.float32), 8, 23).reshape(64, 64) * 2

    assert names(flat(fun, X)) == ["mul"]
    assert names(flat(lambda x: lax.reduce_precision(x, 5, 10), X)) == ["reduce_precision"]


def test_dead_code_is_left_out() -> None:
    def fun(x: Any) -> Any:
        lax.sin(x)
        return lax.cos(x)

    assert names(flat(fun, X)) == ["cos"]


def test_the_maximum_with_minus_infinity_is_nothing() -> None:
    assert names(flat(lambda x: lax.max(x, -jnp.inf), X)) == []
    made = flat(lambda x: lax.max(x, 0.0), X).instructions
    assert [(i.primitive, i.literals) for i in made] == [("max", True)]


def test_products_that_compute_their_operands() -> None:
    """On TPUs; a costly operand with a second reader is an array all the same."""
    tpu = Compiler(name="TPU", products_take_operands=True)
    assert run(lambda x: (x * 2 + 1) @ jnp.exp(x), X) == ["add", "exp", "dot_general"]
    assert run(lambda x: (x * 2 + 1) @ jnp.exp(x), X, compiler=tpu) == ["dot_general"]

    def twice(x: Any) -> Any:
        y = jnp.exp(x)
        return y @ x, y @ (x + 1)

    assert run(twice, X, compiler=tpu).count("exp") == 1


def test_slices_that_a_loop_reads_of_a_stack() -> None:
    """On GPUs a slice is a copy where something else than arithmetic reads it: a barrier, a product."""
    gpu = Compiler(name="GPU", copies_slices=True)

    def body_of(step: Callable[..., Any]) -> Program:
        def fun(x: Any, rows: Any) -> Any:
            return lax.scan(lambda c, row: (step(c, row), None), x, rows)[0]

        scan = next(
            i for i in flat(fun, X, jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)).instructions if i.inner
        )
        return scan.inner[0]

    def behind(c: Any, row: Any) -> Any:
        return c + lax.optimization_barrier(row)

    for step, more in ((lambda c, row: c * 2 + row, 0), (behind, 1), (lambda c, row: c @ row, 1)):
        body = body_of(step)
        assert len(body.slices) == 1
        assert names(kernels(body, PLAIN)).count("dynamic_slice") == 0
        assert names(kernels(body, gpu)).count("dynamic_slice") == more
    assert flat(lambda x, y: x + y, X, X).slices == ()


def test_a_checkpoint_puts_one_barrier_before_its_backward_pass() -> None:
    def loss(x: Any) -> Any:
        return jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()

    program = flat(jax.grad(loss), X)
    assert names(program).count("optimization_barrier") == 1
    assert names(program).count("sin") >= 1


def test_loops_and_branches_hold_programs() -> None:
    def fun(x: Any) -> Any:
        y, zs = lax.scan(lambda c, r: (jnp.sin(c), r * 2), x, jnp.ones((3, 64)))
        return lax.cond(zs[0, 0] > 0, jnp.cos, jnp.tan, y)

    program = flat(fun, X)
    inner = {i.primitive: [names(p) for p in i.inner] for i in program.instructions if i.inner}
    assert inner["scan"] == [["sin", "mul"]]
    assert sorted(map(str, inner["cond"])) == ["['cos']", "['tan']"]


def test_a_scan_with_snapshots_is_what_it_is_lowered_to() -> None:
    def loss(x: Any) -> Any:
        return ar.scan(lambda c, _: (jnp.sin(c), None), x, None, 16, snapshots=2)[0].sum()

    found = names(flat(jax.grad(loss), X))
    assert found
    assert not any("autoremat" in name for name in found)


# --------------------------------------------------------------------------------------------------------------------- fusion


def test_a_chain_of_arithmetic_is_one_kernel() -> None:
    assert run(lambda x: jnp.tanh(x * 2 + 1) - x, X) == ["sub"]


def test_what_is_costly_is_computed_once() -> None:
    def fun(x: Any) -> Any:
        y = jnp.exp(x)
        return y * 2, y @ x

    assert run(fun, X).count("exp") == 1


def test_what_is_cheap_is_computed_in_each_reader_that_can() -> None:
    def fun(x: Any) -> Any:
        y = x * 3
        return y @ x, jnp.sin(y)

    made = kernels(flat(fun, X), PLAIN)
    sin = next(i for i in made.instructions if i.primitive == "sin")
    product = next(i for i in made.instructions if i.primitive == "dot_general")
    assert sin.inputs == made.inputs
    assert product.inputs != made.inputs


def test_what_is_computed_from_two_arrays_is_not_computed_twice() -> None:
    def fun(x: Any, z: Any) -> Any:
        y = x + z
        return y @ x, jnp.sin(y)

    made = kernels(flat(fun, X, X), PLAIN)
    sum_ = next(i for i in made.instructions if i.primitive == "add")
    assert next(i for i in made.instructions if i.primitive == "sin").inputs == sum_.outputs


def test_a_transposed_product_is_multiplied_the_other_way_round() -> None:
    assert run(lambda x: (x @ x).T, X) == ["dot_general"]


def test_softmax_is_a_library_call() -> None:
    def fun(x: Any) -> Any:
        return jax.nn.softmax(x, -1)

    # Exponentials; their sums, one over them, and the products.
    assert run(fun, X, compiler=XLA_CPU) == ["library", "reduce_sum", "reciprocal", "mul"]
    assert "library" not in run(fun, X)


def test_the_derivative_of_attention_is_a_library_call() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return (jax.nn.softmax(q @ k.swapaxes(-1, -2), -1) @ v).sum()

    heads = jax.ShapeDtypeStruct((4, 32, 8), jnp.float32)
    made = kernels(flat(jax.grad(loss, (0, 1, 2)), heads, heads, heads), XLA_CPU)
    calls = [i for i in made.instructions if i.primitive == "library"]
    assert max(len(c.inputs) for c in calls) >= 4  # cotangent, values, exponentials, sums


def test_barriers_go_before_fusion_where_the_compiler_drops_them() -> None:
    def fun(x: Any) -> Any:
        return jnp.sin(lax.optimization_barrier(x * 2))

    assert run(fun, X, compiler=XLA_CPU) == ["mul", "optimization_barrier", "sin"]
    assert run(fun, X, compiler=XLA_CPU_0_10) == ["sin"]


COMPILERS = [PLAIN, XLA_CPU, XLA_CPU_0_10, compiler_for("tpu"), compiler_for("cuda")]


def seen_and_not(x: Any, w: Any) -> Any:
    """A value that is read as it is and in another shape."""
    y = x * 2.0
    return y.reshape(-1) * 2 + (y * 3).reshape(-1), y @ w


def stacked(x: Any, w: Any) -> Any:
    y = jnp.stack([x @ w, w @ x])
    return lax.dot_general(y, y, (((2,), (1,)), ((0,), (0,))))


def states(x: Any, w: Any) -> Any:
    """A loop in a loop, slices of the user's, a barrier, and all that comes out twice."""

    def inner(c: Any, i: Any) -> Any:
        c = jnp.tanh(c @ lax.dynamic_update_slice(w, c[:1], (0, 0)))
        return c, (c, c.sum() / c, i)

    def outer(c: Any, _: Any) -> Any:
        c, ys = lax.scan(inner, lax.optimization_barrier(c), x)
        return c, (ys, ys)

    c, ys = lax.scan(outer, x, None, length=3)
    return c, c, ys, jnp.concatenate([c] * 9)


def decay(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = x / (x + w) * (1 / w.sum(-1, keepdims=True)) - x.sum(0) ** -2
    return x


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: c.name)
@pytest.mark.parametrize("fun", [seen_and_not, stacked, states, decay, jax.grad(lambda x, w: states(x, w)[0].sum())])  # fmt: skip
def test_what_is_read_was_made(fun: Callable[..., Any], compiler: Compiler) -> None:
    """By a kernel, before: at all depths."""

    def check(program: Program) -> None:
        made = kernels(program, compiler)
        known = {v for v, maker in enumerate(program.makers()) if maker < 0}
        for kernel in (made.instructions[i] for i in depth_first(made)):
            assert set(map(int, kernel.inputs)) <= known, kernel.primitive
            known |= set(kernel.outputs)
            for inside in kernel.inner:
                check(inside)
        assert set(map(int, made.outputs)) <= known

    check(flat(fun, X, X))


def test_names_of_the_model_are_no_primitives() -> None:
    """Else what the user wrote would be taken for what the model made."""
    primitives = {p.name for p in vars(jax.extend.core.primitives).values() if hasattr(p, "name")}
    made = {STACK, JOIN, LAYOUT_COPY, "library", "loop_counter", "next_iteration", "copy_into_loop"}
    assert len(primitives) > 100
    assert not made & primitives


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: c.name)
def test_long_chains_and_many_paths(compiler: Compiler) -> None:
    """Neither Python's stack nor time ends with them."""

    def chain(x: Any) -> Any:
        x = jnp.exp(x)
        for _ in range(1200):
            x = x + 1.0
        return x

    def paths(x: Any) -> Any:
        x = jnp.exp(x) * 1.5
        for _ in range(60):
            x = (x + 1.0) * (x + 2.0)
        return x

    for fun in (chain, paths):
        assert set(run(fun, X, compiler=compiler)) <= {"exp", "add", "mul"}


def test_zeros_of_a_stack_hold_no_loop() -> None:
    def fun(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ c), c @ c), x, None, length=3)

    zeros = [e for e in flat(fun, X).instructions if e.primitive == STACK]
    assert zeros
    assert not any(e.inner for e in zeros)


def test_a_loop_in_a_loop_writes_over_what_the_outer_one_hands_on() -> None:
    def inner(c: Any, _: Any) -> Any:
        return lax.scan(lambda d, _: (jnp.sin(d @ d), None), c, None, length=3)[0], None

    program = flat(lambda x: lax.scan(inner, x, None, length=3)[0], X)
    (loop,) = (e for e in program.instructions if e.inner)
    assert "copy_into_loop" not in names(kernels(loop.inner[0], XLA_CPU))
    # Of an argument of the program, which others own, it is a copy.
    assert names(kernels(program, XLA_CPU)) == ["copy_into_loop", "scan"]


def test_integers_are_divided() -> None:
    def fun(x: Any) -> Any:
        return lax.div(x, lax.broadcast_in_dim(x.sum(-1), (64, 1), (0,))), lax.div(x, jnp.int32(3))

    assert "reciprocal" not in names(flat(fun, jax.ShapeDtypeStruct((64, 64), jnp.int32)))
    assert "reciprocal" in names(flat(lambda x: x / x.sum(-1, keepdims=True), X))


# -------------------------------------------------------------------------------------------------------------- order and peak


def line(*nbytes: int, reads: dict[int, tuple[int, ...]], outputs: tuple[int, ...]) -> Program:
    """A program of opaque instructions: instruction `i` makes value `i + 1`; value 0 is the input."""
    made = [Instruction(primitive=f"op{v}", inputs=reads[v], outputs=(v,)) for v in range(1, len(nbytes))]
    return Program(
        nbytes=nbytes, rank=(1,) * len(nbytes), instructions=tuple(made), inputs=(0,), outputs=outputs
    )


def test_more_readers_first_then_more_bytes() -> None:
    # 4 reads 2 and 3; 3 leads to more bytes.
    program = line(8, 8, 8, 80, 8, reads={1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}, outputs=(4,))
    assert depth_first(program) == [0, 2, 1, 3]
    # The same, but 1's other reader comes before 2: what leads to it has more readers.
    program = line(8, 8, 8, 80, 8, reads={1: (0,), 2: (1,), 3: (0,), 4: (2, 3, 1)}, outputs=(4,))
    assert depth_first(program) == [0, 1, 2, 3]


def test_peak_of_a_chain() -> None:
    program = line(5, 10, 20, 30, reads={1: (0,), 2: (1,), 3: (2,)}, outputs=(3,))
    found = peak(program, PLAIN)
    assert [m.nbytes for m in found.timeline] == [10, 30, 20]
    assert (found.temp_bytes, found.at.primitive) == (30, "op2")


def test_a_loop_needs_what_its_body_needs() -> None:
    def fun(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ c) @ c, x)

    inside = peak(flat(lambda c: jnp.tanh(c @ c) @ c, X), PLAIN).temp_bytes
    assert peak(flat(fun, X), PLAIN).temp_bytes >= inside >= NBYTES


def test_in_place() -> None:
    def fun(x: Any) -> Any:
        y = x @ x
        return (jnp.sin(y) @ x) @ x

    # sin writes over the product that it reads; the second product cannot.
    assert peak(flat(fun, X), PLAIN).temp_bytes == 2 * NBYTES


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: (x, 1.0), lambda x: jnp.zeros(3)])
def test_nothing_to_run(fun: Callable[..., Any]) -> None:
    assert peak(flat(fun, X), PLAIN).temp_bytes == 0
