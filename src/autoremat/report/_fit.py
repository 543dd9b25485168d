"""The view of a training step that was fitted into a device: what fills the memory, and what is recomputed."""

from __future__ import annotations

from autoremat.report._build import price_facts
from autoremat.report._format import exact_size_text, share_text, size_text
from autoremat.report._view import Block, Column, Data, Fact, Facts, Note, Paragraph, Report, Section, Table


def fit_report(data: Data) -> Report:
    """The account of a step before and after, and its plan.

    `data`: `memory_bytes`, `reserve_bytes`, `account` (bytes by name), `unplanned_account` or `None`, `plan` as `plan_report` takes it,
    `notes`.
    """
    plan = data["plan"]
    total = sum(data["account"].values())
    blocks: list[Block] = [
        Facts(
            (
                Fact(label="Memory", value=exact_size_text(data["memory_bytes"]), remark="of one device"),
                Fact(label="  in reserve", value=size_text(data["reserve_bytes"])),
                Fact(
                    label="Peak of the step",
                    value=exact_size_text(plan["peak_bytes"]),
                    remark=f"{share_text(plan['peak_bytes'], plan['budget_bytes'])} of the rest",
                ),
            )
        ),
        _account_table(data, total),
        Facts(tuple(price_facts(plan))),
        Paragraph(
            "The peak is that of the whole step, compiled for this target. Activations are what the plan keeps; temporaries are all that the "
            "compiler allots besides."
        ),
    ]
    blocks += [Note(text) for text in data["notes"]]
    title = f"Step with the gradient of {plan['function']} on {plan['target']}"
    return Report(sections=(Section(title=title, blocks=tuple(blocks)),), data=data)


def _account_table(data: Data, total: int) -> Table:
    before = data["unplanned_account"]
    columns = (
        Column(title="What fills the memory", number=False),
        Column(title="Unplanned"),
        Column(title="Planned"),
        Column(title="Share"),
    )
    rows = [
        (name, size_text(before[name]) if before else "-", size_text(size), share_text(size, total))
        for name, size in data["account"].items()
    ]
    whole = size_text(sum(before.values())) if before else "does not compile"
    rows.append(("total", whole, size_text(total), share_text(total, total)))
    return Table(columns=columns, rows=tuple(rows), strong=frozenset({len(rows) - 1}))
