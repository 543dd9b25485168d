"""`plan`, `residuals`, `frontier`."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autoremat
from autoremat.cli import _errors as codes
from support.cli import Call, Result


def check_width(result: Result) -> None:
    assert max(map(len, [*result.out.splitlines(), *result.err.splitlines()])) <= 80


# ----------------------------------------------------------------------------------------------------------------- plan


def test_plan(model: Path, call: Call):
    result = call("plan", f"{model}:example", "--budget", "60%")
    assert result.code == 0
    check_width(result)
    assert result.out.startswith("Plan for loss on cpu\n  Budget  ")
    for text in (
        "Unplanned peak",
        "Planned peak",
        "of unplanned",
        "temporaries",
        "Recomputed a step",
        "MFLOP",
    ):
        assert text in result.out
    lines = result.err.splitlines()
    assert lines[0].startswith("Compiled ")
    assert lines[0].endswith(" no recomputation")


def test_plan_as_json(model: Path, call: Call):
    result = call("plan", f"{model}:example", "--budget", "60%", "--json")
    data = result.data
    assert data["function"] == "loss"
    assert data["peak_bytes"] <= data["budget_bytes"] == int(0.6 * data["unplanned_bytes"])
    assert (
        data["peak_bytes"]
        == data["argument_bytes"] + data["output_bytes"] + data["temp_bytes"] - data["alias_bytes"]
    )
    assert "wrote" not in data


def test_a_plan_in_bytes(model: Path, call: Call):
    data = call("plan", f"{model}:example", "--budget", str(2**30), "--json").data
    assert data["budget_bytes"] == 2**30
    assert data["recompute_flops"] == 0
    assert "meets the budget as it is" in data["notes"][0]


def test_plan_writes_what_can_be_loaded(model: Path, tmp_path: Path, call: Call):
    out = tmp_path / "plan.json"
    result = call("plan", f"{model}:example", "--budget", "60%", "--out", out)
    assert result.code == 0
    assert result.out.endswith(f"Wrote {out}\n")
    plan = autoremat.Plan.load(out)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.sin(jnp.sin(x @ w))
        return x.sum()

    w, x = jnp.eye(16), jnp.ones((4096, 16))
    gradients = [jax.grad(f)(w, x) for f in (loss, plan.apply(loss))]
    assert jnp.allclose(*gradients, rtol=1e-5)


def test_plan_does_not_overwrite(model: Path, tmp_path: Path, call: Call):
    out = tmp_path / "plan.json"
    out.write_text("mine", "utf-8")
    arguments = ("plan", f"{model}:example", "--budget", "60%", "--out", out)
    result = call(*arguments)
    assert result.code == codes.USAGE
    assert f"--out: {out} exists. Cheapest fix: another name, or --force to overwrite it." in result.words
    assert out.read_text("utf-8") == "mine"
    assert "Compiled" not in result.err, "it is refused before any work is done"
    result = call(*arguments, "--force", "--json")
    assert result.code == 0
    assert result.data["wrote"] == str(out)
    assert json.loads(out.read_text("utf-8"))["format"] == "autoremat plan"


def test_plan_into_a_folder(model: Path, tmp_path: Path, call: Call):
    arguments = ("plan", f"{model}:example", "--budget", "60%", "--out")
    assert "is a folder; need the name of a file" in call(*arguments, tmp_path).words
    result = call(*arguments, tmp_path / "no" / "plan.json")
    assert result.code == codes.USAGE
    assert "does not exist. Cheapest fix: make it first." in result.words


def test_a_file_that_cannot_be_written_is_5(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    def fail(self: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(autoremat.Plan, "save", fail)
    result = call("plan", f"{model}:example", "--budget", "60%", "--out", tmp_path / "plan.json")
    assert result.code == codes.FAILED
    assert "plan.json: No space left on device." in result.words


@pytest.mark.parametrize("budget", ["lots", "12GB12", "-5%", "0", ""])
def test_a_budget_that_cannot_be_read_is_2(budget: str, model: Path, call: Call):
    result = call("plan", f"{model}:example", f"--budget={budget}")
    assert result.code == codes.USAGE
    assert (
        'needs bytes as an int, a size such as "12GiB" or "800MB", or a share such as "50%"' in result.words
    )


def test_an_infeasible_budget_is_3(model: Path, call: Call):
    result = call("plan", f"{model}:example", "--budget", "1KiB", "--json")
    assert result.code == codes.INFEASIBLE
    assert result.data["kind"] == "InfeasibleBudgetError"
    assert result.data["floor_bytes"] > 4096 * 16 * 4
    assert f"{result.data['floor_bytes']:,}" in result.data["error"]
    assert "got 1,024 bytes" in result.words


def test_an_unknown_target_is_5(model: Path, call: Call):
    result = call("plan", f"{model}:example", "--budget", "50%", "--target", "tpu:v99")
    assert result.code == codes.FAILED
    assert "no target is called 'tpu:v99'" in result.words


def test_a_dict_says_how_to_differentiate(model: Path, call: Call):
    data = call("plan", f"{model}:as_dict", "--budget", "99%", "--effort", "fast", "--json").data
    assert data["function"] == "with_aux"
    assert data["output_bytes"] >= 4096 * 16 * 4, "the auxiliary output"


def test_the_command_line_overrides_the_dict(model: Path, call: Call):
    arguments = ("plan", f"{model}:as_dict", "--budget", "100%", "--json")
    both = call(*arguments, "--argnums", "0,1").data["output_bytes"]
    more = both - call(*arguments).data["output_bytes"]
    assert 0 <= more - 4096 * 16 * 4 < 64, "the gradient of the other argument, and its place in the tuple"


def test_has_aux_is_asked_for(model: Path, tmp_path: Path, call: Call):
    path = tmp_path / "aux.py"
    path.write_text(
        "import jax.numpy as jnp\ndef f(x):\n    return x.sum(), x\ndef example():\n    return f, (jnp.ones(9),)\n"
    )
    result = call("plan", f"{path}:example", "--budget", "99%")
    assert result.code == codes.BAD_INPUT
    assert "If it returns (loss, aux), pass has_aux=True" in result.words
    assert call("plan", f"{path}:example", "--budget", "100%", "--has-aux").code == 0


@pytest.mark.parametrize("command", [("plan", "--budget", "60%"), ("residuals",), ("frontier",)])
def test_what_the_example_prints_does_not_spoil_json(command: tuple[str, ...], model: Path, call: Call):
    name, *options = command
    result = call(name, f"{model}:chatty", *options, "--json")
    assert result.data["function"] == "noisy"
    assert "a word from the example" in result.err
    assert "a word from the trace" in result.err


# ------------------------------------------------------------------------------------------------------------ residuals


def test_residuals(model: Path, call: Call):
    result = call("residuals", f"{model}:example")
    assert result.code == 0
    check_width(result)
    assert result.out.startswith("Residuals of loss\n  Kept for backward  ")
    assert "256.0 KiB" in result.out
    assert "f32[4096,16]" in result.out
    assert "cos at model.py:5:" in result.out
    assert result.err == ""


def test_residuals_as_json(model: Path, call: Call):
    data = call("residuals", f"{model}:example", "--json").data
    assert data["total_bytes"] == data["argument_bytes"] + data["intermediate_bytes"]
    assert data["total_bytes"] == sum(r["nbytes"] for r in data["residuals"])
    assert {"argument", "intermediate"} == {r["kind"] for r in data["residuals"]}
    assert [4096, 16] in [r["shape"] for r in data["residuals"]]


def test_all_residuals(tmp_path: Path, call: Call):
    path = tmp_path / "deep.py"
    path.write_text(
        "import jax.numpy as jnp\ndef f(x):\n    for _ in range(30):\n        x = jnp.sin(x)\n    return x.sum()\n"
        "def example():\n    return f, (jnp.ones(9),)\n"
    )
    assert "--all shows them" in call("residuals", f"{path}:example").out
    everything = call("residuals", f"{path}:example", "--all").out
    assert everything.count("cos at deep.py:4:12") == 30


# ------------------------------------------------------------------------------------------------------------- frontier


def test_frontier(model: Path, call: Call):
    result = call("frontier", f"{model}:example")
    assert result.code == 0
    check_width(result)
    for text in ("Frontier of loss", "kept bytes", "recomputed FLOPs", "of forward", "|*", "Kept (model)"):
        assert text in result.out
    assert "Peak (compiled)" not in result.out
    assert result.err == "", "nothing is compiled"


def test_frontier_compiled(model: Path, call: Call):
    result = call("frontier", f"{model}:example", "--compiled", 2)
    assert "Peak (compiled)" in result.out
    assert "without recomputation" in " ".join(result.out.split())
    check_width(result)


def test_frontier_as_json(model: Path, call: Call):
    data = call("frontier", f"{model}:example", "--compiled", 2, "--json").data
    kept = [p["kept_bytes"] for p in data["points"]]
    assert kept == sorted(kept, reverse=True)
    assert data["points"][0]["recompute_flops"] == 0
    assert data["forward_flops"] > 6 * 2 * 4096 * 16 * 16
    assert sum(p["peak_bytes"] is not None for p in data["points"]) == 2
    assert data["unplanned_bytes"] > 0


def test_frontier_of_nothing(tmp_path: Path, call: Call):
    path = tmp_path / "linear.py"
    path.write_text(
        "import jax.numpy as jnp\ndef example():\n    return (lambda x: x.sum()), (jnp.ones(9),)\n"
    )
    result = call("frontier", f"{path}:example")
    assert result.code == 0
    assert "There is nothing to trade" in result.out


def test_targets(call: Call):
    """Every device with its compiler, or the command that installs it; the same as JSON, with sources."""
    shown, data = call("targets"), call("targets", "--json").data
    assert shown.code == 0
    names = [t["name"] for t in data["targets"]]
    assert {"cpu", "tpu:v5e", "gpu:h100"} <= set(names)
    for target in data["targets"]:
        assert target["name"] in shown.out
        assert target["compiler"] or target["install"].startswith("pip install")
        assert len(target["source"]) > 40
    assert "this machine" in shown.out
