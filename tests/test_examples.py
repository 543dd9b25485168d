"""The examples do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from examples import keras_model, seed, transformer

import autoremat
from autoremat.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_seed(capsys: pytest.CaptureFixture[str]):
    """Equal gradients; with checkpoint fewer residuals, and smaller ones."""
    seed.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "True"
    totals = [re.fullmatch(r"total (\d+) B in (\d+) residuals, .*", line) for line in lines]
    (plain_bytes, plain), (kept_bytes, kept) = ((int(t[1]), int(t[2])) for t in totals if t)
    assert kept < plain
    assert kept_bytes < plain_bytes
    with_checkpoint = lines[lines.index("With checkpoint:") :]
    assert any("dot_general" in line for line in with_checkpoint)
    assert not any("output of cos" in line for line in with_checkpoint)


def test_seed_residuals_are_products_and_block_inputs():
    x, w = jnp.ones((4, 4)), jnp.eye(4) * 0.5
    kept = autoremat.saved_residuals(seed.checkpointed_net, x, w)
    assert sorted(r.primitive for r in kept if r.kind == "intermediate") == ["dot_general"] * 3 + ["sin"] * 2


@pytest.mark.slow
def test_transformer_as_a_program(capsys: pytest.CaptureFixture[str]):
    transformer.main(effort="fast")
    text = capsys.readouterr().out
    assert "Plan for loss" in text
    assert "same loss: True" in text
    assert "same gradients: True" in text


@pytest.mark.slow
def test_transformer_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.json"
    spec = f"{EXAMPLES / 'transformer.py'}:example"
    code = main(["plan", spec, "--budget", "50%", "--effort", "fast", "--out", str(out)])
    text = capsys.readouterr().out
    assert code == 0
    assert text.endswith(f"Wrote {out}\n")
    plan = autoremat.Plan.load(out)
    assert plan.unplanned_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes == plan.unplanned_bytes // 2


def test_keras_model(capsys: pytest.CaptureFixture[str]):
    layers = keras_model.keras.layers
    model = keras_model.keras.Sequential(
        [
            keras_model.keras.Input((32, 32, 3)),
            *(layers.Conv2D(16, 3, padding="same", activation="gelu") for _ in range(4)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    plan = keras_model.run(model, batch=32, budget="60%")
    text = capsys.readouterr().out
    assert plan.unplanned_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes == plan.unplanned_bytes * 60 // 100
    assert "Plan for loss" in text
    assert re.search(r"loss \d\.\d+, norm of the gradient \d+\.\d+", text)
