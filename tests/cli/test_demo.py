"""`autoremat demo`, smaller than a user sees it."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from autoremat.cli import _demo as demo
from autoremat.cli import _demo_command as demo_command
from autoremat.cli import _demo_model as demo_model
from autoremat.cli import _errors as codes
from autoremat.report import TerminalProgress
from support.cli import Call

SIZE = demo_model.Size(layers=6, width=32, heads=2, batch=4, sequence=64)
STEPS = 3

Parts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran() -> tuple[Parts, str]:
    """One small demo: its parts, and what its progress said."""
    log = io.StringIO()
    with TerminalProgress(log) as progress:
        parts = dict(demo.run(SIZE, steps=STEPS, compiled=0, effort="fast", progress=progress))
    return parts, log.getvalue()


@pytest.fixture
def parts(ran: tuple[Parts, str], monkeypatch: pytest.MonkeyPatch) -> Parts:
    """The parts, and the command `demo` yields them again."""

    def replay(*args: object, **kwargs: object) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ran[0].items()

    monkeypatch.setattr(demo_command, "run", replay)
    return ran[0]


@pytest.mark.slow
def test_the_three_ways_agree(parts: Parts):
    training = parts["training"]
    assert len(training["ways"]) >= 2
    for way in training["ways"]:
        assert len(way["losses"]) == STEPS
        assert way["losses"][0] == pytest.approx(np.log(256), abs=0.3)
        assert way["loss_difference"] < 1e-4
        assert way["gradient_difference"] < 1e-4
        assert way["step_ratio"] > 0


@pytest.mark.slow
def test_what_was_verified_is_what_ran(parts: Parts):
    plan, training = parts["plan"], parts["training"]
    first, *_, planned = training["ways"]
    assert plan["peak_bytes"] <= plan["budget_bytes"] == plan["unplanned_bytes"] // 2
    assert (first["name"], first["peak_bytes"]) == ("no remat", plan["unplanned_bytes"])
    assert (planned["name"], planned["peak_bytes"]) == ("autoremat", plan["peak_bytes"])


@pytest.mark.slow
def test_the_best_policy_fits_with_the_fewest_flops(parts: Parts):
    policies = parts["policies"]
    fitting = {p["name"]: p["flops"] for p in policies["policies"] if p["fits"]}
    assert [p["name"] for p in policies["policies"]] == list(demo.POLICIES)
    assert fitting[policies["best"]] == min(fitting.values())


@pytest.mark.slow
def test_every_compile_is_told(ran: tuple[Parts, str]):
    lines = ran[1].splitlines()
    assert all(line.startswith(("Compiled ", " " * 29)) for line in lines)
    for what in ("no recomputation", "jax.checkpoint, nothing_saveable", "autoremat, by the plan"):
        assert any(line.endswith(f"  {what}") for line in lines)


@pytest.mark.slow
def test_demo_shows_its_parts_in_order(parts: Parts, call: Call):
    result = call("demo")
    assert result.code == 0
    titles = [
        "A byte-level GPT",
        "Residuals of loss",
        "Frontier of loss",
        "Plan for loss",
        "What JAX's own policies reach",
        "Loss curves",
        "Three ways to train",
        "The demo took",
    ]
    places = [result.out.find(title) for title in titles]
    assert -1 not in places
    assert places == sorted(places)
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.slow
def test_demo_as_json(parts: Parts, call: Call):
    data = call("demo", "--json").data
    assert list(data) == ["model", "residuals", "frontier", "plan", "policies", "training"]
    assert data == parts


def test_sizes_are_read(call: Call, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    def record(size: object, **options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        given.update(options, size=size)
        return iter(())

    monkeypatch.setattr(demo_command, "run", record)
    assert call("demo", "--size", "layers=2, width=32", "--steps", "5").code == 0
    assert given["size"] == demo_model.Size(layers=2, width=32)
    assert given["steps"] == 5


def test_demo_without_optax(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    result = call("demo", "--json")
    assert result.code == codes.UNEXPECTED
    assert (
        "needs Optax, which is not installed. Cheapest fix: pip install 'autoremat[demo]'"
        in result.data["error"]
    )
    assert "Traceback" not in result.err


def test_batches_are_the_same_every_time():
    size, text = demo_model.Size(batch=2, sequence=16), demo_model.read_text()
    first, second = (list(itertools.islice(demo_model.batches(text, size), 3)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].shape == (2, 17)
    assert not np.array_equal(first[0], first[1])


def test_attention_is_causal():
    size = demo_model.Size(layers=1, width=16, heads=2, batch=1, sequence=8)
    layer = jax.tree.map(lambda x: x[0], demo_model.init(jax.random.key(0), size)["layers"])
    x = jax.random.normal(jax.random.key(1), (1, 8, 16))
    changed = x.at[0, 5].add(1.0)
    attention = jax.jit(lambda x: demo_model.attention(x, layer, 2))
    difference = np.abs(np.asarray(attention(x)) - np.asarray(attention(changed))).sum(-1)[0]
    assert np.all(difference[:5] == 0)
    assert np.all(difference[5:] > 0)


def test_relative_difference():
    reference = {"a": np.array([1.0, -4.0]), "b": np.zeros(2)}
    assert demo.relative_difference(reference, reference) == 0
    assert demo.relative_difference({"a": np.array([1.5, -4.0]), "b": np.zeros(2)}, reference) == 0.125


def test_no_policy_fits():
    assert demo._best_policy([], 10) is None
