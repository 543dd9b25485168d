"""The views of `autoremat demo`: the model, the policies of JAX, the training three ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoremat.report._format import (
    count_text,
    difference_text,
    exact_size_text,
    flops_text,
    seconds_text,
    share_text,
    size_text,
)
from autoremat.report._view import (
    Block,
    Column,
    Data,
    Fact,
    Facts,
    Note,
    Paragraph,
    Report,
    Section,
    Table,
)


def model_report(data: Data) -> Report:
    """`data`: `parameters`, `layers`, `width`, `heads`, `batch`, `sequence`, `text_bytes`, `jax`, `backend`, `steps`."""
    shape = f"{data['layers']} layers, width {data['width']}, {data['heads']} heads"
    facts = (
        Fact(label="Model", value=f"{data['parameters']:,} parameters", remark=shape),
        Fact(label="Batch", value=f"{data['batch']} pieces of {data['sequence']} bytes"),
        Fact(
            label="Text", value="pydoc_data.topics", remark=f"{data['text_bytes']:,} bytes, ships with Python"
        ),
        Fact(label="Training", value=count_text(data["steps"], "step"), remark="Optax adamw, three ways"),
        Fact(label="JAX", value=data["jax"], remark=f"on {data['backend']}"),
    )
    title = "A byte-level GPT, its layers under jax.lax.scan"
    return Report(sections=(Section(title=title, blocks=(Facts(facts),)),), data=data)


def policies_report(data: Data) -> Report:
    """`data`: `budget_bytes`, `unplanned_bytes`, `best` or `None`, and `policies` with `name`, `peak_bytes`, `flops`, `fits`."""
    policies = data["policies"]
    columns = (
        Column(title="jax.checkpoint policy", number=False),
        Column(title="Peak"),
        Column(title="Share"),
        Column(title="FLOPs a step"),
        Column(title="Fits", number=False),
    )
    rows = tuple(
        (
            p["name"],
            size_text(p["peak_bytes"]),
            share_text(p["peak_bytes"], data["unplanned_bytes"]),
            flops_text(p["flops"]),
            "yes" if p["fits"] else "no",
        )
        for p in policies
    )
    strong = frozenset(i for i, p in enumerate(policies) if p["name"] == data["best"])
    if data["best"]:
        ending = f"The fewest FLOPs within {exact_size_text(data['budget_bytes'])}: {data['best']}."
    else:
        ending = f"None fits {exact_size_text(data['budget_bytes'])}."
    reading = Paragraph(
        "Every entry of jax.checkpoint_policies that needs no names and no offloading, on each layer. "
        + ending
    )
    blocks = (Table(columns=columns, rows=rows, strong=strong), reading)
    return Report(sections=(Section(title="What JAX's own policies reach", blocks=blocks),), data=data)


def training_report(data: Data) -> Report:
    """The comparison.

    `data`: `unplanned_bytes`, `budget_bytes`, `steps`, `seconds` of the whole demo, and `ways`, the first without recomputation,
    with `name`, `policy`, `peak_bytes`, `temp_bytes`, `flops`, `step_seconds` (median), `step_ratio`, `losses`,
    `loss_difference`, `gradient_difference` each.
    """
    ways = data["ways"]
    return Report(
        sections=(
            Section(title="Loss curves", blocks=(_curves(ways),)),
            Section(
                title="Three ways to train" if len(ways) == 3 else "Two ways to train",
                blocks=_comparison(data),
            ),
        ),
        data=data,
    )


CURVE_ROWS = 8


def _curves(ways: Sequence[Data]) -> Table:
    """Some steps, evenly spread, first and last included."""
    steps = len(ways[0]["losses"])
    chosen = sorted({round(i * (steps - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
    titles = ["Step", *(way["name"] for way in ways), "Largest difference"]
    rows: list[tuple[str, ...]] = []
    for i in chosen:
        losses = [way["losses"][i] for way in ways]
        spread = max(losses) - min(losses)
        rows.append((f"{i + 1}", *(f"{loss:.5f}" for loss in losses), difference_text(spread)))
    return Table(columns=tuple(Column(title=t) for t in titles), rows=tuple(rows))


def _broken(name: str, width: int = 16) -> str:
    """A long name in several lines, broken behind underscores."""
    lines = [""]
    for part in name.replace("_", "_\n").splitlines():
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _comparison(data: Data) -> tuple[Block, ...]:
    ways = data["ways"]
    unplanned = data["unplanned_bytes"]

    def row(label: str, text: Callable[[Data], str]) -> tuple[str, ...]:
        return (label, *(text(way) for way in ways))

    rows = (
        row("What is kept", lambda w: _broken(w["policy"])),
        row("Compiled peak", lambda w: size_text(w["peak_bytes"])),
        row("  of unplanned", lambda w: share_text(w["peak_bytes"], unplanned)),
        row("  temporaries", lambda w: size_text(w["temp_bytes"])),
        row("FLOPs a step", lambda w: flops_text(w["flops"])),
        row("Step time, median", lambda w: seconds_text(w["step_seconds"])),
        row("  as a ratio", lambda w: f"{w['step_ratio']:.2f}"),
        row("Last loss", lambda w: f"{w['losses'][-1]:.5f}"),
        row("Largest difference of", lambda w: ""),
        row("  losses", lambda w: difference_text(w["loss_difference"])),
        row("  gradients, relative", lambda w: difference_text(w["gradient_difference"])),
    )
    columns = (Column(title="", number=False), *(Column(title=way["name"]) for way in ways))
    reading = (
        f"{count_text(data['steps'], 'step')} on the same batches, the ways in turn at each, under the same "
        "compiler options. A peak is that of the compiled program that ran. "
        "Gradients are compared before and after the training: per parameter array, largest difference over "
        "largest entry; the table has the worst."
    )
    if min(way["step_ratio"] for way in ways) < 1:
        reading += " A ratio below 1: reading less memory saves more time than computing again costs."
    blocks: list[Block] = [Table(columns=columns, rows=rows), Paragraph(reading)]
    blocks += [Note(text) for text in data["notes"]]
    blocks.append(Paragraph(f"The demo took {seconds_text(data['seconds'])}."))
    return tuple(blocks)
