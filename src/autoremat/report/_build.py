"""From plain data to views: residuals, frontier, plan. Pure functions; the keys of the data stand in each docstring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoremat.report._format import (
    count_text,
    exact_size_text,
    flops_text,
    seconds_text,
    share_text,
    size_text,
)
from autoremat.report._view import (
    Axis,
    Block,
    Column,
    Data,
    Fact,
    Facts,
    Note,
    Paragraph,
    Plot,
    Report,
    Section,
    Table,
)

# ------------------------------------------------------------------------------------------------------------ residuals


def residuals_report(data: Data, *, top: int | None = 20) -> Report:
    """The largest `top` residuals of a function (`None`: all), their total, remarks.

    `data`: `function`, `total_bytes`, `argument_bytes`, `intermediate_bytes`, `notes`, and `residuals` with `type`,
    `nbytes`, `kind`, `name`, `source`, `primitive`, `iterations` each.
    """
    found = data["residuals"]
    largest = sorted(found, key=lambda r: -r["nbytes"])[:top]
    rest = len(found) - len(largest)
    blocks: list[Block] = [Facts(tuple(_residual_totals(data)))]
    if largest:
        blocks.append(_residual_table(largest, data["total_bytes"]))
    if rest:
        others = data["total_bytes"] - sum(r["nbytes"] for r in largest)
        blocks.append(
            Paragraph(f"and {count_text(rest, 'smaller one')}, {size_text(others)}: --all shows them.")
        )
    blocks.append(
        Paragraph(
            "Each row is an array that lives from the forward to the backward pass; x6 is one of a loop, all of "
            "its 6 iterations together. Arguments are alive anyway: only intermediates can be recomputed. "
            "Sizes are those of the traced program, before the compiler."
        )
    )
    blocks += [Note(text) for text in data["notes"]]
    return Report(
        sections=(Section(title=f"Residuals of {data['function']}", blocks=tuple(blocks)),), data=data
    )


def _residual_totals(data: Data) -> Iterator[Fact]:
    number = len(data["residuals"])
    yield Fact(
        label="Kept for backward",
        value=exact_size_text(data["total_bytes"]),
        remark=count_text(number, "array"),
    )
    yield Fact(label="  intermediates", value=exact_size_text(data["intermediate_bytes"]))
    yield Fact(label="  arguments", value=exact_size_text(data["argument_bytes"]))


def _residual_table(residuals: Sequence[Data], total: int) -> Table:
    columns = (
        Column(title="Size"),
        Column(title="Share"),
        Column(title="Array", number=False),
        Column(title="From", number=False),
    )
    rows = (
        (size_text(r["nbytes"]), share_text(r["nbytes"], total), r["type"], _origin(r)) for r in residuals
    )
    return Table(columns=columns, rows=tuple(rows))


def _origin(residual: Data) -> str:
    """What made a residual, in few words: `dot_general at model.py:31:8, x6`, without folders and function."""
    if residual["kind"] == "argument":
        return f"argument {residual['source']}"
    if residual["kind"] == "constant":
        return "constant"
    place = residual["source"].partition(" (")[0].replace("\\", "/").rpartition("/")[2]
    loop = f", x{residual['iterations']}" if residual["iterations"] > 1 else ""
    what = f"'{residual['name']}'" if residual["name"] else residual["primitive"]
    return f"{what} at {place}{loop}" if place else f"{what}{loop}"


# ------------------------------------------------------------------------------------------------------------- frontier

ROWS = 14
"""Points of a frontier in a table; --all or --json give every one."""


def frontier_report(data: Data, *, rows: int | None = ROWS) -> Report:
    """Kept bytes against recomputation as a plot, and `rows` of the points as a table (`None`: all).

    `data`: `function`, `unplanned_bytes` or `None`, `forward_flops`, `grouping`, `planning_seconds`, `ops`, and `points` by
    falling kept bytes with `kept_bytes`, `recompute_flops`, `peak_bytes` or `None`, `vertex` each.
    """
    title = f"Frontier of {data['function']}: memory against recomputation"
    points = data["points"]
    if not any(p["recompute_flops"] for p in points):
        note = Note(
            "There is nothing to trade: no value is kept for the backward pass that could be recomputed."
        )
        return Report(sections=(Section(title=title, blocks=(note,)),), data=data)
    shown = _thin(points, rows)
    blocks: list[Block] = [
        _frontier_plot(points, data["forward_flops"]),
        _frontier_table(shown, data),
        Paragraph(_frontier_reading(data, len(points) - len(shown))),
    ]
    return Report(sections=(Section(title=title, blocks=tuple(blocks)),), data=data)


def _thin(points: Sequence[Data], rows: int | None) -> list[Data]:
    """At most `rows` points: the ends, the compiled ones, then others evenly over kept bytes."""
    if rows is None or len(points) <= rows:
        return list(points)
    last = len(points) - 1
    chosen = {0, last, *(i for i, p in enumerate(points) if p["peak_bytes"] is not None)}
    top, bottom = points[0]["kept_bytes"], points[-1]["kept_bytes"]
    for k in range(1, rows):
        if len(chosen) >= rows:
            break
        wanted = top - (top - bottom) * k / rows
        chosen.add(min(range(len(points)), key=lambda i: (abs(points[i]["kept_bytes"] - wanted), i)))
    return [points[i] for i in sorted(chosen)]


def _frontier_plot(points: Sequence[Data], forward_flops: int) -> Plot:
    most = max(p["recompute_flops"] for p in points)
    low, high = min(p["kept_bytes"] for p in points), max(p["kept_bytes"] for p in points)
    marks = sorted(points, key=lambda p: bool(p["vertex"]))  # vertices over splices
    return Plot(
        x=Axis(
            title="recomputed FLOPs",
            low=0,
            high=most,
            low_text="0",
            high_text=f"{share_text(most, forward_flops)} of forward",
        ),
        y=Axis(title="kept bytes", low=low, high=high, low_text=size_text(low), high_text=size_text(high)),
        points=tuple((p["recompute_flops"], p["kept_bytes"], "*" if p["vertex"] else ".") for p in marks),
    )


def _frontier_table(points: Sequence[Data], data: Data) -> Table:
    compiled = any(p["peak_bytes"] is not None for p in points)
    columns = [Column(title="Kept (model)"), Column(title="Recomputed"), Column(title="of forward")]
    if compiled:
        columns += [Column(title="Peak (compiled)"), Column(title="of unplanned")]
    rows: list[tuple[str, ...]] = []
    for p in points:
        flops = p["recompute_flops"]
        row = [size_text(p["kept_bytes"]), flops_text(flops), share_text(flops, data["forward_flops"])]
        if compiled:
            peak, whole = p["peak_bytes"], data["unplanned_bytes"] or 0
            row += ["-", "-"] if peak is None else [size_text(peak), share_text(peak, whole)]
        rows.append(tuple(row))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _frontier_reading(data: Data, hidden: int) -> str:
    text = (
        f"{count_text(len(data['points']), 'plan')} of a joint graph of {data['ops']:,} equations "
        f"({data['grouping']}), found in {seconds_text(data['planning_seconds'])}. In the plot * is an exact "
        "optimum, . a splice of two. Kept bytes and FLOPs are the model's, per step"
    )
    if any(p["peak_bytes"] is not None for p in data["points"]):
        text += f"; peaks are the compiler's, {size_text(data['unplanned_bytes'])} without recomputation"
    return text + "." + (f" {count_text(hidden, 'more plan')} with --all." if hidden else "")


# ----------------------------------------------------------------------------------------------------------------- plan


def plan_report(data: Data) -> Report:
    """A plan: budget and peaks, what the peak is made of, the price, what to compile with, notes.

    `data`: the dict that `summarize` of a plan gives.
    """
    blocks: list[Block] = [Facts((*_memory_facts(data), *price_facts(data)))]
    reading = (
        "Peaks are read from the program compiled for this target, of jax.value_and_grad, arguments and outputs "
        "included."
    )
    if data["recompute_flops"]:
        reading += (
            " By the cost model no program within the budget recomputes for less than the lower bound, which counts "
            "operations that compilers do not fuse; the gap is the most that a better plan could save."
        )
    if data["compiler_options"]:
        reading += " Peaks hold under the compiler options above: pass them to jax.jit."
    blocks.append(Paragraph(reading))
    blocks += [Note(text) for text in data["notes"]]
    title = f"Plan for {data['function']} on {data['target']}"
    return Report(sections=(Section(title=title, blocks=tuple(blocks)),), data=data)


def _memory_facts(data: Data) -> Iterator[Fact]:
    unplanned, peak = data["unplanned_bytes"], data["peak_bytes"]
    yield Fact(label="Budget", value=exact_size_text(data["budget_bytes"]))
    if unplanned is None:
        yield Fact(label="Unplanned peak", value="does not compile")
        yield Fact(label="Planned peak", value=exact_size_text(peak))
    else:
        yield Fact(label="Unplanned peak", value=exact_size_text(unplanned))
        share = f"{share_text(peak, unplanned)} of unplanned"
        yield Fact(label="Planned peak", value=exact_size_text(peak), remark=share)
    for label, key in (
        ("arguments", "argument_bytes"),
        ("outputs", "output_bytes"),
        ("temporaries", "temp_bytes"),
    ):
        yield Fact(label=f"  {label}", value=size_text(data[key]))
    if data["alias_bytes"]:
        yield Fact(label="  shared", value=f"-{size_text(data['alias_bytes'])}")
    yield Fact(label="Kept for backward", value=size_text(data["kept_bytes"]), remark="by the model")


def _bound_fact(data: Data) -> Fact:
    spent, bound = seconds_text(data["recompute_seconds"]), seconds_text(data["bound_seconds"])
    gap = f"gap {share_text(data['gap'], 1)} of a step's time"
    return Fact(label="  lower bound", value=f"{bound} of {spent}", remark=gap)


def price_facts(data: Data) -> Iterator[Fact]:
    """What a plan costs, of the data of `plan_report`."""
    again, forward = data["recompute_flops"], data["forward_flops"]
    share = f"{share_text(again, forward)} of the forward pass's {flops_text(forward)}"
    yield Fact(label="Recomputed a step", value=flops_text(again), remark=share)
    if again:
        yield _bound_fact(data)
    yield Fact(label="Stages recomputed", value=f"{data['checkpoints']:,}", remark=data["grouping"])
    if nested := data.get("nested"):
        yield Fact(
            label="Nested checkpoints",
            value=f"{nested:,}",
            remark="of several stages, with checkpoints inside",
        )
    if snapshots := data.get("snapshots"):
        numbers = ", ".join(map(str, snapshots))
        yield Fact(label="Snapshots kept", value=numbers, remark="of the carry of a loop")
    compiles = f"{count_text(data['compiles'], 'compile')}, {seconds_text(data['compile_seconds'])}"
    yield Fact(label="Planning", value=seconds_text(data["planning_seconds"]), remark=f"and {compiles}")
    options = "\n".join(f"{k}={v}" for k, v in data["compiler_options"].items())
    yield Fact(label="Compiler options", value=options or "none")
