"""Random programs under random stacks of transformations: ours against `jax.checkpoint`, and against no checkpoint.

`HYPOTHESIS_PROFILE=exhaustive python -m pytest -n auto tests/transform/test_stacks.py` runs 5,000 cases. What failed is printed with the
stack, the program and the seed of its arguments.
"""

# pyright: reportOptionalMemberAccess=false
# (hypothesis types `settings()` as optional)
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

import autoremat as ar
from autoremat._errors import UnmatchedNameWarning
from support.compare import assert_same
from support.interpreter import compiled, interpreted
from support.programs import NAMES, N, Program, arguments, as_function, programs, without_reverse_rules

BEFORE_0_11 = jax.__version_info__ < (0, 11)

Pair = tuple[Any, Any]
Function = Callable[[Any, Any], Pair]  # (vector, matrix) -> (vector, matrix), so that transformations stack
Checkpoint = Callable[..., Any]


@dataclass(frozen=True)
class Policy:
    """A policy by name, to be looked up among ours and among JAX's."""

    name: str | None
    names: tuple[str, ...] = ()

    def of(self, policies: Any) -> Any:
        if self.name is None:
            return None
        found = getattr(policies, self.name)
        return found(*self.names) if self.names else found


@dataclass(frozen=True)
class Way:
    """Whose checkpoint to use; `policies` `None`: none at all."""

    checkpoint: Checkpoint
    policies: Any

    def wrap(self, f: Callable[..., Any], policy: Policy, prevent_cse: bool = True) -> Callable[..., Any]:
        if self.policies is None:
            return f
        return self.checkpoint(f, policy=policy.of(self.policies), prevent_cse=prevent_cse)


OURS = Way(ar.checkpoint, ar.checkpoint_policies)
THEIRS = Way(jax.checkpoint, jax.checkpoint_policies)
PLAIN = Way(lambda f, **_: f, None)


def _jit(f: Function) -> Function:
    return jax.jit(f)


def _vmap(f: Function) -> Function:
    def batched(vec: Any, mat: Any) -> Pair:
        vecs, mats = jnp.stack([vec, jnp.flip(vec)], 1), jnp.stack([mat, mat.T])
        several = jax.vmap(f, (1, 0))(vecs, mats)
        shared = jax.vmap(f, (1, None), (0, 2))(vecs, mat)
        return several[0].mean(0) + shared[0].mean(0), several[1].mean(0) - shared[1].mean(2)

    return batched


def _loss(f: Function) -> Callable[[Any, Any], Any]:
    def loss(vec: Any, mat: Any) -> Any:
        v, m = f(vec, mat)
        return jnp.sin(v).sum() + (m * jnp.cos(mat)).sum()

    return loss


def _grad(f: Function) -> Function:
    return lambda vec, mat: jax.tree.map(jnp.tanh, jax.grad(_loss(f), (0, 1))(vec, mat))


def _jvp(f: Function) -> Function:
    def pushed(vec: Any, mat: Any) -> Pair:
        _, tangents = jax.jvp(f, (vec, mat), (jnp.cos(vec), jnp.sin(mat)))
        return jnp.tanh(tangents[0]), jnp.tanh(tangents[1])

    return pushed


def _scan(f: Function) -> Function:
    def looped(vec: Any, mat: Any) -> Pair:
        def body(carry: Any, row: Any) -> Any:
            v, m = f(carry, jnp.outer(row, carry))
            return jnp.tanh(v), m[0]

        last, rows = lax.scan(body, vec, mat[:3], reverse=True)
        return last, jnp.concatenate([rows, mat[3:]])

    return looped


def _shard_map(f: Function) -> Function:
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))

    def local(vec: Any, mat: Any) -> Pair:
        v, m = f(vec[0], mat[0])
        return lax.pmean(v, "i"), m[None]

    def sharded(vec: Any, mat: Any) -> Pair:
        specs: Any = dict(in_specs=(Spec("i"), Spec("i")), out_specs=(Spec(), Spec("i")))
        run = jax.shard_map(local, mesh=mesh, **specs)
        v, m = run(jnp.stack([vec, -vec]), jnp.stack([mat, mat.T]))
        return v, m[0] - m[1]

    return sharded


LAYERS: dict[str, Callable[[Function], Function]] = {
    "jit": _jit,
    "vmap": _vmap,
    "grad": _grad,
    "jvp": _jvp,
    "scan": _scan,
    "shard_map": _shard_map,
}


def base(program: Program, inner: Policy, way: Way) -> Function:
    """The program, with the checkpoints inside it, from a vector and a matrix to the same."""
    fun = as_function(program, lambda f, i: way.wrap(f, inner, bool(i % 2)))
    ints = jnp.arange(N)[::-1]

    def f(vec: Any, mat: Any) -> Pair:
        value, (v, _, _) = fun(vec, mat, ints)
        return jnp.tanh(v + 0.1 * value), jnp.tanh(jnp.outer(v, vec) + 0.1 * value)

    return f


def stacked(
    program: Program, stack: Sequence[str], inner: Policy, outer: Policy, way: Way
) -> Callable[[Any, Any], Any]:
    """Value and gradient of the program under a stack of transformations, the first the innermost."""
    f = way.wrap(base(program, inner, way), outer)
    for layer in stack:
        f = way.wrap(f, outer) if layer == "checkpoint" else LAYERS[layer](f)
    return jax.value_and_grad(_loss(f), (0, 1))


_policies = st.one_of(
    st.sampled_from(
        [
            Policy(None),
            Policy("nothing_saveable"),
            Policy("everything_saveable"),
            Policy("dots_saveable"),
            Policy("dots_with_no_batch_dims_saveable"),
        ]
    ),
    st.sampled_from(NAMES).map(lambda n: Policy("save_only_these_names", (n,))),
)
TRANSFORMATIONS = ("checkpoint", *LAYERS)
_more = st.lists(st.sampled_from(TRANSFORMATIONS), max_size=2)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmatchedNameWarning)
        yield


@pytest.mark.parametrize("first", TRANSFORMATIONS)
@settings(max_examples=-(-settings().max_examples * 4 // len(TRANSFORMATIONS)))
@given(program=programs, more=_more, inner=_policies, outer=_policies, seed=st.integers(0, 2**16))
def test_stacks(
    first: str, program: Program, more: list[str], inner: Policy, outer: Policy, seed: int
) -> None:
    stack = (first, *more)
    assume(stack.count("shard_map") <= 1)  # one mesh
    if "jvp" in stack or stack.count("grad"):
        program = without_reverse_rules(program)  # reverse mode twice needs forward mode inside
    run = compiled if "shard_map" in stack else interpreted
    args = arguments(seed)[:2]
    try:
        plain = run(stacked(program, stack, inner, outer, PLAIN))(*args)
    except (TypeError, ValueError) as error:
        # JAX marks some operands of branches as varying twice (0.10.2), others not at all; and a loop must carry what varies as such.
        unvarying = ("pvary", "varying manual axes", "manual axis types do not match")
        assume(not any(text in str(error) for text in unvarying))
        raise
    try:
        ours = run(stacked(program, stack, inner, outer, OURS))(*args)
    except ValueError as error:
        # Up to JAX 0.10, what JAX makes varying in a branch cannot be made varying again: its own checkpoint refuses it, too.
        assume(not (BEFORE_0_11 and "varying" in str(error) and refuses(program, stack, inner, outer, args)))
        raise
    assert_same(ours, plain, rtol=1e-8)
    try:
        theirs = run(stacked(program, stack, inner, outer, THEIRS))(*args)
    except ValueError as error:
        # JAX's own does not know that a loop in a branch has no tangent, in the second reverse pass; and makes operands of branches
        # varying that vary already. Then no checkpoint at all is the oracle.
        refused = ("Reverse-mode differentiation does not work for lax.while_loop", "pvary")
        if not any(text in str(error) for text in refused):
            raise
        return
    assert_same(ours, theirs, rtol=1e-8)


def refuses(
    program: Program, stack: Sequence[str], inner: Policy, outer: Policy, args: Sequence[Any]
) -> bool:
    """Whether `jax.checkpoint` mixes varying and unvarying values in this stack."""
    try:
        jax.make_jaxpr(stacked(program, stack, inner, outer, THEIRS))(*args)
    except ValueError as error:
        return "varying" in str(error)
    return False


def test_shard_map_that_checks_varying_axes() -> None:
    """A `cond` in a branch, its predicate batched by a `vmap`: JAX makes operands of the outer one varying after tracing."""
    inner = ("cond", 2, 0, 5, ((("scatter", 0, 4, 3, ()),), ()))
    program = (("cond", 0, 3, 0, ((), (inner,))),)
    vmapped = _vmap(OURS.wrap(base(program, Policy(None), OURS), Policy(None)))
    jax.make_jaxpr(jax.grad(_loss(_shard_map(vmapped)), (0, 1)))(*arguments(132)[:2])


def test_shard_map_whose_predicate_is_batched_later() -> None:
    """A branch with a call on what does not vary, under a predicate that does, batched after it was split."""
    first = (
        (("select", 0, 0, 0, ()), ("unary", 0, 0, 0, ()), ("unary", 0, 0, 0, ())),
        (("gather", 0, 0, 4, ()),),
    )
    second = (
        (("integers", 2, 0, 5, ()), ("named", 4, 2, 4, ()), ("stopped", 4, 2, 1, ())),
        (("booleans", 0, 2, 5, ()),),
    )
    body = (("cond", 0, 0, 3, first), ("cond", 3, 4, 0, second))
    program = (("unary", 0, 0, 0, ()), ("scan", 0, 0, 0, (body,)))
    policies = Policy("save_only_these_names", ("c",)), Policy("save_only_these_names", ("a",))
    stack = ("shard_map", "grad", "vmap")
    run = stacked(without_reverse_rules(program), stack, *policies, OURS)
    jax.make_jaxpr(run)(*arguments(267)[:2])


@pytest.mark.skipif(BEFORE_0_11, reason="JAX 0.10 makes operands of branches varying twice")
def test_a_branch_in_a_branch_under_predicates_that_vary() -> None:
    """The reverse pass of it, batched: what `jax.checkpoint` refuses."""
    inner = ("cond", 2, 1, 0, ((), ()))
    program = (("cond", 0, 0, 1, ((), (inner,))),)
    stack, policy = ("grad", "shard_map", "vmap"), Policy(None)
    ours, plain = (
        compiled(stacked(program, stack, policy, policy, way))(*arguments(7091)[:2]) for way in (OURS, PLAIN)
    )
    assert_same(ours, plain, rtol=1e-8)


def test_what_fusion_gets_wrong() -> None:
    """A program that differs under `jit` without any checkpoint: compiled without fusion, it is as run by operation."""
    scans = (
        ("scan", 0, 0, 0, ((("select", 0, 0, 0, ()), ("unary", 0, 0, 0, ())),)),
        ("scan", 3, 0, 0, ((("unary", 3, 0, 0, ()), ("scatter", 0, 0, 2, ())),)),
    )
    branches = ((("unary", 0, 0, 0, ()), scans[0], ("while", 0, 0, 0, ())), (scans[1],))
    program = (("slice", 0, 0, 0, ()), ("cond", 0, 0, 0, branches), ("unary", 0, 0, 0, ()))
    f = base(program, Policy(None), PLAIN)
    args = arguments(0)[:2]
    assert_same(compiled(f)(*args), interpreted(f)(*args), rtol=1e-8)


def test_a_loop_without_tangents_in_a_branch_of_a_scan() -> None:
    """The second reverse pass over it, which `jax.checkpoint` refuses."""
    branches = ((("while", 0, 0, 0, ()), ("unary", 0, 0, 0, ())), (("unary", 0, 0, 0, ()),))
    body = (("unary", 0, 0, 0, ()), ("cond", 0, 0, 0, branches))
    everything = Policy("everything_saveable")
    ours, plain = (
        interpreted(stacked((("scan", 0, 0, 0, (body,)),), ("grad",), everything, everything, way))(
            *arguments(2)[:2]
        )
        for way in (OURS, PLAIN)
    )
    assert_same(ours, plain, rtol=1e-8)
