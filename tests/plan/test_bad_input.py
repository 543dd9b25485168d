"""Every bad input has an error of its own that says what was got, what is needed, and the cheapest fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autoremat as ar
from autoremat.plan import _candidates

X = jnp.ones((64, 8))
W = jnp.full((8, 8), 0.1)


def loss(w: Any, x: Any) -> Any:
    for _ in range(3):
        x = jnp.sin(jnp.sin(x @ w)) * jnp.cos(x)
    return x.sum()


def plan_of(fun: Callable[..., Any], *args: Any, **options: Any) -> ar.Plan:
    chosen: dict[str, Any] = {"budget": "100%", "effort": "fast", **options}
    return ar.plan(fun, *args, **chosen)


def refused(kind: type[Exception], call: Callable[[], Any], *texts: str) -> Any:
    """The error of a call, which has to contain the texts."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    return caught.value


def test_all_errors_have_one_root() -> None:
    errors = [getattr(ar, name) for name in ar.__all__ if name.endswith("Error")]
    assert len(errors) > 8
    assert all(issubclass(e, ar.AutorematError) for e in errors)
    assert all(issubclass(getattr(ar, n), ar.AutorematWarning) for n in ar.__all__ if n.endswith("Warning"))


# -------------------------------------------------------------------------------------------------------------- budgets

_FORMS = 'needs bytes as an int, a size such as "12GiB" or "800MB", or a share such as "50%"'


@pytest.mark.parametrize(
    "budget", ["", " ", "lots", "12 parsecs", "GiB", "1e9", "nan%", "1,5 GB", "50%%", "0x10", "1.5.2MB"]
)
def test_unreadable_budget(budget: str) -> None:
    refused(
        ar.BudgetError,
        lambda: plan_of(loss, W, X, budget=budget),
        f"`autoremat.plan(budget=...)` {_FORMS}",
        repr(budget),
    )
    refused(
        ar.BudgetError,
        lambda: ar.checkpoint(loss, budget=budget),
        f"`autoremat.checkpoint(budget=...)` {_FORMS}",
    )


@pytest.mark.parametrize("budget", [0, -1, "0", "-5", "-5%", "0%", "0.1b", "-2 GiB", "0.0MB"])
def test_budget_that_is_not_positive(budget: Any) -> None:
    refused(ar.BudgetError, lambda: plan_of(loss, W, X, budget=budget), _FORMS, f"above zero; got {budget!r}")
    refused(ar.BudgetError, lambda: ar.checkpoint(loss, budget=budget), f"above zero; got {budget!r}")


@pytest.mark.parametrize("budget", [True, False, 1.5, None, b"50%", np.float32(3), ["50%"]])
def test_budget_of_a_wrong_type(budget: Any) -> None:
    refused(
        ar.BudgetError, lambda: plan_of(loss, W, X, budget=budget), _FORMS, f"of type {type(budget).__name__}"
    )
    if budget is not None:  # for a checkpoint that is the default
        refused(
            ar.BudgetError, lambda: ar.checkpoint(loss, budget=budget), f"of type {type(budget).__name__}"
        )


def test_a_bad_budget_is_a_value_error_and_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    refused(ValueError, lambda: plan_of(loss, W, X, budget="lots"))


@pytest.mark.parametrize("budget", [" 20 KiB ", "20kib", "0.02 MB", "20000", "100.0%", "100 %", 20_000])
def test_readable_budgets(budget: Any) -> None:
    assert plan_of(loss, W, X, budget=budget).budget_bytes >= 16_000


@pytest.mark.parametrize("budget", [1, "1%"])
def test_budget_below_the_floor(budget: Any) -> None:
    error = refused(
        ar.InfeasibleBudgetError,
        lambda: plan_of(loss, W, X, budget=budget),
        "autoremat.plan(loss, budget=...)",
    )
    unplanned = ar.measure(jax.value_and_grad(loss), W, X).peak_bytes
    assert 0 < error.floor_bytes < unplanned
    wanted = 1 if budget == 1 else unplanned // 100
    text = str(error)
    assert f"got {wanted:,} bytes" in text
    assert f"the lowest compiled peak reached is {error.floor_bytes:,} bytes" in text
    assert "proven that none fits" in text
    assert f"Cheapest fix: a budget of at least {error.floor_bytes:,} bytes, or a smaller batch." in text
    # The operation is named with its operands and its line, and its bytes were compiled.
    assert error.op in text
    named = re.search(r"is `(\w+)` on \((.*?)\) at (\S+) .*compiled alone it takes ([\d,]+) bytes", error.op)
    assert named is not None, error.op
    assert named[1] == "dot_general"
    assert "f32[64,8]" in named[2]
    assert named[3].startswith(f"{__file__}:")
    assert 64 * 8 * 4 <= int(named[4].replace(",", "")) <= error.floor_bytes
    # The fix works.
    assert plan_of(loss, W, X, budget=error.floor_bytes).peak_bytes == error.floor_bytes


def _noisy(x: Any, key: Any) -> Any:
    bits = jax.random.bits(jax.random.wrap_key_data(key, impl="rbg"), x.shape)
    return jnp.sum(jnp.sin(jnp.sin(x)) * (bits > jnp.uint32(7)))


def test_budget_of_a_checkpoint_below_what_may_not_run_again() -> None:
    key = jnp.arange(4, dtype=jnp.uint32)
    error = refused(
        ar.InfeasibleBudgetError,
        lambda: jax.grad(ar.checkpoint(_noisy, budget=10))(X, key),
        "`autoremat.checkpoint(budget=...)`: got 10 bytes",
        f"what may not run again in _noisy at {__file__}:",
        "Cheapest fix: a budget of at least",
        "or move the random or effectful operation out",
    )
    assert error.floor_bytes == 64  # the comparison, packed
    jax.grad(ar.checkpoint(_noisy, budget=error.floor_bytes))(X, key)


def test_a_checkpoint_takes_a_policy_or_a_budget() -> None:
    policy = ar.checkpoint_policies.dots_saveable
    refused(
        TypeError, lambda: ar.checkpoint(loss, policy=policy, budget="50%"), "a policy or a budget, not both"
    )
    refused(TypeError, lambda: ar.checkpoint(policy=policy, budget=5)(loss), "a policy or a budget, not both")


# ------------------------------------------------------------------------------------------ what cannot be differentiated


@pytest.mark.parametrize(
    "call", [plan_of, lambda fun, *args, **kw: ar.frontier(fun, *args, **kw)], ids=["plan", "frontier"]
)
def test_nothing_to_differentiate(call: Any) -> None:
    texts = ("no floating-point array", "nothing to differentiate", "Cheapest fix: set `argnums`")
    integers = jnp.arange(3)
    refused(
        ar.DifferentiationError,
        lambda: call(lambda i: i.sum() * 1.0, integers),
        *texts,
        "argument(s) (0,)",
        "['int32']",
    )
    refused(
        ar.DifferentiationError,
        lambda: call(lambda i, x: (i * x).sum(), integers, jnp.ones(3)),
        *texts,
        "['float32', 'int32']",
    )
    call(lambda i, x: (i * x).sum(), integers, jnp.ones(3), argnums=1)  # the fix works
    refused(ar.DifferentiationError, lambda: call(lambda b: b.sum() * 1.0, integers > 1), *texts, "['bool']")


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda x: x, "1 array(s): f32[64,8]"),
        (lambda x: x.sum(keepdims=True), "1 array(s): f32[1,1]"),
        (lambda x: x.sum().astype(int), "1 array(s): i32[]"),
        (lambda x: x.sum() > 0, "1 array(s): bool[]"),
        (lambda x: x.sum() + 0j, "1 array(s): c64[]"),
        (lambda x: None, "0 array(s)"),
        (lambda x: {}, "0 array(s)"),
        (
            lambda x: (x.sum(), x),
            "2 array(s): f32[], f32[64,8]. If it returns (loss, aux), pass has_aux=True.",
        ),
        (lambda x: [x.sum()] * 3, "3 array(s): f32[], f32[], f32[]. If it returns (loss, aux)"),
    ],
)
def test_no_scalar(result: Callable[[Any], Any], got: str) -> None:
    def fun(x: Any) -> Any:
        return result(jnp.sin(x))

    for call in (plan_of, lambda fun, x: ar.frontier(fun, x)):
        error = refused(
            ar.DifferentiationError,
            lambda call=call: call(fun, X),
            "`autoremat.plan(fun, ...)` needs a function that returns one floating-point scalar",
            got,
        )
        assert isinstance(error, TypeError)
        assert "Cheapest fix: return its mean or sum." in str(error) or "has_aux" in str(error)


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda x: x.sum(), "returns (loss, aux); it returns PyTreeDef(*)"),
        (lambda x: (x.sum(), x, x), "returns (loss, aux); it returns PyTreeDef((*, *, *))"),
        (lambda x: [x.sum(), x], "returns (loss, aux); it returns PyTreeDef([*, *])"),
        (
            lambda x: (x, x.sum()),
            "one floating-point scalar, as `jax.grad` does; it returns 1 array(s): f32[64,8]",
        ),
        (lambda x: ((x.sum(), x), x), "it returns 2 array(s): f32[], f32[64,8]"),
    ],
)
def test_auxiliary_output_of_a_wrong_form(result: Callable[[Any], Any], got: str) -> None:
    refused(ar.DifferentiationError, lambda: plan_of(lambda x: result(jnp.sin(x)), X, has_aux=True), got)


@pytest.mark.parametrize("argnums", [2, -3, (0, 5), (), [-7], (0, 0), (0, -2), 1.5, "0", None])
def test_argnums_out_of_range(argnums: Any) -> None:
    for call in (plan_of, lambda *a, **k: ar.frontier(*a, **k)):
        refused(
            ar.DifferentiationError,
            lambda call=call: call(loss, W, X, argnums=argnums),
            f"got {argnums!r}, but the function was given 2 positional arguments",
            "Cheapest fix: an int, or a tuple of distinct ints, from 0 to 1",
        )


# ------------------------------------------------------------------------------------------------- policies, names, effects


@pytest.mark.parametrize("answer", ["yes", None, 1, np.True_, X])
def test_policy_that_returns_neither_a_decision_nor_a_bool(answer: Any) -> None:
    def policy(prim: Any, *avals: Any, **params: Any) -> Any:
        return answer

    call = lambda: jax.grad(ar.checkpoint(loss, policy=policy))(W, X)
    error = refused(
        ar.PolicyError,
        call,
        "the checkpoint policy <function test_policy_that_returns",
        f"returned {answer!r} of type {type(answer).__name__}",
        "must return a bool, or one of jax.ad_checkpoint.Saveable, Recompute, Offloadable",
        "Cheapest fix: wrap its result in bool(...)",
    )
    assert isinstance(error, TypeError)


def test_names_that_match_nothing() -> None:
    def named(x: Any) -> Any:
        return jnp.sum(jnp.sin(ar.checkpoint_name(jnp.sin(x), "hidden")))

    policies = ar.checkpoint_policies
    for policy in (
        policies.save_only_these_names("hiden", "attention"),
        policies.save_any_names_but_these("hiden", "attention"),
        policies.save_anything_except_these_names("hiden", "attention"),
    ):
        with pytest.warns(ar.UnmatchedNameWarning) as caught:
            jax.grad(ar.checkpoint(named, policy=policy))(X)
        (warning,) = caught
        text = str(warning.message)
        assert "a checkpoint policy names ['attention', 'hiden']" in text
        assert f"inside named at {__file__}:" in text
        assert "found: ['hidden']" in text
        assert (
            "Cheapest fix: correct the spelling, or tag the value with autoremat.checkpoint_name(x, name)."
            in text
        )
    jax.grad(ar.checkpoint(named, policy=policies.save_only_these_names("hidden")))(X)


def _with_effect(w: Any, x: Any) -> Any:
    for _ in range(3):
        x = jnp.sin(jnp.sin(x @ w)) * jnp.cos(x)
        io_callback(lambda: None, None, ordered=True)
    return x.sum()


@pytest.mark.filterwarnings("ignore::autoremat.UnknownPrimitiveWarning")
def test_an_effect_that_cannot_run_twice() -> None:
    texts = (
        "Effects not supported",
        "these effects may not",
        "Cheapest fix: move the call that has the effect",
    )
    error = refused(
        ar.EffectError,
        lambda: jax.grad(ar.checkpoint(_with_effect))(W, X),
        *texts,
        f"in _with_effect at {__file__}:",
    )
    assert isinstance(error, NotImplementedError)
    refused(ar.EffectError, lambda: plan_of(_with_effect, W, X, budget="70%"), *texts)
    assert plan_of(_with_effect, W, X).decisions == ()  # nothing runs again: no error


# ------------------------------------------------------------------------------------------- targets, options, the compiler


def test_unknown_target() -> None:
    for call in (plan_of, lambda *a, **k: ar.frontier(*a, **k), lambda *a, **k: ar.measure(*a, **k)):
        error = refused(
            ar.TargetError,
            lambda call=call: call(loss, W, X, target="tpu:v99"),
            "'tpu:v99'",
            "Cheapest fix: one of these names",
        )
        assert isinstance(error, ValueError)
        assert "tpu:v5e" in str(error)


@pytest.mark.parametrize("effort", ["blanced", "", None, 3])
def test_unknown_effort(effort: Any) -> None:
    refused(
        ValueError,
        lambda: plan_of(loss, W, X, effort=effort),
        '"fast", "balanced" or "optimal"',
        repr(effort),
    )


def test_unknown_compiler_option() -> None:
    options = {"xla_no_such_option": "1"}
    refused(ar.CompileError, lambda: plan_of(loss, W, X, compiler_options=options), "xla_no_such_option")
    refused(ar.CompileError, lambda: ar.measure(loss, W, X, compiler_options=options), "xla_no_such_option")


@pytest.fixture
def failing_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes all compilations but the first few raise an error, or the first few alone."""
    _candidates._RECORDS.clear()
    compile_for_real = jax.stages.Lowered.compile

    def install(error: BaseException, *, after: int = 0, until: int = 10**6) -> None:
        count = iter(range(10**6))

        def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
            if after <= next(count) < until:
                raise error
            return compile_for_real(self, *args, **kwargs)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile)

    yield install
    _candidates._RECORDS.clear()


_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate a buffer.\nDetails follow."
_TOO_LARGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.26G of 15.75G hbm.\nDetails follow.",
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (17.26G) "
    "exceeds available HBM (15.75G). HLO module: jit_f.",
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (jax.errors.JaxRuntimeError(_OUT_OF_MEMORY), "while trying to allocate a buffer."),
        (
            jax.errors.JaxRuntimeError("INTERNAL: Out of memory while allocating"),
            "Out of memory while allocating",
        ),
        (MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_in_compilation(failing_compiler: Any, error: BaseException, text: str) -> None:
    failing_compiler(error)
    for call in (plan_of, lambda *a: ar.measure(jax.value_and_grad(loss), *a[1:])):
        raised = refused(
            ar.CompileError,
            lambda call=call: call(loss, W, X),
            "the compiler ran out of memory",
            text,
            "Cheapest fix: a smaller batch",
        )
        assert raised.__cause__ is error
        assert "Details follow" not in str(raised)


def test_another_failure_of_the_compiler(failing_compiler: Any) -> None:
    failing_compiler(jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such lowering"))
    refused(
        ar.CompileError, lambda: plan_of(loss, W, X), "the compiler failed: UNIMPLEMENTED: no such lowering"
    )


def test_a_candidate_that_does_not_compile_does_not_fit(failing_compiler: Any) -> None:
    failing_compiler(jax.errors.JaxRuntimeError(_OUT_OF_MEMORY), after=1)
    error = refused(
        ar.InfeasibleBudgetError,
        lambda: plan_of(loss, W, X, budget="80%"),
        "Cheapest fix: a budget of at least",
    )
    assert error.floor_bytes > 0


def test_a_program_that_compiles_only_with_recomputation(failing_compiler: Any) -> None:
    failing_compiler(jax.errors.JaxRuntimeError(_OUT_OF_MEMORY), until=1)
    refused(ar.CompileError, lambda: plan_of(loss, W, X, budget="80%"), "or state the budget in bytes")
    failing_compiler(jax.errors.JaxRuntimeError(_OUT_OF_MEMORY), until=1)
    plan = plan_of(loss, W, X, budget="1GiB")
    assert plan.unplanned_bytes is None
    assert 0 < plan.peak_bytes <= plan.budget_bytes == 2**30
    assert "the compiler itself runs out of memory" in plan.notes[0]
    assert "does not compile" in plan.report


def test_a_program_that_never_compiles(failing_compiler: Any) -> None:
    failing_compiler(jax.errors.JaxRuntimeError(_OUT_OF_MEMORY))
    error = refused(
        ar.InfeasibleBudgetError, lambda: plan_of(loss, W, X, budget="1GiB"), "Cheapest fix: a smaller batch"
    )
    assert error.floor_bytes == 0


@pytest.mark.parametrize("text", _TOO_LARGE)
def test_a_program_of_which_the_compiler_says_what_it_needs(failing_compiler: Any, text: str) -> None:
    """It has a peak, so that a share of it is a budget, and does not fit."""
    failing_compiler(jax.errors.JaxRuntimeError(text), until=1)
    use = ar.measure(jax.value_and_grad(loss), W, X)
    assert not use.fits
    assert use.peak_bytes == int(17.26 * 2**30)
    assert use.argument_bytes + use.output_bytes + use.temp_bytes == use.peak_bytes
    failing_compiler(jax.errors.JaxRuntimeError(text), until=1)
    plan = plan_of(loss, W, X, budget="10%")
    assert plan.unplanned_bytes == use.peak_bytes
    assert plan.peak_bytes <= plan.budget_bytes == use.peak_bytes // 10
    assert "its compiler refuses it" in plan.notes[0]


def test_a_leaf_that_is_no_array() -> None:
    def f(model: Any, x: Any) -> Any:
        return model["f"](x).sum()

    for call in (
        lambda: plan_of(f, {"f": jnp.sin}, X),
        lambda: ar.saved_residuals(f, {"f": jnp.sin}, X),
        lambda: ar.checkpoint(f)({"f": jnp.sin}, X),
    ):
        refused(
            TypeError, call, "args[0]['f'] of `f` is <", "not a valid JAX type", "Cheapest fix: close over"
        )


def test_a_counter_among_the_parameters() -> None:
    def f(p: Any) -> Any:
        return (p["w"] ** 2).sum()

    refused(
        ar.DifferentiationError,
        lambda: plan_of(f, {"w": X, "n": jnp.uint32(0)}),
        "argument 0['n'] is uint32",
        "Cheapest fix: pass counters",
    )


def test_what_is_no_function() -> None:
    refused(TypeError, lambda: ar.checkpoint(3), "needs a function, got 3")  # type: ignore[call-overload]
    refused(TypeError, lambda: plan_of(3, W, X), "not callable")  # type: ignore[arg-type]
    refused(TypeError, lambda: ar.checkpoint_name(X, 3), "needs a str as name, got 3")  # type: ignore[arg-type]
