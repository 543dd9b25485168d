"""`saved_residuals`: the list that JAX gives for simple functions, and what it does not see for others."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoremat as ar
from autoremat.storage import codecs_for
from autoremat.transform._decide import KeepDecider

HERE = __file__
X = jnp.ones((3, 4))
W = jnp.full((4, 4), 0.5)
C = jnp.arange(4.0)
SAVE = ar.checkpoint_policies


def line_of(marker: str) -> int:
    """The line of this file that holds the comment `# marker`."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return found


def by_kind(found: ar.Residuals) -> list[tuple[Any, ...]]:
    return [(r.kind, r.shape, r.dtype, r.nbytes, r.iterations) for r in found]


# ------------------------------------------------------------------------------------------------------ against JAX's


def _mlp(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.cos(x @ params["w"] + params["b"]))


def _integers(x: Any, i: Any) -> Any:
    return x[0] * i * jnp.sin(x[1])


_SIMPLE: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("sines", lambda x: jnp.sin(jnp.sin(x)), (X,)),
    ("product", lambda x, y: x * y, (X, X)),
    ("one argument twice", lambda x: (x * x) * x, (X,)),
    ("matrix product", lambda x, w: jnp.exp(x @ w) @ w, (X, W)),
    ("pytree", _mlp, ({"w": W, "b": C}, X)),
    ("varargs", lambda *xs: xs[0] * xs[1], (X, X)),
    ("constant", lambda x: jnp.sin(x @ W), (X,)),
    ("division", lambda x, y: x / y, (X, X + 1)),
    ("reduction", lambda x: jnp.sum(jnp.sin(x) ** 2), (X,)),
    ("comparison", lambda x: lax.select(x > 0.5, x * x, x), (X,)),
    ("integers", _integers, (X, jnp.arange(4))),
    ("object", functools.partial(lambda w, x: jnp.cos(x @ w), W), (X,)),
    ("narrow", lambda x: jnp.sin(x) * x, (X.astype(jnp.bfloat16),)),
    ("shape only", lambda x: jnp.sin(x), (jax.ShapeDtypeStruct((5,), jnp.float32),)),
]


@pytest.mark.parametrize(("fun", "args"), [s[1:] for s in _SIMPLE], ids=[s[0] for s in _SIMPLE])
def test_simple_functions_as_jax(fun: Any, args: Any, capsys: pytest.CaptureFixture[str]) -> None:
    jax.ad_checkpoint.print_saved_residuals(fun, *args)
    theirs = [line for line in capsys.readouterr().out.splitlines() if not line.endswith("from a literal")]
    found = ar.saved_residuals(fun, *args)
    ours = [f"{r.type} {r.description}" for r in found]
    assert sorted(ours) == sorted(theirs)
    assert found.total_bytes == sum(r.nbytes for r in found) > 0


def test_arguments_and_constants_come_first() -> None:
    found = ar.saved_residuals(lambda a, b, c: jnp.sin(c * (a @ W)) * b, X, X, X)
    kinds = [r.kind for r in found]
    assert sorted(kinds[:3]) == ["argument", "argument", "constant"]
    assert set(kinds[3:]) == {"intermediate"}
    assert [r.source for r in found if r.kind == "argument"] == ["b", "c"]


def test_custom_derivatives() -> None:
    @jax.custom_jvp
    def own(x: Any) -> Any:
        return jnp.sin(x)

    own.defjvp(lambda p, t: (own(*p), jnp.exp(p[0]) * t[0]))
    (r,) = ar.saved_residuals(lambda x: own(2 * x), X)
    assert r.primitive == "exp"
    assert r.source.startswith(HERE)


# -------------------------------------------------------------------------------------------------------- what one is


def test_fields() -> None:
    def fun(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ params["layer"]["w"]))  # the sine

    residuals = ar.saved_residuals(fun, {"layer": {"w": W}}, X)
    found = {(r.kind, r.source if r.kind == "argument" else r.primitive): r for r in residuals}
    assert len(found) == len(residuals) == 3
    cos = found["intermediate", "cos"]
    assert (cos.shape, cos.dtype, cos.nbytes, cos.iterations, cos.name) == ((3, 4), "float32", 48, 1, None)
    assert re.fullmatch(
        rf"{re.escape(HERE)}:{line_of('the sine')}:\d+ \(test_fields\.<locals>\.fun\)", cos.source
    )
    assert cos.description == f"output of cos from {cos.source}"
    assert found["argument", "params['layer']['w']"].nbytes == 64
    assert found["argument", "x"].description == "from the argument x"


def test_sums() -> None:
    found = ar.saved_residuals(lambda x: jnp.sin(jnp.sin(x @ W) * x), X)
    assert found.total_bytes == sum(r.nbytes for r in found)
    assert found.argument_bytes == sum(r.nbytes for r in found if r.kind != "intermediate")
    assert found.intermediate_bytes == found.total_bytes - found.argument_bytes > 0
    assert len(found) == len(list(found))
    assert found[0] in found
    assert list(found[:2]) == [found[0], found[1]]


def test_keyword_arguments_have_names() -> None:
    found = ar.saved_residuals(lambda x, *, scale: x * scale["a"], X, scale={"a": X})
    assert {r.source for r in found} == {"x", "scale['a']"}


def test_nothing_is_kept_of_a_linear_function_or_of_integers() -> None:
    for fun, arg in ((lambda x: 2 * x, X), (lambda i: i * i, jnp.arange(3))):
        found = ar.saved_residuals(fun, arg)
        assert len(found) == 0
        assert found.total_bytes == 0
        assert found.notes == ()


def test_nothing_is_executed() -> None:
    def fun(x: Any) -> Any:
        jax.debug.callback(lambda: pytest.fail("executed"))
        return jnp.sin(x)

    assert len(ar.saved_residuals(fun, X)) == 1


def test_names() -> None:
    def fun(x: Any) -> Any:
        y = ar.checkpoint_name(x @ W, "product")  # the product
        return jnp.sum(y * y)

    (r,) = [r for r in ar.saved_residuals(fun, X) if r.kind == "intermediate"]
    assert r.name == "product"
    assert r.description.startswith(f"named 'product' from {HERE}:{line_of('the product')}:")
    tagged_by_jax = ar.saved_residuals(lambda x: jax.ad_checkpoint.checkpoint_name(jnp.exp(x), "theirs"), X)
    assert [r.name for r in tagged_by_jax] == ["theirs"]


def test_a_name_on_an_argument_does_not_hide_the_argument() -> None:
    found = ar.saved_residuals(lambda x: x * ar.checkpoint_name(x, "input"), X)
    assert [(r.kind, r.source) for r in found] == [("argument", "x")]


# --------------------------------------------------------------------------------------------------------- seeing through


def test_through_jit() -> None:
    plain = ar.saved_residuals(lambda x: jnp.sin(jnp.sin(x)), X)
    for fun in (
        jax.jit(lambda x: jnp.sin(jnp.sin(x))),
        lambda x: jax.jit(jax.jit(lambda y: jnp.sin(jnp.sin(y))))(x),
    ):
        assert by_kind(ar.saved_residuals(fun, X)) == by_kind(plain)
        assert {r.primitive for r in ar.saved_residuals(fun, X)} == {"cos"}


def test_functions_of_jax_have_the_line_that_called_them() -> None:
    def fun(x: Any) -> Any:
        return jnp.sum(jax.nn.softmax(jnp.where(x > 0, x * x, 1.0)))  # the softmax

    found = [r for r in ar.saved_residuals(fun, X) if r.kind == "intermediate"]
    assert len(found) > 2
    for r in found:
        assert r.source.startswith(f"{HERE}:{line_of('the softmax')}:"), r


def test_lines_of_this_package_are_no_source() -> None:
    @jax.custom_vjp
    def fun(x: Any) -> Any:
        return jnp.sin(x)

    fun.defvjp(lambda x: (jnp.sin(x), (x, x > 0)), lambda r, ct: (ct * r[0] * r[1],))
    for r in ar.saved_residuals(fun, X):
        assert "autoremat/transform" not in r.source
        assert not r.description.endswith("from ")


def test_through_scan() -> None:
    def fun(x: Any, ws: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            h = ar.checkpoint_name(carry @ w, "hidden")
            return h * jnp.sin(h), None  # the body

        return jnp.sum(lax.scan(body, x, ws)[0])

    ws = jnp.ones((5, 4, 4))
    found = ar.saved_residuals(fun, X, ws)
    inside = [r for r in found if r.iterations > 1]
    assert all(r.iterations == 5 and r.shape[0] == 5 and r.nbytes == 5 * 48 for r in inside)
    assert {r.primitive for r in inside} >= {"sin", "scan (a value carried from one iteration to the next)"}
    assert "hidden" in {r.name for r in inside}
    sin = next(r for r in inside if r.primitive == "sin")
    assert sin.source.startswith(f"{HERE}:{line_of('the body')}:")
    assert sin.description.endswith(", 5 iterations")
    assert [(r.source, r.nbytes) for r in found if r.kind == "argument"] == [("ws", 320)]
    assert found.total_bytes == 320 + len(inside) * 240


def test_functions_of_jax_inside_a_loop_have_the_line_that_called_them() -> None:
    def fun(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return jnp.where(carry > 0, carry * carry, 1.0), None  # the where

        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    for r in ar.saved_residuals(fun, X):
        assert r.source.startswith(HERE)
        if "scan" not in r.primitive:
            assert f":{line_of('the where')}:" in r.source


def test_through_nested_scans() -> None:
    def fun(x: Any) -> Any:
        def outer(carry: Any, _: Any) -> Any:
            return lax.scan(lambda c, _: (jnp.sin(c), None), carry, None, length=2)[0], None

        return jnp.sum(lax.scan(outer, x, None, length=3)[0])

    (r,) = ar.saved_residuals(fun, X)
    assert (r.primitive, r.iterations, r.shape, r.nbytes) == ("cos", 6, (3, 2, 3, 4), 6 * 48)


def test_through_loops_of_known_length() -> None:
    (r,) = ar.saved_residuals(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x), X)
    assert (r.primitive, r.iterations, r.nbytes) == ("cos", 3, 3 * 48)


def test_through_cond() -> None:
    def fun(x: Any, flag: Any) -> Any:
        return lax.cond(flag, lambda x: jnp.sin(x @ W), lambda x: jnp.exp(x), x)  # the branches

    found = ar.saved_residuals(fun, X, True)
    (r,) = [r for r in found if r.shape == X.shape and r.kind == "intermediate"]
    # Both branches keep a value of this shape, so JAX makes one residual for the two.
    assert sorted(r.primitive.split(" or ")) == ["cos", "exp"]
    assert len(r.source.split(" or ")) == 2
    for source in r.source.split(" or "):
        assert source.startswith(f"{HERE}:{line_of('the branches')}:")
        assert "<lambda>" in source


# -------------------------------------------------------------------------------------------------------- checkpoints


def _block(x: Any, w: Any) -> Any:
    return jnp.sin(ar.checkpoint_name(jnp.sin(x @ w), "act") @ w)


def test_checkpoint_keeps_its_arguments() -> None:
    found = ar.saved_residuals(ar.checkpoint(_block), X, W)
    assert [(r.kind, r.source) for r in found] == [("argument", "x"), ("argument", "w")]
    assert found.total_bytes < ar.saved_residuals(_block, X, W).total_bytes


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, ar.checkpoint])
def test_through_checkpoint(outer: Callable[..., Any]) -> None:
    policy = SAVE.save_only_these_names("act")
    found = ar.saved_residuals(outer(ar.checkpoint(_block, policy=policy)), X, W)
    inside = [r for r in found if r.kind == "intermediate"]
    if outer is ar.checkpoint:
        assert inside == []
        return
    (act,) = inside
    assert (act.name, act.primitive) == ("act", "sin")
    assert act.source.endswith("(_block)")


def test_through_checkpoint_in_a_loop() -> None:
    block = ar.checkpoint(_block, policy=SAVE.dots_saveable)
    found = ar.saved_residuals(lambda x: lax.scan(lambda c, _: (block(c, W), None), x, None, length=3)[0], X)
    dots = [r for r in found if r.primitive == "dot_general"]
    assert [(r.iterations, r.nbytes) for r in dots] == [(3, 3 * 48)] * 2


def test_a_value_that_is_both_kept_and_returned_counts_once() -> None:
    found = ar.saved_residuals(ar.checkpoint(lambda x: jnp.exp(x), policy=SAVE.everything_saveable), X)
    assert [(r.primitive, r.nbytes) for r in found] == [("exp", 48)]


@dataclass(frozen=True)
class _AllPacked:
    """Keeps everything, packed where that is possible."""

    def decider(self, joint: Any) -> KeepDecider:
        made = [v for eqn in joint.forward_eqns for v in eqn.outvars]
        return KeepDecider({v: codecs_for(v.aval.shape, str(v.aval.dtype))[-1].name for v in made})


def test_packed_values_count_as_they_are_kept() -> None:
    def fun(x: Any) -> Any:
        return lax.select(x > 0, 2 * x, -x)

    x = jnp.ones((16, 20))
    (plain,) = ar.saved_residuals(fun, x)
    (packed,) = ar.saved_residuals(ar.checkpoint(fun, policy=_AllPacked()), x)
    assert (plain.dtype, plain.nbytes) == ("bool", 320)
    assert (packed.dtype, packed.nbytes) == ("uint8", 16 * 3)


# --------------------------------------------------------------------------------------------------------------- notes


def _small(x: Any) -> Any:
    return jnp.sin(x)


@pytest.mark.parametrize(
    ("block", "args"),
    [
        (ar.checkpoint(_small), (X,)),
        (lambda x: jnp.cos(ar.checkpoint(_small)(x) * x), (X,)),
        (jax.jit(lambda x: ar.checkpoint(_small)(x)), (X,)),
        (lambda x: lax.scan(lambda c, _: (ar.checkpoint(_small)(c), None), x, None, length=3)[0], (X,)),
        (lambda x: lax.cond(x[0, 0] > 0, ar.checkpoint(_small), jnp.exp, x), (X,)),
        (lambda x: jnp.sin(ar.checkpoint(lambda y: jnp.sin(_block(ar.checkpoint(_small)(y), W)))(x)), (X,)),
    ],
)
def test_a_checkpoint_that_frees_nothing_is_named(block: Any, args: Any) -> None:
    notes = [n for n in ar.saved_residuals(block, *args).notes if "frees nothing" in n]
    (note,) = notes
    assert f"the checkpoint of _small at {HERE}:" in note
    assert "it keeps 48 B, the function without it 48 B, and it runs again in the backward pass" in note
    assert "Cheapest fix: " in note


def test_a_checkpoint_that_recomputes_nothing_either_is_named() -> None:
    (note,) = ar.saved_residuals(ar.checkpoint(lambda x: x * x), X).notes
    assert "frees nothing" in note
    assert "nothing of it has to run again" in note
    (note,) = ar.saved_residuals(ar.checkpoint(_small, policy=SAVE.everything_saveable), X).notes
    assert "frees nothing" in note


def test_each_useless_checkpoint_is_named_once() -> None:
    def other(x: Any) -> Any:
        return jnp.exp(x) + 1

    def fun(x: Any) -> Any:
        for _ in range(3):
            x = ar.checkpoint(other)(ar.checkpoint(_small)(x))
        return x

    notes = ar.saved_residuals(fun, X).notes
    assert [("_small" in n, "other" in n) for n in notes] == [(True, False), (False, True)]


def test_useful_checkpoints_are_not_named() -> None:
    for fun in (
        ar.checkpoint(_block),
        ar.checkpoint(_block, policy=SAVE.dots_saveable),
        jax.checkpoint(_block),
    ):
        assert ar.saved_residuals(fun, X, W).notes == ()
    # What it keeps are constants and no input with a derivative: it counts what it frees for real.
    assert ar.saved_residuals(lambda x: ar.checkpoint(lambda y: jnp.sin(jnp.sin(y)) @ W)(x), X).notes == ()


def test_activations_are_not_the_bulk() -> None:
    big = jnp.ones((100, 100))

    def fun(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w))

    (note,) = ar.saved_residuals(fun, big, jnp.ones((1, 100))).notes
    assert "activations (400 B) are not the bulk" in note
    assert "take 40,400 B" in note
    (note,) = ar.saved_residuals(lambda x: jnp.sum(jnp.sin(x @ big)), jnp.ones((1, 100))).notes
    assert "take 40,000 B" in note
    assert (
        ar.saved_residuals(lambda w, x: fun(w, jnp.sin(jnp.sin(x @ w) @ w)), big, jnp.ones((1000, 100))).notes
        == ()
    )


def test_a_checkpointed_function_is_not_said_to_have_small_activations() -> None:
    def loss(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = ar.checkpoint(_block)(x, w)
        return jnp.sum(x)

    assert ar.saved_residuals(loss, jnp.ones((2, 40)), jnp.ones((40, 40))).notes == ()


def test_a_missing_name_is_warned_of_once() -> None:
    fun = ar.checkpoint(_block, policy=SAVE.save_only_these_names("misspelt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ar.saved_residuals(fun, X, W)
    assert [w.category for w in caught] == [ar.UnmatchedNameWarning]


# ---------------------------------------------------------------------------------------------------------------- text


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(x: Any, w: Any) -> Any:
        return ar.checkpoint(_small)(jnp.sin(x @ w))

    x = np.ones((2000, 4), np.float32)
    ar.print_saved_residuals(fun, x, W)
    *rows, total, note = capsys.readouterr().out.splitlines()
    found = ar.saved_residuals(fun, x, W)
    assert len(rows) == len(found) == 4
    for row, r in zip(rows, found, strict=True):
        assert re.fullmatch(rf"{re.escape(r.type)} +{r.nbytes:,} B {re.escape(r.description)}", row)
    assert rows[0].startswith("f32[2000,4] 32,000 B from the argument x")
    assert rows[1].startswith("f32[4,4]        64 B from the argument w")
    assert total == "total 96,064 B in 4 residuals, of which 64,000 B are intermediates"
    assert note.startswith("note: the checkpoint of _small")


def test_text_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ar.print_saved_residuals(lambda x: 2 * x, X)
    assert capsys.readouterr().out == "total 0 B in 0 residuals, of which 0 B are intermediates\n"
