"""Random differentiable programs, for tests that compare a transformed program with the plain one.

A program is nested tuples, so that hypothesis can shrink it and print it: a list of instructions
`(operation, i, j, k, blocks)`. It runs on a state that holds a few values of each kind; `i`, `j` and `k` choose
among them (modulo how many there are), and `blocks` are the programs inside a loop, a branch or a call.

All values stay small, and comparisons are with constants that no value meets, so that two roundings of one
program take the same branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

N = 8  # of every axis: from eight elements on, booleans can be packed
NAMES = ("a", "b", "c")

Instruction = tuple[str, int, int, int, tuple[Any, ...]]
Program = tuple[Instruction, ...]
Wrap = Callable[[Callable[..., Any], int], Callable[..., Any]]


@dataclass
class State:
    """The values so far: vectors, matrices, scalars, integer and boolean vectors."""

    vec: list[Any]
    mat: list[Any]
    scal: list[Any] = field(default_factory=list)
    ints: list[Any] = field(default_factory=list)
    bools: list[Any] = field(default_factory=list)

    def pick(self, kind: str, i: int) -> Any:
        """The `i`-th value of a kind, counted from the newest."""
        values = getattr(self, kind)
        return values[-1 - i % len(values)]

    def fork(self) -> State:
        """A copy that an inner program can add to."""
        return State(list(self.vec), list(self.mat), list(self.scal), list(self.ints), list(self.bools))


def initial_state(vec: Any, mat: Any, ints: Any) -> State:
    """The state before the first instruction."""
    return State(
        vec=[jnp.cos(vec), vec], mat=[mat], scal=[vec[0]], ints=[jnp.arange(N), ints], bools=[vec > 0.31271]
    )


# ------------------------------------------------------------------------------------- functions with own derivatives


@jax.custom_jvp
def _bent(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


@_bent.defjvp
def _bent_jvp(primals: Any, tangents: Any) -> Any:
    # The true derivative: JAX forgets the rule in the second reverse pass over a loop.
    (x, y), (dx, dy) = primals, tangents
    return _bent(x, y), jnp.cos(x) * y * dx + jax.jit(jnp.sin)(x) * dy


@jax.custom_vjp
def _clipped(x: Any, ints: Any) -> Any:
    return jnp.tanh(x) + 0.1 * ints


def _clipped_fwd(x: Any, ints: Any) -> Any:
    y = checkpoint_name(jnp.tanh(x), "a")
    return y + 0.1 * ints, (y, x > 0.4179, ints)


def _clipped_bwd(residuals: Any, ct: Any) -> Any:
    y, mask, ints = residuals
    return jnp.where(mask, ct * (1 - y * y), 0.5 * ct) * (1 + 0.01 * ints), None


_clipped.defvjp(_clipped_fwd, _clipped_bwd)


# -------------------------------------------------------------------------------------------------------- instructions


def _unary(s: State, i: int, j: int, k: int) -> None:
    fun = (
        jnp.sin,
        jnp.tanh,
        lambda x: jnp.exp(-x * x),
        lambda x: x**3 / 4,
        jnp.cumsum,
        jnp.flip,
        jax.nn.relu,
    )[j % 7]
    s.vec.append(jnp.tanh(fun(s.pick("vec", i))))


def _stopped(s: State, i: int, j: int, k: int) -> None:
    s.vec.append(lax.stop_gradient(s.pick("vec", i)) + 0.5 * s.pick("vec", j))


def _binary(s: State, i: int, j: int, k: int) -> None:
    fun = (lambda x, y: x * y, lambda x, y: 0.5 * (x - y), lambda x, y: x / (2 + y * y))[k % 3]
    s.vec.append(fun(s.pick("vec", i), s.pick("vec", j)))


def _named(s: State, i: int, j: int, k: int) -> None:
    kind = ("vec", "mat")[j % 2]
    getattr(s, kind).append(checkpoint_name(s.pick(kind, i), NAMES[k % len(NAMES)]))


def _dot(s: State, i: int, j: int, k: int) -> None:
    m = s.pick("mat", i)
    if k % 3 == 0:
        s.mat.append(jnp.sin(m @ s.pick("mat", j) / 4))
    elif k % 3 == 1:
        s.vec.append(jnp.sin(s.pick("vec", j) @ m / 3))
    else:
        s.mat.append(jnp.outer(s.pick("vec", i), s.pick("vec", j)))


def _batched_dot(s: State, i: int, j: int, k: int) -> None:
    s.vec.append(jnp.einsum("ij,ij->i", s.pick("mat", i), s.pick("mat", j)) / 4)


def _reduce(s: State, i: int, j: int, k: int) -> None:
    if k % 3 == 0:
        s.scal.append(jnp.tanh(jnp.mean(s.pick("vec", i))))
    elif k % 3 == 1:
        s.vec.append(jnp.mean(s.pick("mat", i), axis=j % 2))
    else:
        s.vec.append(jax.nn.softmax(s.pick("vec", i) + s.pick("scal", j)))


def _gather(s: State, i: int, j: int, k: int) -> None:
    if k % 2:
        s.vec.append(s.pick("vec", i)[s.pick("ints", j) % N])
    else:
        s.vec.append(s.pick("mat", i)[s.pick("ints", j)[0] % N])


def _slice(s: State, i: int, j: int, k: int) -> None:
    start = s.pick("ints", j)[0] % (N - 2)
    if k % 2:
        part = lax.dynamic_slice(s.pick("vec", i), (start,), (3,))
        s.vec.append(jnp.pad(part, (2, N - 5)) + 0.1)
    else:
        s.vec.append(lax.dynamic_update_slice(s.pick("vec", i), s.pick("vec", j)[:3] * 0.5, (start,)))


def _scatter(s: State, i: int, j: int, k: int) -> None:
    s.vec.append(jnp.tanh(s.pick("vec", i).at[s.pick("ints", j) % N].add(s.pick("vec", k))))


def _integers(s: State, i: int, j: int, k: int) -> None:
    x = s.pick("ints", i)
    s.ints.append((x * 3 + s.pick("ints", j), x + s.pick("bools", j), x[::-1], jnp.cumsum(x))[k % 4] % N)


def _booleans(s: State, i: int, j: int, k: int) -> None:
    new = (
        lambda: s.pick("vec", i) > (0.1234567 * (j % 5) - 0.3),
        lambda: s.pick("bools", i) ^ s.pick("bools", j),
        lambda: s.pick("ints", i) % 2 == 0,
        lambda: ~s.pick("bools", i) | (s.pick("ints", j) > 3),
    )[k % 4]
    s.bools.append(new())


def _select(s: State, i: int, j: int, k: int) -> None:
    s.vec.append(jnp.where(s.pick("bools", i), s.pick("vec", j), 0.5 * s.pick("vec", k)))


def _scaled(s: State, i: int, j: int, k: int) -> None:
    s.vec.append(s.pick("vec", i) * s.pick("ints", j) / N + s.pick("scal", k) * s.pick("bools", k))


def _custom(s: State, i: int, j: int, k: int) -> None:
    if k % 2:
        s.vec.append(_bent(s.pick("vec", i), s.pick("vec", j)))
    else:
        s.vec.append(_clipped(s.pick("vec", i), s.pick("ints", j)) / 2)


def _while(s: State, i: int, j: int, k: int) -> None:
    """A loop that reverse mode cannot enter, on values without a gradient."""
    x = lax.stop_gradient(s.pick("vec", i))
    _, y = lax.while_loop(lambda c: c[0] < 2 + j % 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))
    s.vec.append(y * s.pick("vec", k))


_SIMPLE = {
    "unary": _unary,
    "stopped": _stopped,
    "binary": _binary,
    "named": _named,
    "dot": _dot,
    "batched_dot": _batched_dot,
    "reduce": _reduce,
    "gather": _gather,
    "slice": _slice,
    "scatter": _scatter,
    "integers": _integers,
    "booleans": _booleans,
    "select": _select,
    "scaled": _scaled,
    "custom": _custom,
    "while": _while,
}


def _inner(s: State, block: Program, wrap: Wrap) -> Callable[[Any, Any], Any]:
    """A block as a function of the newest vector and matrix; the other values are closed over."""

    def fun(vec: Any, mat: Any) -> Any:
        inner = s.fork()
        inner.vec.append(vec)
        inner.mat.append(mat)
        run(block, inner, wrap)
        return inner.pick("vec", 0), inner.pick("mat", 0)

    return fun


def _scan(s: State, i: int, j: int, k: int, fun: Callable[..., Any]) -> None:
    def body(carry: Any, xs: Any) -> Any:
        vec, count = carry
        row, flag = xs
        vec, mat = fun(vec + 0.1 * row + 0.01 * count, jnp.outer(row, vec))
        return (jnp.tanh(vec), count + flag), (vec * row, mat[0] > 0.3137)

    (vec, count), (rows, flags) = lax.scan(
        body,
        (s.pick("vec", i), 0),
        (s.pick("mat", j), s.pick("ints", k)),
        unroll=1 + k % 2,
        reverse=bool(k % 2),
    )
    s.vec.append(vec + 0.01 * count)
    s.mat.append(rows)
    s.bools.append(flags[0])


def _fori(s: State, i: int, j: int, k: int, fun: Callable[..., Any]) -> None:
    mat = s.pick("mat", j)
    s.vec.append(
        lax.fori_loop(0, 2 + k % 2, lambda n, v: jnp.tanh(fun(v + 0.1 * n, mat)[0]), s.pick("vec", i))
    )


def _cond(s: State, i: int, j: int, k: int, one: Callable[..., Any], other: Callable[..., Any]) -> None:
    vec, mat = s.pick("vec", i), s.pick("mat", j)
    if k % 2:
        vec, mat = lax.cond(s.pick("bools", k)[0], one, other, vec, mat)
    else:
        vec, mat = lax.switch(s.pick("ints", k)[0] % 3, [one, other, lambda v, m: (v, 0 * m)], vec, mat)
    s.vec.append(vec)
    s.mat.append(mat)


def _call(s: State, i: int, j: int, fun: Callable[..., Any]) -> None:
    vec, mat = fun(s.pick("vec", i), s.pick("mat", j))
    s.vec.append(vec)
    s.mat.append(mat)


def run(program: Program, s: State, wrap: Wrap) -> None:
    """Run the instructions on the state. `wrap(fun, i)` makes a nested checkpoint."""
    for operation, i, j, k, blocks in program:
        if simple := _SIMPLE.get(operation):
            simple(s, i, j, k)
            continue
        funs = [_inner(s, block, wrap) for block in blocks]
        if operation == "scan":
            _scan(s, i, j, k, funs[0])
        elif operation == "remat_scan":
            _scan(s, i, j, k, wrap(funs[0], k))
        elif operation == "fori":
            _fori(s, i, j, k, funs[0])
        elif operation == "cond":
            _cond(s, i, j, k, funs[0], funs[1])
        elif operation == "jit":
            _call(s, i, j, jax.jit(funs[0]))
        elif operation == "remat":
            _call(s, i, j, wrap(funs[0], k))
        else:
            raise AssertionError(operation)


def as_function(program: Program, wrap: Wrap) -> Callable[[Any, Any, Any], Any]:
    """The program as a function of a vector, a matrix and integers: a scalar and some values beside it."""

    def fun(vec: Any, mat: Any, ints: Any) -> Any:
        s = initial_state(vec, mat, ints)
        run(program, s, wrap)
        value = sum(jnp.sum(jnp.sin(v)) for v in s.vec[-2:]) + jnp.sum(jnp.tanh(s.mat[-1])) + s.scal[-1]
        return value, (s.vec[-1], s.bools[-1], s.ints[-1])

    return fun


def arguments(seed: int, batch: int | None = None) -> tuple[Any, Any, Any]:
    """A vector, a matrix and integers for `as_function`."""
    rng = np.random.default_rng(seed)
    shape = () if batch is None else (batch,)
    return (
        jnp.asarray(rng.uniform(-1, 1, (*shape, N))),
        jnp.asarray(rng.uniform(-1, 1, (*shape, N, N))),
        jnp.asarray(rng.integers(0, N, (*shape, N))),
    )


# ---------------------------------------------------------------------------------------------------------- strategies

_small = st.integers(0, 5)
_simple_instructions = st.tuples(st.sampled_from(list(_SIMPLE)), _small, _small, _small, st.just(()))


def _nested(instructions: st.SearchStrategy[Instruction]) -> st.SearchStrategy[Instruction]:
    block = st.lists(instructions, min_size=1, max_size=3).map(tuple)
    one = st.tuples(
        st.sampled_from(["scan", "remat_scan", "fori", "jit", "remat"]),
        _small,
        _small,
        _small,
        st.tuples(block),
    )
    two = st.tuples(st.just("cond"), _small, _small, _small, st.tuples(block, block))
    return st.one_of(one, two)


_level_1 = st.one_of(_simple_instructions, _nested(_simple_instructions))
_level_2 = st.one_of(_simple_instructions, _simple_instructions, _nested(_level_1))

programs: st.SearchStrategy[Program] = st.lists(_level_2, min_size=1, max_size=6).map(tuple)
"""Programs of up to six instructions, with two levels of programs inside."""


def without_reverse_rules(program: Program) -> Program:
    """The program without functions that have a reverse-mode rule only: JAX refuses to push tangents through them."""
    return tuple(i for i in program if "'custom'" not in repr(i))
