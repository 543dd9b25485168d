"""The view of a cost table."""

from __future__ import annotations

from autoremat.report._view import Block, Column, Data, Fact, Facts, Note, Report, Section, Table

ROWS = 12
"""Operations that are shown, the slowest first."""


def calibration_report(data: Data, rows: int | None = ROWS) -> Report:
    """What operations take, and the rates of the device.

    `data`: `target`, `seconds` by operation, `memory_bandwidth`, `vector_flops_per_s`, `matrix_flops_per_s` by dtype, `skipped` by
    operation.
    """
    products = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s ({dtype})" for dtype, rate in data["matrix_flops_per_s"].items()
    )
    slowest = sorted(data["seconds"].items(), key=lambda item: -item[1])
    shown = slowest[:rows]
    blocks: list[Block] = [
        Facts(
            (
                Fact(
                    label="Memory bandwidth",
                    value=f"{data['memory_bandwidth'] / 1e9:,.1f} GB/s",
                    remark="of a copy",
                ),
                Fact(
                    label="Arithmetic",
                    value=f"{data['vector_flops_per_s'] / 1e9:,.0f} GFLOP/s",
                    remark="fused, float32",
                ),
                Fact(label="Products", value=products, remark=""),
            )
        ),
        Table(
            columns=(Column(title="Operation", number=False), Column(title="µs")),
            rows=tuple((key, f"{seconds * 1e6:,.1f}") for key, seconds in shown),
            strong=frozenset(),
        ),
    ]
    if len(slowest) > len(shown):
        blocks.append(
            Note(
                f"{len(slowest) - len(shown)} faster operations are in the table as well; --json prints all."
            )
        )
    blocks += [Note(f"Not timed: {key}: {reason}") for key, reason in data["skipped"].items()]
    title = f"{len(slowest)} operations on {data['target']}"
    return Report(sections=(Section(title=title, blocks=tuple(blocks)),), data=data)
