"""`autoremat demo`, smaller than a user sees it."""

from __future__ import annotations

import itertools
import sys

import jax
import numpy as np
import pytest

from autoremat.cli import _demo as demo
from autoremat.cli import _demo_model as demo_model
from autoremat.cli import _errors as codes
from support.cli import Call

SMALL = ("--size", "layers=3,width=32,heads=2,batch=4,sequence=64", "--steps", "3", "--compiled", "2")


def test_demo(call: Call):
    """Everything in its order; the losses of all ways agree."""
    result = call("demo", *SMALL)
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
    assert max(map(len, [*result.out.splitlines(), *result.err.splitlines()])) <= 80
    assert "jax.checkpoint, nothing_saveable" in result.err


def test_demo_as_json(call: Call):
    result = call("demo", *SMALL, "--json")
    assert result.code == 0
    data = result.data
    assert list(data) == ["model", "residuals", "frontier", "plan", "policies", "training"]
    training, plan = data["training"], data["plan"]
    assert plan["peak_bytes"] <= plan["budget_bytes"] == plan["unplanned_bytes"] // 2
    first, *others = training["ways"]
    assert (first["name"], others[-1]["name"]) == ("no remat", "autoremat")
    assert first["peak_bytes"] == plan["unplanned_bytes"]
    assert others[-1]["peak_bytes"] == plan["peak_bytes"], "what was verified is what ran"
    for way in training["ways"]:
        assert len(way["losses"]) == 3
        assert way["losses"][0] == pytest.approx(np.log(256), abs=0.3)
        assert way["loss_difference"] < 1e-4
        assert way["gradient_difference"] < 1e-4
        assert way["step_ratio"] > 0


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
    difference = abs(demo_model.attention(x, layer, 2) - demo_model.attention(changed, layer, 2)).sum(-1)[0]
    assert np.all(difference[:5] == 0)
    assert np.all(difference[5:] > 0)


def test_relative_difference():
    reference = {"a": np.array([1.0, -4.0]), "b": np.zeros(2)}
    assert demo.relative_difference(reference, reference) == 0
    assert demo.relative_difference({"a": np.array([1.5, -4.0]), "b": np.zeros(2)}, reference) == 0.125


def test_no_policy_fits():
    assert demo._best_policy([], 10) is None
