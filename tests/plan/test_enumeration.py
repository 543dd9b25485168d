"""Every keep-set and storage of small joint graphs, emitted and executed with counters.

For each random program all plans are listed by the definition, without the package's help: which values the backward pass
reads are kept, and how. Each is emitted as the two programs that run, and both are run one equation at a time. What
is measured there (bytes of the arrays that wait, how often each equation of the joint graph ran, derivatives) must be what
the judge says of the plan, and the frontier must be the hull of all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autoremat as ar
from autoremat._compat import Literal, Primitive, ad, mlir, new_jaxpr, open_jaxpr
from autoremat.cost import device
from autoremat.graph import fingerprint
from autoremat.solve import Assignment, Problem, close, evaluate, frontier, pareto
from autoremat.transform._jaxpr import is_var
from autoremat.transform._linearize import Joint, linearize
from autoremat.transform._partition import Partition, emit
from autoremat.transform._planned import JointProblem, PlannedPolicy, joint_graph, planned_policy, pose
from autoremat.transform._split import split_eqns
from support.graphs import hull

N = 8  # from eight elements on, booleans can be packed
MAX_OPS = 12
MAX_PLANS = 400  # of one program: longer ones lose their last instructions

Instruction = tuple[str, int, int, int]
Program = tuple[Instruction, ...]


# ----------------------------------------------------------------------------------------------------------- primitives

# One equation with two results, both of which its derivative reads.
sincos_p = Primitive("test_sincos")
sincos_p.multiple_results = True
sincos_p.def_impl(lambda x: [jnp.sin(x), jnp.cos(x)])
sincos_p.def_abstract_eval(lambda x: [x, x])
mlir.register_lowering(sincos_p, mlir.lower_fun(lambda x: [jnp.sin(x), jnp.cos(x)], multiple_results=True))


def _sincos_jvp(primals: Any, tangents: Any) -> Any:
    sin, cos = sincos_p.bind(*primals)
    t = ad.instantiate_zeros(tangents[0])
    return [sin, cos], [cos * t, -sin * t]


ad.primitive_jvps[sincos_p] = _sincos_jvp


@pytest.fixture(autouse=True, scope="module")
def _cost_of_sincos() -> None:
    @ar.register_cost("test_sincos", fusible=True)
    def cost(op: Any, inputs: Any, outputs: Any) -> ar.Cost:
        return ar.Cost(vector_flops=2 * sum(v.size for v in inputs))


# ------------------------------------------------------------------------------------------------------------- programs


@dataclass
class _State:
    floats: list[Any]
    bools: list[Any]
    ints: list[Any]
    key: Any

    def pick(self, kind: str, i: int) -> Any:
        values = getattr(self, kind)
        return values[-1 - i % len(values)]


def _unary(s: _State, i: int, j: int, k: int) -> None:
    funs = (
        lax.sin,
        lax.cos,
        lax.tanh,
        lax.logistic,
        lambda x: lax.integer_pow(x, 2),
        lambda x: lax.exp(lax.neg(x)),
    )
    s.floats.append(funs[k](s.pick("floats", i)))


def _binary(s: _State, i: int, j: int, k: int) -> None:
    fun = (lax.mul, lax.sub, lax.atan2, lax.max, lax.mul, lax.add)[k]
    s.floats.append(fun(s.pick("floats", i), s.pick("floats", j)))


def _compare(s: _State, i: int, j: int, k: int) -> None:
    s.bools.append(lax.gt(s.pick("floats", i), jnp.full(N, 0.1234567 * k)))


def _logic(s: _State, i: int, j: int, k: int) -> None:
    s.bools.append((lax.bitwise_xor, lax.bitwise_or)[k % 2](s.pick("bools", i), s.pick("bools", j)))


def _where(s: _State, i: int, j: int, k: int) -> None:
    s.floats.append(lax.select(s.pick("bools", k), s.pick("floats", i), s.pick("floats", j)))


def _sincos(s: _State, i: int, j: int, k: int) -> None:
    sin, cos = sincos_p.bind(s.pick("floats", i))
    s.floats += (sin, cos)[: 1 + k % 2]


def _sort(s: _State, i: int, j: int, k: int) -> None:
    s.floats += lax.sort((s.pick("floats", i), s.pick("floats", j)), num_keys=1)


def _top_k(s: _State, i: int, j: int, k: int) -> None:
    values, places = lax.top_k(s.pick("floats", i), N)
    s.floats.append(values)
    s.ints.append(places)


def _split(s: _State, i: int, j: int, k: int) -> None:
    a, b = lax.split(s.pick("floats", i), (N // 2, N // 2))
    s.floats.append(lax.concatenate([b * a, a], 0))


def _scale(s: _State, i: int, j: int, k: int) -> None:
    s.floats.append(s.pick("floats", i) * s.pick("ints", j))


def _random(s: _State, i: int, j: int, k: int) -> None:
    bits = jax.random.bits(jax.random.wrap_key_data(s.key, impl="rbg"), (N,))
    s.ints.append(lax.convert_element_type(lax.shift_right_logical(bits, jnp.uint32(29)), jnp.int32))


def _narrow(s: _State, i: int, j: int, k: int) -> None:
    x = lax.convert_element_type(s.pick("floats", i), jnp.bfloat16)
    s.floats.append(lax.convert_element_type(lax.sin(x), jnp.float32))


def _reduce(s: _State, i: int, j: int, k: int) -> None:
    x = s.pick("floats", i)
    s.floats.append(x * jnp.sum(x, keepdims=True)[0])


def _named(s: _State, i: int, j: int, k: int) -> None:
    s.floats.append(checkpoint_name(s.pick("floats", i), "tag"))


_INSTRUCTIONS: dict[str, Callable[[_State, int, int, int], None]] = {
    "unary": _unary,
    "binary": _binary,
    "compare": _compare,
    "logic": _logic,
    "where": _where,
    "sincos": _sincos,
    "sort": _sort,
    "top_k": _top_k,
    "split": _split,
    "scale": _scale,
    "random": _random,
    "narrow": _narrow,
    "reduce": _reduce,
    "named": _named,
}


def as_function(program: Program, more: bool) -> Callable[..., Any]:
    """The program as a function of two vectors, a mask, and the data of a key; `more` returns integers and booleans too."""

    def fun(x: Any, y: Any, mask: Any, key: Any) -> Any:
        s = _State([y, x], [mask], [jnp.arange(N)], key)
        for name, i, j, k in program:
            _INSTRUCTIONS[name](s, i, j, k)
        return (s.floats[-1], s.bools[-1], s.ints[-1]) if more else s.floats[-1]

    return fun


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.uniform(-1, 1, N), jnp.float32) for _ in range(2))
    return x, y, x > y, jnp.arange(4, dtype=jnp.uint32)


def joint_of(fun: Callable[..., Any]) -> Joint:
    """The joint program of `fun` in its first two arguments."""
    opened, consts = open_jaxpr(jax.make_jaxpr(fun)(*arguments()))
    assert not consts
    joint = linearize(opened, (True, True, False, False))
    # Parameters of its own for each equation: by them it is recognized (see `Counted`).
    return replace(joint, forward_eqns=tuple(e.replace(params=dict(e.params)) for e in joint.forward_eqns))


# ---------------------------------------------------------------------------------------------- all plans of a problem


def every_keep_set(problem: Problem, limit: int) -> Iterator[dict[int, int]]:
    """All keep-sets in which the backward pass reads each kept value, whether or not they can run; stops after `limit`."""
    graph = problem.graph
    there = {v.id for v in graph.values if v.producer is None and v.free}

    def choices(v: int) -> range:
        return range(len(problem.storages[v]))

    def walk(j: int, wanted: frozenset[int], keep: dict[int, int]) -> Iterator[dict[int, int]]:
        if j < 0:
            open_inputs = [v for v in graph.inputs if v in wanted and v not in there]
            for chosen in itertools.product(*(choices(v) for v in open_inputs)):
                yield keep | dict(zip(open_inputs, chosen, strict=True))
            return
        op = graph.ops[j]
        reads = [v for v in op.outputs if v in wanted]
        for chosen in itertools.product(*([None, *choices(v)] for v in reads)):
            kept = {v: c for v, c in zip(reads, chosen, strict=True) if c is not None}
            again = len(kept) < len(reads)
            yield from walk(j - 1, wanted | set(op.inputs) if again else wanted, keep | kept)

    return itertools.islice(walk(len(graph.ops) - 1, frozenset(graph.demanded), {}), limit)


def schedule(problem: Problem, keep: dict[int, int]) -> tuple[set[int], set[int]] | None:
    """What runs forward and what runs again for a keep-set; `None` if something may not run twice."""
    graph = problem.graph
    again: set[int] = set()
    missing = {v for v in graph.demanded if v not in keep}
    for op in reversed(graph.ops):
        if missing.intersection(op.outputs):
            again.add(op.id)
            missing |= {v for v in op.inputs if v not in keep}
    forward: set[int] = set()
    needed = {*graph.outputs, *keep}
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            forward.add(op.id)
            needed |= set(op.inputs)
    twice = forward & again
    return None if any(not graph.ops[j].repeatable for j in twice) else (forward, again)


# -------------------------------------------------------------------------------------------------------------- execution


@dataclass
class Counted:
    """Runs programs made of the equations of a joint program, and counts how often each of those runs.

    Splitting replaces the variables of an equation, never its parameters: by their identity it is recognized.
    """

    joint: Joint

    def __post_init__(self) -> None:
        self.number = {id(e.params): j for j, e in enumerate(self.joint.forward_eqns)}
        assert len(self.number) == len(self.joint.forward_eqns)

    def run(self, jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], Counter[int]]:
        """The results, and the executions of each equation of the joint program's forward part."""
        env = dict(zip(jaxpr.invars, args, strict=True))
        count: Counter[int] = Counter()

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            if (j := self.number.get(id(eqn.params))) is not None:
                count[j] += 1
            outs = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
            env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        return [read(v) for v in jaxpr.outvars], count

    def structure(self, eqns: Sequence[Any]) -> Counter[int]:
        """How often each equation of the joint program stands among `eqns`."""
        return Counter(self.number[id(e.params)] for e in eqns if id(e.params) in self.number)


def measured_bytes(x: Any) -> int:
    """Bytes of an array; of a key, those of its data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return x.nbytes


@dataclass
class Case:
    """A posed joint program (of the first `length` instructions) with arguments, and what it computes without a split."""

    joint: Joint
    posed: JointProblem
    free: tuple[bool, ...]
    args: tuple[Any, ...]
    length: int = 0

    def __post_init__(self) -> None:
        self.counted = Counted(self.joint)
        self.inputs = [*self.args, *self.joint.constants]
        self.tangents = [jnp.cos(3 * a + 1) for a in self.args[: len(self.joint.tangents)]]
        whole = new_jaxpr(
            (*self.joint.inputs, *self.joint.tangents),
            (*self.joint.outs, *self.joint.tangent_outs),
            (*self.joint.forward_eqns, *self.joint.linear_eqns),
            self.joint.like,
        )
        results, _ = self.counted.run(whole, [*self.inputs, *self.tangents])
        n = len(self.joint.outs)
        self.outs, self.tangents_out = results[:n], results[n:]

    def check_plan(self, keep: dict[int, int], says: Assignment) -> None:
        """Emit a plan, run it, and compare with what the judge says."""
        joint, problem = self.joint, self.posed.problem
        part = emit(joint, split_eqns(joint.forward_eqns, joint.demanded, self.posed.decider(keep)))
        results, forward = self.counted.run(part.forward, self.inputs)
        kept = [results[i] for i in part.kept_results]
        leaves = [*(self.inputs[i] for i in part.leaves), *kept]
        tangents_out, again = self.counted.run(part.linear, [*leaves, *self.tangents])

        assert forward == self.counted.structure(part.forward.eqns) == Counter(dict.fromkeys(says.forward, 1))
        assert again == self.counted.structure(part.reruns) == Counter(dict.fromkeys(says.rerun, 1))
        extra = sum(problem.op_cost[j] * (n - 1) for j, n in (forward + again).items())
        assert says.cost == extra + sum(problem.storages[v][s].cost for v, s in keep.items())
        assert says.nbytes == self.waiting(part, kept) - self.paid_elsewhere(keep)
        want = (*self.outs, *self.tangents_out)
        for a, b in zip([*results[: len(self.outs)], *tangents_out], want, strict=True):
            _assert_identical(a, b)

    def waiting(self, part: Partition, kept: Sequence[Any]) -> int:
        """Bytes that wait for the backward pass and would not be there anyway."""
        open_inputs = [self.inputs[i] for i in part.leaves if i < len(self.free) and not self.free[i]]
        return sum(map(measured_bytes, (*open_inputs, *kept)))

    def paid_elsewhere(self, keep: dict[int, int]) -> int:
        """Bytes of kept values that the problem charges to somebody else."""
        values, storages = self.posed.graph.values, self.posed.problem.storages
        return sum(
            values[v].nbytes
            for v, s in keep.items()
            if storages[v][s].name == "device" and values[v].nbytes and not storages[v][s].nbytes
        )


def _assert_identical(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def build_case(
    program: Program, more: bool, free: tuple[bool, ...], shared: bool
) -> tuple[Case, list[dict[int, int]]]:
    """The longest start of a program that is small enough, and its keep-sets."""
    while True:
        joint = joint_of(as_function(program, more))
        if len(joint.forward_eqns) <= MAX_OPS:
            posed = pose(joint, device("cpu"), free, range(len(joint.outs)) if shared else ())
            keeps = list(every_keep_set(posed.problem, MAX_PLANS + 1))
            if len(keeps) <= MAX_PLANS:
                return Case(joint, posed, free, arguments(), len(program)), keeps
        program = program[:-1]


def check_program(program: Program, more: bool, free: tuple[bool, ...], shared: bool) -> int:
    """All of the above for one program; returns how many plans it has."""
    case, keeps = build_case(program, more, free, shared)
    problem = case.posed.problem
    plans: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
    for keep in keeps:
        runs = schedule(problem, keep)
        if runs is None:
            with pytest.raises(ValueError, match="not closed"):
                evaluate(problem, keep)
            continue
        says = evaluate(problem, keep)
        assert (says.forward, says.rerun) == runs
        case.check_plan(keep, says)
        plans[tuple(sorted(keep.items()))] = says.nbytes, says.cost
    check_frontier(problem, plans)
    return len(plans)


def check_frontier(problem: Problem, plans: dict[tuple[tuple[int, int], ...], tuple[int, int]]) -> None:
    """The frontier is the hull of all plans, its bound holds, and what lies between its points is among the plans."""
    found = frontier(problem)
    pairs = set(plans.values())
    assert found.exact
    assert [(p.nbytes, p.cost) for p in found.points] == hull(pairs)
    for nbytes, cost in pairs:
        assert found.lower_bound(nbytes) <= cost
    for p in (*found.points, *found.between, *pareto(problem, found=found)):
        # A value that costs nothing may be kept unread: closing drops it, and changes nothing else.
        closed = tuple(sorted(close(problem, p.keep).items()))
        assert plans[closed] == (p.nbytes, p.cost)


# ------------------------------------------------------------------------------------------------------------------ tests

_recent = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5])
programs: st.SearchStrategy[Program] = st.lists(
    st.tuples(st.sampled_from(sorted(_INSTRUCTIONS)), _recent, _recent, st.integers(0, 5)),
    min_size=3,
    max_size=10,
).map(tuple)
_frees = st.tuples(*(st.sampled_from([True, True, False]) for _ in range(4)))

_RICH: Program = (
    ("sincos", 0, 0, 1),
    ("binary", 0, 1, 0),
    ("compare", 0, 0, 1),
    ("random", 0, 0, 0),
    ("scale", 0, 0, 0),
    ("where", 0, 1, 0),
)


@example(program=_RICH, more=True, free=(False, True, False, True), shared=False)
@given(program=programs, more=st.booleans(), free=_frees, shared=st.booleans())
def test_every_plan_is_what_the_judge_says(program: Program, more: bool, free: Any, shared: bool) -> None:
    check_program(program, more, free, shared)


@given(program=programs)
def test_the_joint_program_is_the_derivative(program: Program) -> None:
    """The programs above compare plans with the unsplit joint program; here that is compared with JAX."""
    fun = as_function(program, False)
    x, y, *rest = arguments()
    joint = joint_of(fun)
    case = Case(joint, pose(joint, device("cpu"), [True] * len(joint.like.invars)), (True,) * 4, arguments())
    out, tangent = jax.jvp(lambda x, y: fun(x, y, *rest), (x, y), tuple(case.tangents))
    np.testing.assert_allclose(case.outs[0], out, rtol=1e-6, atol=1e-6)
    if case.tangents_out:
        np.testing.assert_allclose(case.tangents_out[0], tangent, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(tangent, 0)


@dataclass(frozen=True)
class Exactly:
    """A plan that must not fall back on its price: the joint program is the one that it was made for."""

    plan: PlannedPolicy

    def decider(self, joint: Joint) -> Any:
        graph, _ = joint_graph(joint, [True] * len(joint.like.invars))
        assert fingerprint(graph) == self.plan.fingerprint
        return self.plan.decider(joint)


@settings(max_examples=10)
@given(program=programs)
def test_plans_on_the_frontier_have_the_gradient_of_the_function(program: Program) -> None:
    case, _ = build_case(program, False, (True,) * 4, False)
    fun = as_function(program[: case.length], False)
    x, y, *rest = arguments()

    def pulled(f: Callable[..., Any]) -> Any:
        out, pull = jax.vjp(lambda x, y: f(x, y, *rest), x, y)
        return pull(jnp.cos(out))

    want = pulled(fun)
    points = frontier(case.posed.problem).points
    for point in {points[0].nbytes: points[0], points[-1].nbytes: points[-1]}.values():
        policy = Exactly(planned_policy(case.posed, point, Fraction(0), "cpu"))
        got = pulled(ar.checkpoint(fun, policy=policy))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_generator_reaches_what_matters() -> None:
    """Packed storage, values that come in pairs, what may not run twice, open inputs, derivative-only operations."""
    case, keeps = build_case(_RICH, True, (False, True, False, True), False)
    problem = case.posed.problem
    graph = problem.graph
    assert any(problem.storages[v][s].name == "packed" for keep in keeps for v, s in keep.items())
    assert any(not op.repeatable for op in graph.ops)
    assert any(len(set(op.outputs) & set(graph.demanded)) == 2 for op in graph.ops)
    assert any(schedule(problem, keep) is None for keep in keeps)
    assert any(graph.values[v].producer is None for keep in keeps for v in keep)
    assert is_var(case.joint.outs[0])
