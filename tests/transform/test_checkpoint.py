"""`checkpoint` as a function and a decorator, under every transformation of JAX."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoremat
from autoremat.transform import checkpoint, remat

X = jnp.linspace(0.1, 0.9, 4)
W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)


def block(x: Any, w: Any) -> Any:
    return jnp.sin(jnp.tanh(x @ w))


def net(layer: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: Any, w: Any) -> Any:
        return layer(layer(x, w), w).sum()

    return loss


def same(actual: Any, expected: Any, tol: float = 1e-5) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=tol, atol=tol), actual, expected)


def count(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How often each primitive stands in the jaxpr of a function, inner ones included."""
    found: dict[str, int] = {}

    def visit(jaxpr: Any) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found[eqn.primitive.name] = found.get(eqn.primitive.name, 0) + 1
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        visit(inner)

    visit(jax.make_jaxpr(fun)(*args))
    return found


# ------------------------------------------------------------------------------------------------------ as a decorator


def test_the_ways_to_apply_it() -> None:
    @checkpoint
    def bare(x: Any) -> Any:
        """Doc."""
        return jnp.sin(jnp.sin(x)).sum()

    @checkpoint(policy=autoremat.checkpoint_policies.everything_saveable)
    def with_options(x: Any) -> Any:
        return jnp.sin(jnp.sin(x)).sum()

    expected = jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(X)
    for fun in (bare, with_options, remat(lambda x: jnp.sin(jnp.sin(x)).sum(), prevent_cse=False)):
        same(jax.grad(fun)(X), expected)
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Doc."
    assert remat is checkpoint


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a function"):
        checkpoint(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError, match="not both"):
        checkpoint(block, policy=lambda *a, **k: True, budget=100)


class Layer:
    def __init__(self) -> None:
        self.w = W

    def __call__(self, x: Any) -> Any:
        return block(x, self.w).sum()

    def method(self, x: Any, power: int) -> Any:
        return (block(x, self.w) ** power).sum()


def test_methods_callables_and_partials() -> None:
    layer = Layer()
    same(jax.grad(checkpoint(layer))(X), jax.grad(layer)(X))
    expected = jax.grad(layer.method)(X, 3)
    same(jax.grad(checkpoint(layer.method, static_argnums=1))(X, 3), expected)
    same(jax.grad(checkpoint(layer.method, static_argnames="power"))(X, power=3), expected)
    same(jax.grad(checkpoint(functools.partial(layer.method, power=3)))(X), expected)


def flagged(x: Any, flag: bool, scale: Any = 2.0) -> Any:
    return (jnp.sin(x) if flag else jnp.cos(x)).sum() * scale


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"static_argnums": 1}, (X, True), {}),
        ({"static_argnums": (1,)}, (X, True, 2.0), {}),
        ({"static_argnums": -2}, (X, True, 2.0), {}),
        ({"static_argnums": 1}, (X,), {"flag": True}),
        ({"static_argnames": "flag"}, (X, True), {}),
        ({"static_argnames": ("flag",)}, (X,), {"flag": True, "scale": 2.0}),
    ],
)
def test_static_arguments(options: dict[str, Any], args: Any, kwargs: Any) -> None:
    same(jax.grad(checkpoint(flagged, **options))(*args, **kwargs), 2 * jnp.cos(X))


def test_a_static_argument_that_cannot_be_hashed() -> None:
    fun = checkpoint(lambda x, names: sum(jnp.sin(x[n]) for n in names), static_argnums=1)
    same(jax.grad(fun)({"a": 1.0, "b": 2.0}, ["a", "b"]), {"a": np.cos(1.0), "b": np.cos(2.0)})


def test_equal_static_arguments_of_different_types_are_traced_apart() -> None:
    fun = checkpoint(lambda x, n: x * 1.0 if isinstance(n, bool) else x * 2.0, static_argnums=1)
    assert fun(1.0, True) == 1.0
    assert fun(1.0, 1) == 2.0


def test_mistakes_with_static_arguments() -> None:
    with pytest.raises(ValueError, match=r"can only take integer values .* `len\(args\)` = 2"):
        checkpoint(flagged, static_argnums=5)(X, True)
    with pytest.raises(ValueError, match="names \\['flags'\\]"):
        checkpoint(flagged, static_argnames="flags")(X, True)
    with pytest.raises(TypeError, match="must be int"):
        checkpoint(flagged, static_argnums="flag")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(jax.errors.TracerBoolConversionError, match="static_argnums"):
        checkpoint(flagged)(X, True)


def test_pytrees_and_keyword_arguments() -> None:
    def fun(tree: Any, *, scale: Any) -> Any:
        return {"y": jnp.sin(tree["a"]) * scale, "none": None, "n": 3}

    tree = {"a": X, "b": (1, None)}
    out = checkpoint(fun)(tree, scale=2.0)
    assert out["none"] is None
    assert int(out["n"]) == 3
    same(out["y"], 2 * jnp.sin(X))
    same(
        jax.grad(lambda t: checkpoint(fun)(t, scale=2.0)["y"].sum(), allow_int=True)(tree)["a"],
        2 * jnp.cos(X),
    )


def test_results_and_arguments_that_are_no_arrays() -> None:
    with pytest.raises(TypeError, match=r"at output component \[1\], which is not a valid JAX type"):
        checkpoint(lambda x: (x, "text"))(1.0)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        checkpoint(lambda x: x)("text")


# ------------------------------------------------------------------------------------------------------ transformations


def under_jit(f: Any) -> Any:
    return jax.jit(jax.value_and_grad(f, (0, 1)))


def jvp(f: Any) -> Any:
    return lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))


def linearized(f: Any) -> Any:
    def apply(x: Any, w: Any) -> Any:
        out, lin = jax.linearize(f, x, w)
        return out, lin(x, w)

    return apply


def vjp(f: Any) -> Any:
    def apply(x: Any, w: Any) -> Any:
        out, pull = jax.vjp(f, x, w)
        return out, pull(2.0 * jnp.ones_like(out))

    return apply


def vmap_of_grad(f: Any) -> Any:
    return lambda x, w: jax.vmap(jax.grad(f, (0, 1)), (1, None), 1)(jnp.stack([x, -x], 1), w)


def grad_of_vmap(f: Any) -> Any:
    def summed(xs: Any, w: Any) -> Any:
        return (jax.vmap(f, (1, None))(xs, w) ** 2).sum()

    return lambda x, w: jax.grad(summed, (0, 1))(jnp.stack([x, -x], 1), w)


def grad_of_scan(f: Any) -> Any:
    def loop(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, v: (jnp.tanh(c + f(c * v, w)), c), x, jnp.arange(3.0))

    return jax.grad(lambda x, w: loop(x, w)[0].sum() + (loop(x, w)[1] ** 2).sum(), (0, 1))


def grad_of_fori(f: Any) -> Any:
    return jax.grad(lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c + f(c, w)), x).sum(), (0, 1))


def grad_of_cond(f: Any) -> Any:
    return jax.grad(lambda x, w: lax.cond(x[0] > 0, f, lambda x, w: 2.0 * f(x, w), x, w), (0, 1))


def jvp_of_while(f: Any) -> Any:
    def loop(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] + f(c[1], w))), (0, x))[
            1
        ]

    return lambda x, w: jax.jvp(loop, (x, w), (x, w))


def jacobians(f: Any) -> Any:
    return lambda x, w: (jax.jacfwd(jax.jacrev(f))(x, w), jax.jacrev(jax.jacfwd(f))(x, w))


def third_order(f: Any) -> Any:
    def line(t: Any, x: Any, w: Any) -> Any:
        return f(t * x, w)

    return lambda x, w: jax.grad(jax.grad(jax.grad(line)))(0.7, x, w)


_modes = [
    under_jit,
    jvp,
    linearized,
    vjp,
    vmap_of_grad,
    grad_of_vmap,
    grad_of_scan,
    grad_of_fori,
    grad_of_cond,
    jvp_of_while,
    jax.hessian,
    jacobians,
    third_order,
]


@pytest.mark.parametrize("mode", _modes, ids=lambda m: m.__name__)
def test_transformations(mode: Any) -> None:
    layer = checkpoint(block)
    expected = jax.jit(mode(net(block)))(X, W)
    same(jax.jit(mode(net(layer)))(X, W), expected)
    same(jax.jit(mode(checkpoint(net(layer))))(X, W), expected)


def test_a_linear_function_can_be_transposed() -> None:
    transposed = jax.linear_transpose(checkpoint(lambda x: (2.0 * x) @ W), X)
    same(transposed(X), (2.0 * X @ W.T,))
    along = lambda x: jax.linear_transpose(lambda t: jax.jvp(checkpoint(jnp.sin), (x,), (t,))[1], x)(X)[
        0
    ].sum()
    same(jax.grad(along)(X), -jnp.sin(X) * X)


def test_custom_derivatives_inside() -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 3.0 * jnp.cos(primals[0]) * tangents[0]))

    @jax.custom_vjp
    def g(x: Any) -> Any:
        return jnp.sin(x)

    g.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, ct: (3.0 * c * ct,))

    for fun in (f, g, lambda x: f(g(x))):
        same(jax.grad(lambda x: checkpoint(fun)(x).sum())(X), jax.grad(lambda x: fun(x).sum())(X))
        same(
            jax.jacrev(jax.grad(lambda x: checkpoint(fun)(x).sum()))(X),
            jax.jacrev(jax.grad(lambda x: fun(x).sum()))(X),
        )
    with pytest.raises(
        TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"
    ):
        jax.jvp(checkpoint(g), (X,), (X,))


def test_a_custom_rule_holds_for_the_second_derivative_in_a_loop() -> None:
    """JAX itself forgets the rule in the second reverse pass (-2.31 here)."""

    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 1.5 * jnp.cos(primals[0]) * tangents[0]))

    def loop(wrap: Any) -> Any:
        return lambda x: lax.scan(lambda c, _: (jnp.tanh(wrap(f)(c)), None), x, None, length=3)[0]

    def forward_twice(g: Any) -> Any:
        return jax.jvp(lambda x: jax.jvp(g, (x,), (1.0,))[1], (0.7,), (1.0,))[1]

    same(jax.grad(jax.grad(loop(checkpoint)))(0.7), forward_twice(loop(lambda f: f)))


def test_a_custom_rule_that_closes_over_a_tracer() -> None:
    def outer(w: Any, x: Any) -> Any:
        @jax.custom_vjp
        def f(x: Any) -> Any:
            return x * w

        f.defvjp(lambda x: (x * w, x), lambda x, ct: (ct * w,))
        return checkpoint(lambda x: jnp.sin(f(x)))(x)

    expected = 2.0 * np.cos(6.0)
    same(jax.grad(outer, 1)(2.0, 3.0), expected)
    same(jax.jit(jax.grad(outer, 1))(2.0, 3.0), expected)


def test_integers_have_no_derivative() -> None:
    fun = checkpoint(lambda x, i: ((jnp.sin(x) * i).sum(), i + 1))
    zero = np.zeros((), jax.dtypes.float0)
    (out, i), (dout, di) = jax.jvp(fun, (X, 2), (X, zero))
    same(out, 2 * jnp.sin(X).sum())
    assert i == 3
    assert di.dtype == jax.dtypes.float0
    dx, dzero = jax.grad(fun, (0, 1), has_aux=True, allow_int=True)(X, 2)[0]
    same(dx, 2 * jnp.cos(X))
    assert dzero.dtype == jax.dtypes.float0
    same(dout, (jnp.cos(X) * 2 * X).sum())


def test_complex_numbers() -> None:
    fun = lambda z: jnp.real(jnp.sin(z) * jnp.conj(z)).sum()
    z = X + 0.5j
    same(jax.grad(checkpoint(fun))(z), jax.grad(fun)(z))


def test_collectives_under_vmap() -> None:
    fun = lambda x: lax.psum(jnp.sin(jnp.sin(x)), "i")
    for f in (fun, checkpoint(fun)):
        same(jax.vmap(jax.grad(f), axis_name="i")(X), jax.vmap(jax.grad(fun), axis_name="i")(X))
        same(
            jax.grad(lambda x: jax.vmap(f, axis_name="i")(x).sum())(X),
            jax.grad(lambda x: jax.vmap(fun, axis_name="i")(x).sum())(X),
        )


# -------------------------------------------------------------------------------------------- closures, caches, tracing


def test_closed_over_arrays_and_tracers() -> None:
    def loss(layer: Any) -> Any:
        return lambda w: layer(lambda x: block(x, w + W))(X).sum()

    same(jax.grad(loss(checkpoint))(W), jax.grad(loss(lambda f: f))(W))
    same(jax.jit(jax.grad(loss(checkpoint)))(W), jax.grad(loss(lambda f: f))(W))
    same(jax.vmap(jax.grad(loss(checkpoint)))(jnp.stack([W, -W]))[1], jax.grad(loss(lambda f: f))(-W))


def test_constants_of_calls_inside_loops_and_branches() -> None:
    inner = jax.jit(lambda x: jnp.sin(jnp.sin(x * X)) * np.arange(4, dtype=np.float32))

    def fun(x: Any) -> Any:
        x, ys = lax.scan(lambda c, _: (inner(c), inner(c + 1)), x, None, length=3)
        return (lax.cond(x[0] > 0, inner, lambda x: x, x) + ys.sum(0)).sum()

    for policy in (None, lambda prim, *_, **__: prim.name == "sin"):
        same(jax.grad(checkpoint(fun, policy=policy))(X), jax.grad(fun)(X))
    everything = autoremat.checkpoint_policies.everything_saveable
    assert "barrier" not in jax.jit(jax.grad(checkpoint(fun, policy=everything))).lower(X).as_text()


def test_a_function_is_traced_once() -> None:
    traces = []

    def fun(x: Any, flag: bool = False) -> Any:
        traces.append(flag)
        return jnp.sin(jnp.sin(x)).sum()

    wrapped = checkpoint(fun, static_argnums=1)
    for _ in range(10):
        jax.grad(wrapped)(X)
        wrapped(X)
    assert len(traces) == 1
    wrapped(X, True)
    checkpoint(fun)(X)
    assert len(traces) == 2
    wrapped(X[:2])
    assert len(traces) == 3


def test_ten_layers_under_jit_are_traced_once() -> None:
    traces = []

    def layer(x: Any) -> Any:
        traces.append(1)
        return jnp.sin(jnp.sin(x))

    def loss(x: Any) -> Any:
        for _ in range(10):
            x = checkpoint(layer)(x)
        return x.sum()

    jax.jit(jax.grad(loss))(X)
    assert len(traces) == 1


def test_a_new_tracer_in_an_old_closure() -> None:
    """JAX raises an UnexpectedTracerError here."""
    box: list[Any] = []
    fun = checkpoint(lambda x: jnp.sin(x * box[0]).sum())

    def loss(w: Any) -> Any:
        box[:] = [w]
        return fun(X)

    for w in (2.0, 3.0):
        same(jax.grad(loss)(w), (jnp.cos(X * w) * X).sum())


def test_no_leaks() -> None:
    def loss(w: Any, x: Any) -> Any:
        return checkpoint(lambda x: block(x, w))(x).sum()

    with jax.checking_leaks():
        jax.jit(jax.grad(loss))(W, X)
        jax.grad(
            lambda w: lax.scan(checkpoint(lambda c, _: (block(c, w), None)), X, None, length=2)[0].sum()
        )(W)


def test_caches_keep_nothing_alive() -> None:
    def make() -> tuple[Any, Any]:
        big = jnp.ones(1000)
        return big, lambda x: (jnp.sin(jnp.sin(x)) * big).sum()

    big, fun = make()
    references = [weakref.ref(big), weakref.ref(fun)]
    jax.grad(checkpoint(fun))(1.0)
    jax.jit(jax.grad(checkpoint(fun)))(1.0)
    del big, fun
    gc.collect()
    assert [r() for r in references] == [None, None]


@pytest.mark.parametrize(
    "use",
    [
        lambda f: jax.grad(f)(1.0),
        lambda f: jax.jvp(f, (1.0,), (1.0,)),
        lambda f: jax.jvp(jax.grad(f), (1.0,), (1.0,)),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.ones(3)),
    ],
    ids=["grad", "jvp", "jvp of grad", "grad of vmap"],
)
def test_programs_do_not_outlive_their_functions(use: Any) -> None:
    def equations_after(functions: int) -> int:
        for i in range(functions):
            use(checkpoint(lambda x, i=i: jnp.sin(jnp.tanh(x) * i) * x))
        gc.collect()
        return sum(type(o).__name__ == "JaxprEqn" for o in gc.get_objects())

    equations_after(3)
    before = equations_after(3)
    assert equations_after(9) <= before + 30  # caches of JAX hold what was used last


def test_a_mistake_inside_is_reported_where_it_is() -> None:
    with pytest.raises(jax.errors.UnexpectedTracerError):
        leaked = []
        checkpoint(lambda x: leaked.append(x) or x)(1.0)
        print(leaked[0] + 1)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
        jax.grad(checkpoint(lambda x: lax.while_loop(lambda c: c < 3, lambda c: c * 2, x)))(1.0)


# -------------------------------------------------------------------------------------------------------- recomputation


def chain(x: Any) -> Any:
    return jnp.sin(jnp.sin(jnp.sin(x))).sum()


def test_what_runs_again_without_a_policy() -> None:
    plain, ours = count(jax.grad(chain), X), count(jax.grad(checkpoint(chain)), X)
    theirs = count(jax.grad(jax.checkpoint(chain)), X)
    assert (plain["sin"], plain["cos"]) == (3, 3)
    assert (ours["sin"], ours["cos"]) == (theirs["sin"], theirs["cos"]) == (5, 3)


@pytest.mark.parametrize(("length", "executions"), [(4, 2), (8, 8), (16, 24)])
def test_recursive_checkpoints(length: int, executions: int) -> None:
    """The numbers of sines in the backward pass of JAX's `test_remat_recursive_checkpoint_recompute_counts`."""

    def recursive(funs: Any, wrap: Any) -> Any:
        if len(funs) == 1:
            return funs[0]
        one, two = recursive(funs[: len(funs) // 2], wrap), recursive(funs[len(funs) // 2 :], wrap)
        return lambda x: one(wrap(two)(x))

    counts = [
        count(jax.grad(recursive([jnp.sin] * length, wrap)), 1.0)["sin"]
        for wrap in (checkpoint, jax.checkpoint)
    ]
    assert counts[0] <= counts[1]
    assert counts[0] >= length + executions // 4


def test_policies_inside_and_outside_a_scan() -> None:
    def body(wrap: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return wrap(lambda c: jnp.sin(jnp.sin(c)))(c), None

        return step

    def inside(wrap: Any) -> Any:
        return lambda x: lax.scan(body(wrap), x, None, length=3)[0].sum()

    def outside(wrap: Any) -> Any:
        return wrap(inside(lambda f: f))

    for policy in (lambda p, *_, **__: p.name == "cos", lambda p, *_, **__: p.name == "sin", None):
        for place in (inside, outside):
            ours = count(jax.grad(place(lambda f, p=policy: checkpoint(f, policy=p))), X)
            theirs = count(jax.grad(place(lambda f, p=policy: jax.checkpoint(f, policy=p))), X)
            assert ours["sin"] <= theirs["sin"], (policy, place)
            assert ours["cos"] <= theirs["cos"], (policy, place)


def test_what_no_output_needs_is_not_kept() -> None:
    def fun(x: Any, y: Any) -> Any:
        return jnp.sin(jnp.sin(x)), jnp.exp(jnp.exp(y))

    everything = autoremat.checkpoint_policies.everything_saveable
    loss = lambda x, y: checkpoint(fun, policy=everything)(x, y)[0].sum()
    assert count(jax.jit(jax.grad(loss)), X, X).get("exp", 0) <= 4
    lowered = jax.jit(jax.grad(loss)).lower(X, X).compile().as_text() or ""
    assert "exponential" not in lowered


def test_a_result_that_is_kept_is_one_array() -> None:
    fun = checkpoint(jax.jit(lambda x: jnp.exp(x)), policy=autoremat.checkpoint_policies.everything_saveable)
    out, pull = jax.vjp(jax.jit(fun), X)
    residuals = [r for r in jax.tree.leaves(pull) if getattr(r, "shape", None) == X.shape]
    assert len(residuals) == 1
    same(pull(jnp.ones_like(out))[0], jnp.exp(X))
