"""Views of plain data, and their renderings."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from autoremat.report import (
    Report,
    frontier_report,
    model_report,
    plan_report,
    plan_text,
    policies_report,
    residuals_report,
    show,
    terminal,
    to_json,
    to_text,
    training_report,
)
from autoremat.report._plot import plot_lines
from autoremat.report._view import Axis, Fact, Facts, Note, Plot, Table

PLAN: dict[str, Any] = {
    "function": "loss",
    "target": "cpu",
    "budget_bytes": 146_612_886,
    "peak_bytes": 133_038_132,
    "unplanned_bytes": 293_225_772,
    "argument_bytes": 11_024_144,
    "output_bytes": 11_020_116,
    "temp_bytes": 110_993_872,
    "alias_bytes": 0,
    "kept_bytes": 89_202_688,
    "recompute_flops": 56_836_096,
    "forward_flops": 6_871_079_943,
    "recompute_seconds": 0.0021,
    "bound_seconds": 0.0008,
    "step_seconds": 0.2,
    "gap": 0.0065,
    "planning_seconds": 0.282,
    "compile_seconds": 18.1,
    "compiles": 3,
    "grouping": "one stage a unit",
    "checkpoints": 5,
    "compiler_options": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    "notes": [
        "Something that the user should know, said in a sentence that is longer than a line of the terminal."
    ],
}
PLAN_TEXT = """\
Plan for loss on cpu
  Budget             139.8 MiB (146,612,886 bytes)
  Unplanned peak     279.6 MiB (293,225,772 bytes)
  Planned peak       126.9 MiB (133,038,132 bytes), 45.4% of unplanned
    arguments        10.51 MiB
    outputs          10.51 MiB
    temporaries      105.9 MiB
  Kept for backward  85.07 MiB, by the model
  Recomputed a step  56.84 MFLOP, 0.83% of the forward pass's 6.87 GFLOP
    lower bound      800 µs of 2 ms, gap 0.65% of a step's time
  Stages recomputed  5, one stage a unit
  Planning           282 ms, and 3 compiles, 18.1 s
  Compiler options   xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED
  Peaks are read from the program compiled for this target, of
  jax.value_and_grad, arguments and outputs included. By the cost model no
  program within the budget recomputes for less than the lower bound, which
  counts operations that compilers do not fuse; the gap is the most that a
  better plan could save. Peaks hold under the compiler options above: pass them
  to jax.jit.
  Note: Something that the user should know, said in a sentence that is longer
  than a line of the terminal."""


def residual(nbytes: int, **fields: Any) -> dict[str, Any]:
    defaults = {"kind": "intermediate", "name": None, "source": "", "primitive": "sin", "iterations": 1}
    return {
        "nbytes": nbytes,
        "shape": [nbytes // 4],
        "dtype": "float32",
        "type": f"f32[{nbytes // 4}]",
        **defaults,
        **fields,
    }


def residuals(*found: dict[str, Any], notes: tuple[str, ...] = ()) -> dict[str, Any]:
    total = sum(r["nbytes"] for r in found)
    own = sum(r["nbytes"] for r in found if r["kind"] == "intermediate")
    return {
        "function": "loss",
        "total_bytes": total,
        "argument_bytes": total - own,
        "intermediate_bytes": own,
        "residuals": list(found),
        "notes": list(notes),
    }


def frontier(count: int, *, peaks: tuple[int, ...] = ()) -> dict[str, Any]:
    points = [
        {
            "kept_bytes": (count - i) * 2**20,
            "recompute_flops": i**2 * 10**6,
            "recompute_seconds": i * 1e-6,
            "peak_bytes": (count - i + 1) * 2**21 if i in peaks else None,
            "vertex": i % 3 == 0,
        }
        for i in range(count)
    ]
    return {
        "function": "loss",
        "target": "cpu",
        "unplanned_bytes": (count + 2) * 2**21 if peaks else None,
        "forward_flops": 10**9,
        "grouping": "one stage a layer",
        "planning_seconds": 0.1,
        "ops": 1234,
        "points": points,
    }


def way(name: str, policy: str, **fields: Any) -> dict[str, Any]:
    defaults = {
        "peak_bytes": 300 * 2**20,
        "temp_bytes": 280 * 2**20,
        "flops": 20_590_000_000,
        "step_seconds": 0.7,
        "step_ratio": 1.0,
        "losses": [5.5 - 0.1 * i for i in range(20)],
        "loss_difference": 0.0,
        "gradient_difference": 0.0,
    }
    return {"name": name, "policy": policy, **defaults, **fields}


TRAINING: dict[str, Any] = {
    "unplanned_bytes": 300 * 2**20,
    "budget_bytes": 150 * 2**20,
    "steps": 20,
    "seconds": 125.2,
    "ways": [
        way("no remat", "everything"),
        way("jax.checkpoint", "dots_with_no_batch_dims_saveable", step_ratio=1.07),
        way("autoremat", "by the plan", peak_bytes=149 * 2**20, step_ratio=0.93, gradient_difference=3.1e-7),
    ],
    "notes": [],
}
POLICIES: dict[str, Any] = {
    "budget_bytes": 150 * 2**20,
    "unplanned_bytes": 300 * 2**20,
    "best": "dots_saveable",
    "policies": [
        {
            "name": "dots_with_no_batch_dims_saveable",
            "peak_bytes": 2**30 * 1000,
            "flops": 10**13,
            "fits": False,
        },
        {"name": "dots_saveable", "peak_bytes": 2**20 * 149, "flops": 10**12, "fits": True},
    ],
}
MODEL: dict[str, Any] = {
    "parameters": 2_755_008,
    "layers": 6,
    "width": 192,
    "heads": 6,
    "batch": 4,
    "sequence": 256,
    "text_bytes": 466_273,
    "steps": 36,
    "jax": "0.12.0",
    "backend": "cpu",
}
LONG = "/a/long/path/to/the/code/of/a_model_with_a_long_name.py:1234:56 (Outer.<locals>.apply_attention)"
REPORTS = {
    "plan": plan_report(PLAN),
    "residuals": residuals_report(
        residuals(
            residual(4096, kind="argument", source="params['layers']['qkv']"),
            residual(
                2**34, source=LONG, primitive="dot_general", iterations=24, type="bf16[24,128,4096,4096]"
            ),
            residual(64, source=LONG, name="attention_output"),
            residual(8, kind="constant"),
            notes=("the checkpoint of f frees nothing.",),
        )
    ),
    "frontier": frontier_report(frontier(40, peaks=(0, 20, 39))),
    "policies": policies_report(POLICIES),
    "training": training_report(TRAINING),
    "model": model_report(MODEL),
}


@pytest.mark.parametrize("name", REPORTS)
def test_fits_eighty_columns(name: str):
    """Nothing is cut off: rich marks that with an ellipsis."""
    text = to_text(REPORTS[name])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize("name", REPORTS)
def test_numbers_are_never_broken(name: str):
    text = to_text(REPORTS[name])
    tables = [b for s in REPORTS[name].sections for b in s.blocks if isinstance(b, Table)]
    for t in tables:
        cells = [cell for row in t.rows for cell, column in zip(row, t.columns, strict=True) if column.number]
        assert [cell for cell in cells if "\n" not in cell and cell not in text] == []


@pytest.mark.parametrize("name", REPORTS)
def test_is_json(name: str):
    data = REPORTS[name].data
    assert json.loads(to_json(data)) == data


def test_plan_text():
    assert plan_text(PLAN) == PLAN_TEXT


def test_plan_with_aliases_and_without_options():
    text = plan_text({**PLAN, "alias_bytes": 2**20, "compiler_options": {}, "notes": []})
    assert "    shared           -1.00 MiB" in text
    assert "Compiler options   none" in text
    assert "They hold under" not in text
    assert "Note" not in text


def facts(report: Report) -> dict[str, Fact]:
    blocks = [b for s in report.sections for b in s.blocks if isinstance(b, Facts)]
    return {fact.label.strip(): fact for block in blocks for fact in block.facts}


def table(report: Report, section: int = 0) -> Table:
    return next(b for b in report.sections[section].blocks if isinstance(b, Table))


def test_residuals_come_by_size_with_their_totals():
    report = REPORTS["residuals"]
    assert [row[0] for row in table(report).rows] == ["16.00 GiB", "4.00 KiB", "64 bytes", "8 bytes"]
    assert [row[3] for row in table(report).rows] == [
        "dot_general at a_model_with_a_long_name.py:1234:56, x24",
        "argument params['layers']['qkv']",
        "'attention_output' at a_model_with_a_long_name.py:1234:56",
        "constant",
    ]
    assert facts(report)["arguments"].value == "4.01 KiB (4,104 bytes)"
    assert Note("the checkpoint of f frees nothing.") in report.sections[0].blocks


def test_residuals_beyond_the_top_are_counted():
    data = residuals(*(residual(4 * n) for n in range(1, 31)))
    assert len(table(residuals_report(data)).rows) == 20
    assert "and 10 smaller ones, 220 bytes: --all shows them." in to_text(residuals_report(data))
    assert len(table(residuals_report(data, top=None)).rows) == 30
    assert "--all" not in to_text(residuals_report(data, top=None))


def test_no_residuals():
    text = to_text(residuals_report(residuals()))
    assert "Kept for backward  0 bytes, 0 arrays" in text


def test_frontier_shows_ends_and_compiled_points():
    rows = table(frontier_report(frontier(40, peaks=(0, 20, 39)))).rows
    assert len(rows) == 14
    assert rows[0][0] == "40.00 MiB"
    assert rows[-1][0] == "1.00 MiB"
    assert [row[3] for row in rows if row[3] != "-"] == ["82.00 MiB", "42.00 MiB", "4.00 MiB"]
    assert [row[4] for row in rows if row[4] != "-"] == ["97.6%", "50.0%", "4.8%"]


def test_frontier_shows_all_on_demand():
    report = frontier_report(frontier(40), rows=None)
    assert len(table(report).rows) == 40
    assert len(table(report).columns) == 3, "without peaks there are no columns for them"


@pytest.mark.parametrize("count", [0, 1])
def test_frontier_of_nothing(count: int):
    text = to_text(frontier_report({**frontier(count), "forward_flops": 0}))
    assert "There is nothing to trade" in text
    assert len(text.splitlines()) == 3


def test_plot():
    x = Axis(title="recomputed", low=0, high=10, low_text="0", high_text="10 FLOP")
    y = Axis(title="kept", low=0, high=2**20, low_text="0", high_text="1 MiB")
    lines = plot_lines(Plot(x=x, y=y, points=((0, 2**20, "*"), (10, 0, "."), (10, 0, "*"))))
    assert lines[0] == "kept"
    assert lines[1] == "1 MiB |*"
    assert lines[12] == "    0 |" + " " * 55 + "*"
    assert lines[-1].split() == ["0", "recomputed", "10", "FLOP"]
    assert max(map(len, lines)) <= 78


def test_training_names_ratio_and_differences():
    text = to_text(REPORTS["training"])
    assert "Three ways to train" in text
    assert [line.split()[-1] for line in text.splitlines() if "as a ratio" in line] == ["0.93"]
    assert "gradients, relative" in text
    assert "3.1e-07" in text
    assert "A ratio below 1" in text
    assert "The demo took 2 min 05 s." in text


def test_training_shows_some_steps_of_the_curves():
    rows = table(REPORTS["training"]).rows
    assert [row[0] for row in rows] == ["1", "4", "6", "9", "12", "15", "17", "20"]
    assert rows[-1][1:] == ("3.60000", "3.60000", "3.60000", "0")


def test_training_in_one_step_two_ways():
    ways = [way("no remat", "everything", losses=[5.0]), way("autoremat", "by the plan", losses=[5.5])]
    text = to_text(training_report({**TRAINING, "steps": 1, "ways": ways, "notes": ["None fits."]}))
    assert "Two ways to train" in text
    assert "1 step on" in text
    assert "5.0e-01" in text
    assert "Note: None fits." in text


def test_long_policy_names_break_behind_underscores():
    row = table(REPORTS["training"], 1).rows[0]
    assert row[2] == "dots_with_no_\nbatch_dims_\nsaveable"


def test_policies_say_which_is_best():
    text = to_text(REPORTS["policies"])
    assert "dots_with_no_batch_dims_saveable" in text
    assert "The fewest FLOPs within 150.0 MiB" in " ".join(text.split())
    assert "None fits" in to_text(policies_report({**POLICIES, "best": None}))


def test_names_are_no_markup():
    """Rich would read `[bold]` in a string as a style, and `:sparkles:` as a picture."""
    name = "f[bold]x[/bold][red] :sparkles: \\[a]"
    data = {**PLAN, "function": name, "notes": [name], "grouping": name}
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system=None, markup=False, emoji=False)
    show(plan_report(data), console)
    for text in (plan_text(data), file.getvalue()):
        assert text.count(name) == 3


def test_terminal_is_not_wider_than_readable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert terminal(io.StringIO()).width == 100


def test_a_log_gets_plain_text():
    file = io.StringIO()
    show(REPORTS["plan"], terminal(file))
    assert file.getvalue() == PLAN_TEXT + "\n\n"


def test_json_has_no_nan():
    data = {"a": [float("nan"), 1.5], "b": (float("inf"),), "c": "ü"}
    assert json.loads(to_json(data)) == {"a": [None, 1.5], "b": [None], "c": "ü"}
