"""`fit`, `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoremat
from autoremat.cli import _errors as codes
from support.cli import Call


def peak(call: Call, model: Path) -> int:
    data = call("fit", f"{model}:step", "--memory", "1GiB", "--json").data
    return data["plan"]["peak_bytes"]


def test_fit(model: Path, call: Call, tmp_path: Path):
    memory = int(0.8 * peak(call, model))
    out = tmp_path / "plan.json"
    result = call("fit", f"{model}:step", "--memory", f"{memory}B", "--reserve", "1%", "--out", str(out))
    assert result.code == 0
    assert result.out.startswith("Step with the gradient of loss on cpu\n")
    for text in ("What fills the memory", "parameters", "activations", f"Wrote {out}"):
        assert text in result.out
    assert max(len(line) for line in result.out.splitlines() if not line.startswith("Wrote")) <= 80
    assert autoremat.Plan.load(out).peak_bytes <= 0.99 * memory
    again = call("fit", f"{model}:step", "--memory", f"{memory}B", "--out", str(out))
    assert again.code == codes.USAGE
    assert "exists. Cheapest fix: another name, or --force" in again.words


def test_fit_as_json(model: Path, call: Call):
    data = call("fit", f"{model}:step", "--memory", "1GiB", "--json").data
    assert data["memory_bytes"] == 2**30
    assert data["reserve_bytes"] == 2**30 // 20
    assert sum(data["account"].values()) == data["plan"]["peak_bytes"]
    assert data["account"]["parameters"] == 16 * 16 * 4


def test_fit_without_a_memory(model: Path, call: Call):
    result = call("fit", f"{model}:step")
    assert result.code == codes.USAGE
    assert "does not know how much memory a CPU may use" in result.words


def test_fit_without_a_gradient(model: Path, call: Call):
    result = call("fit", f"{model}:example", "--memory", "1GiB")
    assert result.code == codes.BAD_INPUT
    assert "the step takes no gradient" in result.words


def test_calibrate_and_plan(model: Path, call: Call, tmp_path: Path):
    out = tmp_path / "costs.json"
    result = call("calibrate", f"{model}:example", "--repeats", "1", "--out", str(out))
    assert result.code == 0
    for text in ("operations on cpu", "Memory bandwidth", "dot_general", "GFLOP/s", f"Wrote {out}"):
        assert text in result.out
    assert max(len(line) for line in result.out.splitlines() if not line.startswith("Wrote")) <= 80
    planned = call("plan", f"{model}:example", "--budget", "60%", "--costs", str(out), "--json").data
    assert any("priced by times measured on cpu" in note for note in planned["notes"])
    points = call("frontier", f"{model}:example", "--costs", str(out), "--json").data["points"]
    plain = call("frontier", f"{model}:example", "--json").data["points"]
    assert points[-1]["recompute_seconds"] != plain[-1]["recompute_seconds"]


def test_priced_by_flops(model: Path, call: Call):
    planned = call("plan", f"{model}:example", "--budget", "60%", "--costs", "flops", "--json").data
    assert any("priced by its FLOPs alone" in note for note in planned["notes"])


def test_calibrate_as_json(model: Path, call: Call):
    data = call("calibrate", f"{model}:example", "--repeats", "1", "--json").data
    assert data["target"] == "cpu"
    assert any(key.startswith("dot_general") for key in data["seconds"])


@pytest.mark.parametrize("costs", ["FLOPS", "f" * 300, "."])
def test_costs_that_are_no_file(model: Path, call: Call, costs: str):
    result = call("plan", f"{model}:example", "--budget", "60%", "--costs", costs)
    assert result.code == codes.FAILED
    assert f"cannot read the cost table {costs}" in result.words
    assert "--costs takes a file that `autoremat calibrate --out` made, or flops" in result.words


def test_a_table_that_is_none(model: Path, call: Call, tmp_path: Path):
    bad = tmp_path / "costs.json"
    bad.write_text(json.dumps({"version": 7}))
    result = call("plan", f"{model}:example", "--budget", "60%", "--costs", str(bad))
    assert result.code == codes.FAILED
    assert "is no cost table of version 1: got 7" in result.words
