"""The view of the targets."""

from __future__ import annotations

from autoremat.report._format import size_text
from autoremat.report._view import Column, Data, Paragraph, Report, Section, Table


def targets_report(data: Data) -> Report:
    """What a plan can be made for, and what is missing.

    `data`: `targets`, each with `name`, `attached`, `memory_bytes`, `memory_bandwidth`, `bfloat16_flops_per_s`, `compiler`, `install`,
    `problem`.
    """
    columns = (
        Column(title="Target", number=False),
        Column(title="Memory"),
        Column(title="GB/s"),
        Column(title="bf16 TFLOP/s"),
        Column(title="Compiler", number=False),
    )
    rows = tuple(
        (
            t["name"],
            size_text(t["memory_bytes"]),
            f"{t['memory_bandwidth'] / 1e9:,.0f}",
            f"{t['bfloat16_flops_per_s'] / 1e12:,.1f}",
            _compiler(t),
        )
        for t in data["targets"]
    )
    here = frozenset(i for i, t in enumerate(data["targets"]) if t["attached"])
    text = (
        "Several devices: a shape behind the name, such as tpu:v5p:2x2x1 or gpu:h100:8. What is not here needs its compiler, which needs no "
        "device. Rates are peaks from the makers' publications; --json gives the sources. Those of the CPU are a convention."
    )
    blocks = (Table(columns=columns, rows=rows, strong=here), Paragraph(text))
    return Report(sections=(Section(title="Targets", blocks=blocks),), data=data)


def _compiler(target: Data) -> str:
    if target["attached"]:
        return f"{target['compiler']}, this machine"
    return target["compiler"] or target["install"] or target["problem"]
