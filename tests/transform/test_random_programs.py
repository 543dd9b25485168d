"""A checkpointed program has the values and the derivatives of the plain one, whatever is kept.

What failed is printed as a program that can be pasted into a test, with the seed of its arguments.
"""

# pyright: reportOptionalMemberAccess=false
# (hypothesis types `settings()` as optional)
from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat._errors import UnmatchedNameWarning
from autoremat.storage import codecs_for
from autoremat.transform import checkpoint, checkpoint_policies
from autoremat.transform._decide import KeepDecider
from support.compare import assert_same
from support.interpreter import compiled, interpreted
from support.modes import forward_over_reverse, grad_of_vmap, reverse_over_reverse, value_and_grads
from support.programs import NAMES, Program, arguments, as_function, programs, without_reverse_rules


@dataclass(frozen=True)
class RandomKeeps:
    """Keeps a random subset of all values, packed where that is possible."""

    seed: int
    share: float

    def decider(self, joint: Any) -> KeepDecider:
        rng = random.Random(self.seed)
        keep = {}
        for eqn in joint.forward_eqns:
            for v in eqn.outvars:
                if rng.random() < self.share:
                    codecs = codecs_for(getattr(v.aval, "shape", ()), str(getattr(v.aval, "dtype", "")))
                    keep[v] = codecs[-1].name
        return KeepDecider(keep)


@dataclass(frozen=True)
class RandomCallable:
    """A policy of the user: by the name of the primitive."""

    seed: int

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return random.Random(f"{self.seed} {prim.name}").random() < 0.5


_names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
_plain = st.sampled_from(
    [
        None,
        checkpoint_policies.everything_saveable,
        checkpoint_policies.nothing_saveable,
        checkpoint_policies.dots_saveable,
        checkpoint_policies.checkpoint_dots,
        checkpoint_policies.dots_with_no_batch_dims_saveable,
        checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    ]
)
_named = st.one_of(
    _names.map(lambda n: checkpoint_policies.save_only_these_names(*n)),
    _names.map(lambda n: checkpoint_policies.save_any_names_but_these(*n)),
    _names.map(lambda n: checkpoint_policies.save_anything_except_these_names(*n)),
    _names.map(
        lambda n: checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=n,
            names_which_can_be_offloaded=[],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
)
_seeds = st.integers(0, 2**16)
policies = st.one_of(
    _plain,
    _named,
    st.builds(
        checkpoint_policies.save_from_both_policies, _named, st.just(checkpoint_policies.dots_saveable)
    ),
    st.builds(RandomCallable, _seeds),
    st.builds(RandomKeeps, _seeds, st.sampled_from([0.1, 0.5, 0.9])),
)


def _plain_wrap(fun: Callable[..., Any], i: int) -> Callable[..., Any]:
    return fun


def functions(program: Program, policy: Any, inner: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The plain program, and the checkpointed one with checkpoints inside."""

    def wrap(fun: Callable[..., Any], i: int) -> Callable[..., Any]:
        return checkpoint(fun, policy=inner, prevent_cse=bool(i % 2))

    return as_function(program, _plain_wrap), checkpoint(as_function(program, wrap), policy=policy)


def forward_mode(fun: Callable[..., Any]) -> Callable[..., Any]:
    def pushed(vec: Any, mat: Any, ints: Any) -> Any:
        return jax.jvp(lambda v, m: fun(v, m, ints)[0], (vec, mat), (jnp.cos(vec), jnp.sin(mat)))

    return pushed


def vmap_of_grad(fun: Callable[..., Any]) -> Callable[..., Any]:
    def batched(vec: Any, mat: Any, ints: Any) -> Any:
        vecs = jnp.stack([vec, jnp.flip(vec)])
        return jax.vmap(jax.grad(lambda v, m: fun(v, m, ints)[0], (0, 1)), (0, None))(vecs, mat)

    return batched


def _assert_same(actual: Any, expected: Any) -> None:
    assert_same(actual, expected, rtol=1e-9)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Double precision, so that rounding is far from any real difference. Names may match nothing here."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmatchedNameWarning)
        yield


@settings(max_examples=settings().max_examples * 4 // 5)
@given(program=programs, policy=policies, inner=policies, seed=_seeds)
def test_values_and_gradients(program: Program, policy: Any, inner: Any, seed: int) -> None:
    plain, ours = functions(program, policy, inner)
    args = arguments(seed)
    _assert_same(interpreted(value_and_grads(ours))(*args), interpreted(value_and_grads(plain))(*args))


@settings(max_examples=max(4, settings().max_examples // 6))
@given(program=programs, policy=policies, inner=policies, seed=_seeds)
def test_compiled(program: Program, policy: Any, inner: Any, seed: int) -> None:
    plain, ours = functions(program, policy, inner)
    args = arguments(seed)
    _assert_same(compiled(value_and_grads(ours))(*args), interpreted(value_and_grads(plain))(*args))


@settings(max_examples=max(4, settings().max_examples // 6))
@given(program=programs, policy=policies, inner=policies, seed=_seeds)
def test_without_jit(program: Program, policy: Any, inner: Any, seed: int) -> None:
    plain, ours = functions(program, policy, inner)
    args = arguments(seed)
    _assert_same(ours(*args), interpreted(plain)(*args))
    _assert_same(value_and_grads(ours)(*args), interpreted(value_and_grads(plain))(*args))


_first_order = [forward_mode, vmap_of_grad, grad_of_vmap]
_second_order = [forward_over_reverse, reverse_over_reverse]


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs, policy=policies, inner=policies, seed=_seeds, mode=st.sampled_from(_first_order))
def test_other_modes(program: Program, policy: Any, inner: Any, seed: int, mode: Callable[..., Any]) -> None:
    plain, ours = functions(program, policy, inner)
    args = arguments(seed)
    if mode is forward_mode:  # JAX refuses functions with a reverse-mode rule only
        program = without_reverse_rules(program)
        plain, ours = functions(program, policy, inner)
    _assert_same(interpreted(mode(ours))(*args), interpreted(mode(plain))(*args))


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs, policy=policies, inner=policies, seed=_seeds, mode=st.sampled_from(_second_order))
def test_second_order(program: Program, policy: Any, inner: Any, seed: int, mode: Callable[..., Any]) -> None:
    plain, ours = functions(program, policy, inner)
    args = arguments(seed)
    _assert_same(interpreted(mode(ours))(*args), interpreted(mode(plain))(*args))


def test_branch_that_runs_a_while_again_shares_no_residual() -> None:
    """A place that branches share has a tangent, and JAX transposes a `while` only without."""
    loop = (("while", 5, 5, 2, ()), ("remat_scan", 4, 0, 4, ((("batched_dot", 3, 1, 3, ()),),)))
    again = (
        "remat",
        4,
        4,
        3,
        ((("binary", 5, 1, 1, ()), ("cond", 3, 3, 0, ((), (("slice", 1, 4, 1, ()),)))),),
    )
    program = (("cond", 1, 1, 3, (loop, (("batched_dot", 3, 1, 3, ()),))), again)
    plain, ours = functions(program, RandomCallable(65536), RandomCallable(958))
    args = arguments(249)
    second = reverse_over_reverse
    _assert_same(interpreted(second(ours))(*args), interpreted(second(plain))(*args))
