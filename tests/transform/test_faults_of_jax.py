"""What JAX's documentation promises and `jax.checkpoint` does not do, up to JAX 0.12.0.1: ours does it.

Each test says what JAX does instead, and fails where a later JAX does it right, so that the list stays true.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoremat as ar

X = jnp.linspace(0.1, 1.0, 8)


def named(x: Any) -> Any:
    y = ar.checkpoint_name(jnp.sin(x), "y")
    return jnp.sin(ar.checkpoint_name(y * jnp.cos(x), "z")).sum()


def kept_names(checkpoint: Any, policy: Any) -> set[str | None]:
    """The names of what is kept; a value that is kept under no name counts as `None`."""
    found = ar.saved_residuals(checkpoint(named, policy=policy), X)
    return {r.name for r in found if r.kind == "intermediate"}


def test_save_anything_except_these_names_saves_the_others():
    """JAX's saves everything: it asks about each operation, and the operation that makes a value has no name."""

    def policy(space: Any) -> Any:
        return space.save_anything_except_these_names("y", "z")

    assert not kept_names(ar.checkpoint, policy(ar.checkpoint_policies)) & {"y", "z"}
    assert kept_names(jax.checkpoint, policy(jax.checkpoint_policies)) & {"y", "z"}


def test_static_argnames():
    """JAX's accepts the argument and traces the flag all the same."""

    def f(x: Any, flag: bool) -> Any:
        return jnp.sin(x).sum() if flag else jnp.cos(x).sum()

    np.testing.assert_allclose(
        jax.grad(lambda x: ar.checkpoint(f, static_argnames="flag")(x, flag=True))(X), jnp.cos(X), rtol=1e-6
    )
    theirs: Any = jax.checkpoint
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.grad(lambda x: theirs(f, static_argnames="flag")(x, flag=True))(X)


def test_a_decorator_with_options():
    """JAX's needs the function at once."""

    @ar.checkpoint(policy=ar.checkpoint_policies.dots_saveable)
    def f(x: Any) -> Any:
        return jnp.sin(x).sum()

    np.testing.assert_allclose(jax.grad(f)(X), jnp.cos(X), rtol=1e-6)
    theirs: Any = jax.checkpoint
    with pytest.raises(TypeError):
        theirs(policy=jax.checkpoint_policies.dots_saveable)


def test_two_policies_of_which_one_offloads():
    """JAX's combination takes bools only."""

    def both(space: Any) -> Any:
        moved = space.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["y"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return space.save_from_both_policies(moved, space.save_only_these_names("z"))

    ours = ar.checkpoint(named, policy=both(ar.checkpoint_policies))
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(X), jax.grad(named)(X), rtol=1e-6)
    found = {r.name: r.offloaded for r in ar.saved_residuals(ours, X) if r.kind == "intermediate"}
    assert found == {"y": True, "z": False}
    with pytest.raises(ValueError, match="should be a boolean"):
        jax.grad(jax.checkpoint(named, policy=both(jax.checkpoint_policies)))(X)


def test_a_misspelt_name_is_noticed():
    """JAX's recomputes all without a word."""
    with pytest.warns(ar.UnmatchedNameWarning, match=r"names \['yy'\].*found: \['y', 'z'\]"):
        jax.grad(ar.checkpoint(named, policy=ar.checkpoint_policies.save_only_these_names("yy")))(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names("yy")))(X)


def test_an_argument_without_a_name_is_described_by_its_place(capsys: pytest.CaptureFixture[str]):
    """JAX's prints a literal `{i}`."""

    def f(*args: Any) -> Any:
        return (args[0] * args[1]).sum()

    ar.print_saved_residuals(f, X, X)
    text = capsys.readouterr().out
    assert "{i}" not in text
    assert "argument args[0]" in text or "argument at flattened index 0" in text
