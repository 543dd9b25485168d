"""The twelve policies, callables of the user, and names."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Recompute, Saveable, print_saved_residuals
from jax.ad_checkpoint import checkpoint_name as jax_checkpoint_name

import autoremat
from autoremat import EffectError, PolicyError, UnmatchedNameWarning, saved_residuals
from autoremat.transform import checkpoint, checkpoint_name, checkpoint_policies
from autoremat.transform._ask import by_value

X = jnp.linspace(0.1, 0.9, 8).reshape(2, 4)
W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)


def attention(x: Any, w: Any) -> Any:
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    s = checkpoint_name(jax.nn.softmax(jnp.einsum("bi,bj->bij", h, h)), "s")
    o = checkpoint_name(jnp.einsum("bij,bj->bi", s, h), "o")
    return jnp.sin(o @ w).sum()


def loop(x: Any, w: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        c = checkpoint_name(jnp.tanh(c @ w), "h")
        return c, checkpoint_name(jnp.sin(c), "s")

    c, ys = lax.scan(step, x, None, length=3)
    return jnp.sin(c @ w).sum() + (ys**2).sum()


def branches(x: Any, w: Any) -> Any:
    return lax.cond(
        x[0, 0] > 0, lambda x: checkpoint_name(jnp.sin(jnp.sin(x @ w)), "h"), lambda x: jnp.cos(x @ w), x
    ).sum()


def activation(x: Any, w: Any) -> Any:
    return jax.nn.relu(jax.nn.relu(x @ w) @ w).sum()


def calls(x: Any, w: Any) -> Any:
    layer = jax.jit(lambda x: jnp.sin(x @ w))
    return layer(layer(x)).sum()


def _all_policies(space: Any) -> dict[str, Callable[..., Any]]:
    names = {"names_which_can_be_saved": ["h"], "names_which_can_be_offloaded": []}
    places = {"offload_src": "device", "offload_dst": "pinned_host"}
    plain = [
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "checkpoint_dots",
        "dots_with_no_batch_dims_saveable",
        "checkpoint_dots_with_no_batch_dims",
    ]
    return {
        **{name: getattr(space, name) for name in plain},
        "save_only_these_names": space.save_only_these_names("h", "o"),
        "save_any_names_but_these": space.save_any_names_but_these("h", "o"),
        "save_anything_except_these_names": space.save_anything_except_these_names(),
        "save_from_both_policies": space.save_from_both_policies(
            space.dots_saveable, space.save_only_these_names("h")
        ),
        "save_and_offload_only_these_names": space.save_and_offload_only_these_names(**names, **places),
    }


def _bytes_of_jax(fun: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> int:
    """The bytes of the residuals that JAX's own report lists."""
    capsys.readouterr()
    print_saved_residuals(fun, X, W)
    itemsize = {"f32": 4, "i32": 4, "bool": 1}
    found = re.findall(r"^(\w+)\[([\d,]*)\]", capsys.readouterr().out, re.MULTILINE)
    return sum(itemsize[t] * int(np.prod([int(n) for n in shape.split(",") if n])) for t, shape in found)


_bad_names = "ignore:a checkpoint policy names"


@pytest.mark.filterwarnings(_bad_names)
@pytest.mark.parametrize("fun", [attention, loop, branches, activation, calls], ids=lambda f: f.__name__)
def test_no_policy_keeps_more_than_in_jax(
    fun: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = _all_policies(jax.checkpoint_policies)
    expected = jax.grad(fun, (0, 1))(X, W)
    for name, policy in _all_policies(checkpoint_policies).items():
        wrapped = checkpoint(fun, policy=policy)
        kept = saved_residuals(wrapped, X, W).total_bytes
        assert kept <= _bytes_of_jax(jax.checkpoint(fun, policy=theirs[name]), capsys), name
        for ours, plain in zip(jax.grad(wrapped, (0, 1))(X, W), expected, strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_the_same_twelve_names_as_jax() -> None:
    assert {n for n in vars(checkpoint_policies) if not n.startswith("_")} == set(
        _all_policies(checkpoint_policies)
    ) | {"offload_dot_with_no_batch_dims"}


def _kept(policy: Any, fun: Callable[..., Any] = attention) -> list[tuple[str, str | None]]:
    return [
        (r.primitive, r.name)
        for r in saved_residuals(checkpoint(fun, policy=policy), X, W)
        if r.kind == "intermediate"
    ]


def test_what_some_policies_keep() -> None:
    cp = checkpoint_policies
    assert _kept(cp.nothing_saveable) == []
    assert {p for p, _ in _kept(cp.dots_saveable)} == {"dot_general"}
    assert {n for _, n in _kept(cp.save_only_these_names("h", "o"))} == {"h", "o"}
    assert {n for _, n in _kept(cp.save_any_names_but_these("h", "o"))} == {"s"}
    assert len(_kept(cp.dots_with_no_batch_dims_saveable)) < len(_kept(cp.dots_saveable))


def test_save_anything_except_really_excludes() -> None:
    """In JAX this policy saves everything."""
    everything = {n for _, n in _kept(checkpoint_policies.everything_saveable)}
    rest = {n for _, n in _kept(checkpoint_policies.save_anything_except_these_names("o", "s"))}
    assert {"o", "s"} <= everything
    assert rest == everything - {"o", "s"}
    both = checkpoint_policies.save_from_both_policies(
        checkpoint_policies.save_anything_except_these_names("o", "s"),
        checkpoint_policies.save_only_these_names("s"),
    )
    assert {n for _, n in _kept(both)} == everything - {"o"}


@pytest.mark.parametrize("decision", [True, Saveable])
def test_callables(decision: Any) -> None:
    asked = []

    def policy(prim: Any, *avals: Any, **params: Any) -> Any:
        asked.append((prim.name, [a.shape for a in avals], params))
        return decision if prim.name == "tanh" else (False if decision is True else Recompute)

    assert [p for p, _ in _kept(policy)] == ["tanh"]
    dots = [a for a in asked if a[0] == "dot_general"]
    assert ((2, 4), (4, 4)) in [tuple(shapes) for _, shapes, _ in dots]
    assert all("dimension_numbers" in params for *_, params in dots)


def test_a_policy_that_asks_for_the_equation() -> None:
    told = []

    def policy(prim: Any, *avals: Any, equation: autoremat.Equation, **params: Any) -> bool:
        told.append((prim.name, equation))
        return prim.name == "dot_general" and equation.nbytes <= 32

    kept = saved_residuals(checkpoint(attention, policy=policy), X, W)
    assert {r.shape for r in kept if r.primitive == "dot_general"} == {(2, 4)}
    everything = saved_residuals(checkpoint(attention, policy=checkpoint_policies.dots_saveable), X, W)
    assert {r.shape for r in everything if r.primitive == "dot_general"} == {(2, 4), (2, 4, 4)}
    dots = [e for name, e in told if name == "dot_general"]
    assert {(e.outputs[0].shape, str(e.outputs[0].dtype), e.nbytes, e.flops) for e in dots} >= {
        ((2, 4), "float32", 32, 2 * 2 * 4 * 4)
    }
    named = {e.names for name, e in told if name == "tanh"}
    assert named == {frozenset({"h"})}
    assert all(re.match(r".*test_policies.py:\d+", e.source) for e in dots)


def test_a_positional_parameter_of_that_name_is_the_primitive() -> None:
    policy = lambda equation, *avals, **params: equation.name == "tanh"
    assert [p for p, _ in _kept(policy)] == ["tanh"]


def test_combined_policies_hand_the_equation_on() -> None:
    def small(prim: Any, *avals: Any, equation: autoremat.Equation, **params: Any) -> bool:
        return equation.nbytes <= 32

    def tanh(prim: Any, *avals: Any, **params: Any) -> bool:
        return prim.name == "tanh"

    both = checkpoint_policies.save_from_both_policies(small, tanh)
    assert {p for p, _ in _kept(tanh)} < {p for p, _ in _kept(both)}


class Asked:
    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


def _keeps(primitive: str, keep: Any = True) -> Callable[..., Any]:
    """A new function at every call, that counts how often it is asked."""
    return lambda prim, *_, **__: Asked.note() or (prim.name == primitive and bool(keep))


def _twice(x: Any) -> Any:
    return jnp.sin(jnp.sin(x))


def test_a_new_function_of_the_same_code_is_the_same_policy() -> None:
    asked = []
    for policy in (_keeps("sin"), _keeps("sin"), functools.partial(_keeps("sin"), a=1), _keeps("cos")):
        Asked.count = 0
        jax.grad(checkpoint(_twice, policy=policy))(1.0)
        asked.append(bool(Asked.count))
    assert asked == [True, False, True, True]


KEEP = ["sin"]
NAME = "sin"


def _refers_to_itself() -> Callable[..., Any]:
    def policy(prim: Any, *_: Any, **__: Any) -> bool:
        return policy is not None and prim.name == "sin"

    return policy


def _counts() -> Callable[..., Any]:
    asked = 0

    def policy(prim: Any, *_: Any, **__: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    return policy


class Pair(NamedTuple):
    first: str
    second: str


def _with_attribute(value: Any) -> Callable[..., Any]:
    policy: Any = lambda prim, *_, **__: prim.name == "sin"
    policy.requested = value
    return policy


@pytest.mark.parametrize(
    "policy",
    [
        _keeps("sin", ["changes"]),
        _keeps("sin", np.ones(2)),
        lambda prim, *_, **__: prim.name in KEEP,
        _refers_to_itself(),
        _counts(),
        _keeps("sin", Pair("a", "b")),
        _with_attribute(frozenset({"a"})),
        np.sin,
    ],
)
def test_policies_that_may_change_are_compared_by_identity(policy: Any) -> None:
    assert by_value(policy) is policy


def test_what_makes_functions_different_policies() -> None:
    global NAME
    of_global = lambda: lambda prim, *_, **__: prim.name == NAME
    before = by_value(of_global())
    assert before == by_value(of_global())
    NAME = "cos"
    assert before != by_value(of_global())
    NAME = "sin"
    assert by_value(_keeps("sin", 1)) != by_value(_keeps("sin", True))
    assert by_value(_keeps("sin", 0.0)) != by_value(_keeps("sin", -0.0))
    assert by_value(functools.partial(_keeps("sin"), a=1)) == by_value(functools.partial(_keeps("sin"), a=1))
    assert by_value(functools.partial(_keeps("sin"), a=1)) != by_value(functools.partial(_keeps("sin"), a=2))


def test_a_variable_that_is_bound_to_something_else_later() -> None:
    def of(flag: bool) -> Any:
        fun = checkpoint(_twice, policy=lambda prim, *_, **__: flag)
        flag = not flag
        return str(jax.make_jaxpr(jax.grad(fun))(1.0))

    assert of(True) != of(False)


@pytest.mark.parametrize("answer", [1, 0, None, "yes"])
def test_a_policy_that_answers_neither(answer: Any) -> None:
    message = r"returned .* of type \w+; it must return a bool, or one of jax.ad_checkpoint.Saveable"
    with pytest.raises(PolicyError, match=message) as raised:
        jax.grad(checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=lambda *_, **__: answer))(1.0)
    assert isinstance(raised.value, TypeError)


def test_a_name_in_both_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="in both: \\['h'\\]"):
        checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["h"],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        )


def test_policies_are_compared_by_value() -> None:
    cp = checkpoint_policies
    assert cp.save_only_these_names("a", "b") == cp.save_only_these_names("b", "a")
    assert hash(cp.save_from_both_policies(cp.dots_saveable, cp.save_only_these_names("a"))) == hash(
        cp.save_from_both_policies(cp.dots_saveable, cp.save_only_these_names("a"))
    )


# --------------------------------------------------------------------------------------------------------------- names


def test_a_name_that_matches_nothing_is_reported() -> None:
    fun = checkpoint(attention, policy=checkpoint_policies.save_only_these_names("hh", "o"))
    with pytest.warns(UnmatchedNameWarning, match=r"names \['hh'\].*attention.*found: \['h', 'o', 's'\]"):
        jax.grad(fun)(X, W)


@pytest.mark.parametrize("fun", [attention, loop, branches], ids=lambda f: f.__name__)
def test_a_name_that_matches_is_not_reported(fun: Callable[..., Any]) -> None:
    policy = checkpoint_policies.save_only_these_names("h")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(checkpoint(fun, policy=policy))(X, W)
        jax.grad(checkpoint(jax.jit(fun), policy=policy))(X, W)
        jax.grad(checkpoint(checkpoint(fun), policy=policy))(X, W)


def test_tags_of_jax_count() -> None:
    fun = lambda x: jnp.sin(jax_checkpoint_name(jnp.sin(x), "a")).sum()
    found = saved_residuals(checkpoint(fun, policy=checkpoint_policies.save_only_these_names("a")), X)
    assert [r.name for r in found if r.kind == "intermediate"] == ["a"]
    theirs = jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")).sum(),
        policy=jax.checkpoint_policies.save_only_these_names("a"),
    )
    assert str(jax.make_jaxpr(jax.grad(theirs))(X)).count(" sin ") == 2
    tree = checkpoint_name({"a": X, "b": [X]}, "pair")
    assert jax.tree.structure(tree) == jax.tree.structure({"a": X, "b": [X]})
    with pytest.raises(TypeError, match="needs a str"):
        checkpoint_name(X, 3)  # pyright: ignore[reportArgumentType]


def test_names_in_the_rules_of_a_custom_vjp() -> None:
    @jax.custom_vjp
    def kernel(x: Any) -> Any:
        return jnp.exp(x)

    def forward(x: Any) -> Any:
        y = checkpoint_name(jnp.exp(x), "y")
        return y, y

    kernel.defvjp(forward, lambda y, ct: (y * ct,))
    fun = checkpoint(lambda x: kernel(x).sum(), policy=checkpoint_policies.save_only_these_names("y"))
    assert str(jax.make_jaxpr(jax.grad(fun))(X)).count(" exp ") == 1
    assert str(jax.make_jaxpr(jax.grad(checkpoint(lambda x: kernel(x).sum())))(X)).count(" exp ") == 2


def test_the_outer_policy_wins() -> None:
    cp = checkpoint_policies
    inner = checkpoint(attention, policy=cp.nothing_saveable)
    assert {p for p, _ in _kept(cp.dots_saveable, inner)} == {"dot_general"}
    assert _kept(cp.nothing_saveable, checkpoint(attention, policy=cp.dots_saveable)) == []


# ------------------------------------------------------------------------------------------------------ effects, random


def test_an_effect_that_may_not_repeat_is_refused() -> None:
    from jax.experimental import io_callback

    def fun(x: Any) -> Any:
        io_callback(lambda v: None, None, lax.stop_gradient(x))
        return jnp.sin(x)

    checkpoint(fun)(1.0)
    with pytest.raises(
        EffectError, match=r"Effects not supported in partial-eval of `checkpoint`.*Cheapest fix"
    ):
        jax.grad(checkpoint(fun))(1.0)
    assert issubclass(EffectError, NotImplementedError)


def test_debug_prints_repeat_as_in_jax() -> None:
    log: list[float] = []

    def fun(x: Any) -> Any:
        y = checkpoint_name(jnp.sin(x), "y")
        jax.debug.callback(log.append, y)
        return jnp.sin(y)

    def printed(run: Callable[..., Any]) -> int:
        log.clear()
        run()
        jax.effects_barrier()
        return len(log)

    for policy, times in ((None, 2), (checkpoint_policies.everything_saveable, 1)):
        wrapped = checkpoint(fun, policy=policy)
        assert printed(lambda f=wrapped: f(1.0)) == 1
        assert printed(lambda f=wrapped: jax.jvp(f, (1.0,), (1.0,))) == 1
        assert printed(lambda f=wrapped: jax.grad(f)(1.0)) == times
        assert printed(lambda f=wrapped: jax.jit(jax.grad(f))(1.0)) == times


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_bits_that_depend_on_the_partitioning_are_drawn_once(impl: str) -> None:
    def draw(key: Any, x: Any) -> Any:
        return jnp.sin(jnp.sin(jax.random.uniform(key, x.shape) * x))

    def fun(x: Any, key: Any) -> Any:
        x = lax.scan(lambda c, k: (draw(k, c), None), x, jax.random.split(key, 2))[0]
        return jax.jit(draw)(key, x).sum()

    key = jax.random.key(0, impl=impl)
    wrapped = checkpoint(fun)
    np.testing.assert_allclose(jax.grad(wrapped)(X, key), jax.grad(fun)(X, key), rtol=1e-5)
    bits = [str(jax.make_jaxpr(jax.grad(f))(X, key)).count("random_bits[") for f in (fun, wrapped)]
    if impl == "threefry2x32":
        assert bits[1] > bits[0]
    else:
        assert bits[1] == bits[0]


def test_references() -> None:
    """What reads or writes a reference runs once; JAX runs it twice."""
    ref = jax.new_ref(1.0)

    def fun(x: Any) -> Any:
        out = x * ref[...]
        ref[...] += 1.0
        local = jax.new_ref(jnp.zeros(2))
        lax.scan(lambda c, i: (c, local.__setitem__(i, jnp.sin(c))), out, jnp.arange(2))
        return local[...].mean()

    gradient = jax.grad(checkpoint(fun))(2.0)
    np.testing.assert_allclose(gradient, np.cos(2.0), rtol=1e-6)
    np.testing.assert_allclose(ref[...], 2.0)
    np.testing.assert_allclose(jax.jit(jax.grad(checkpoint(fun)))(2.0), 2 * np.cos(4.0), rtol=1e-6)
    np.testing.assert_allclose(ref[...], 3.0)


def test_the_check_for_reused_keys_looks_inside() -> None:
    good = checkpoint(lambda x, key: x * jnp.sin(x * jax.random.bits(key)))
    bad = checkpoint(lambda x, key: x * jax.random.bits(key) + jax.random.bits(key))
    with jax.debug_key_reuse(True):
        jax.jit(jax.grad(good))(1.0, jax.random.key(0))
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(jax.grad(bad))(1.0, jax.random.key(0))


def test_the_names_of_the_package() -> None:
    assert autoremat.checkpoint is checkpoint
    assert autoremat.checkpoint_policies is checkpoint_policies
