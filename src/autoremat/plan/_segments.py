"""Where stages may begin and end: the narrow places of a program.

A stage is a run of equations; what it reads of earlier stages is kept, what happens inside is the planner's choice. Good
borders are places that little crosses: the residual stream between two layers. They are found, not annotated:

1. *units* lie between articulation values, positions in program order that exactly one activation crosses. Between two
   products (convolutions, matrix products) one border is enough: where the fewest bytes cross, and the first such place,
   so that what is cheap to compute from the value there (an activation function and its mask) belongs to the reader. A
   stretch without articulation values (skip connections of a U-Net) is cut where the fewest bytes cross;
2. *groupings* of units are the candidates for stages: each unit by itself, one period of a repeated structure (a layer), two
   of them, the grouping with the lowest estimated peak, and even shares of all activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat._compat import DropVar, Jaxpr, JaxprEqn, Var, new_jaxpr
from autoremat.cost import is_fusible
from autoremat.graph import fingerprint
from autoremat.graph._trace import aval_size, trace_graph
from autoremat.transform._jaxpr import free_vars, is_var, subjaxprs


MAX_UNITS = 128
"""Units among which the grouping with the lowest peak is sought; more are joined to even shares first."""

_DEAR = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "scan", "while", "pallas_call"})


@dataclass(frozen=True)
class Span:
    """Equations `start` to `stop` (exclusive). `loop` marks a single `scan` that is planned from inside."""

    start: int
    stop: int
    loop: bool = False


def nbytes(var: Var) -> int:
    """Bytes of a variable on one device."""
    return aval_size(var.aval)[2]


def dependents(jaxpr: Jaxpr, sources: set[Var]) -> set[Var]:
    """The variables that depend on `sources`."""
    found = set(sources)
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def is_loop(eqn: JaxprEqn, active: set[Var]) -> bool:
    """Whether an equation is a `scan` through which derivatives flow."""
    return eqn.primitive.name == "scan" and eqn.params["length"] > 1 and any(v in active for v in eqn.outvars)


def crossings(jaxpr: Jaxpr, active: set[Var]) -> tuple[list[int], list[int]]:
    """For each position, how many activations cross it, and their bytes. Position k is before equation k."""
    n = len(jaxpr.eqns)
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if not isinstance(v, DropVar)}
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if is_var(v) and v in made and v in active:
                last[v] = i
    counts, sizes = [0] * (n + 2), [0] * (n + 2)
    for v, end in last.items():
        counts[made[v] + 1] += 1
        counts[end + 1] -= 1
        sizes[made[v] + 1] += nbytes(v)
        sizes[end + 1] -= nbytes(v)
    for k in range(1, n + 1):
        counts[k] += counts[k - 1]
        sizes[k] += sizes[k - 1]
    return counts[: n + 1], sizes[: n + 1]


def _is_heavy(eqn: JaxprEqn) -> bool:
    return not is_fusible(eqn.primitive.name) and eqn.primitive.name != "name"


def _is_product(eqn: JaxprEqn) -> bool:
    """Whether running an equation again is dear: a product, a loop or a kernel, itself or inside it."""
    return eqn.primitive.name in _DEAR or any(_is_product(e) for inner in subjaxprs(eqn) for e in inner.eqns)


def _work_of(jaxpr: Jaxpr) -> Callable[[JaxprEqn], bool]:
    """What counts as work in this program: products; where there is none, all that is not fused."""
    return _is_product if any(map(_is_product, jaxpr.eqns)) else _is_heavy


def _produced(eqns: Sequence[JaxprEqn]) -> int:
    return sum(nbytes(v) for e in eqns for v in e.outvars if not isinstance(v, DropVar))


def units(jaxpr: Jaxpr, active: set[Var]) -> list[Span]:
    """The finest stages that make sense, in program order. See the module's docstring."""
    counts, sizes = crossings(jaxpr, active)
    total = max(1, _produced(jaxpr.eqns))
    is_work = _work_of(jaxpr)
    spans: list[Span] = []
    start = 0
    for i, eqn in enumerate(jaxpr.eqns):
        if is_loop(eqn, active):
            spans += _stretch(jaxpr, start, i, counts, sizes, total, is_work)
            spans.append(Span(i, i + 1, loop=True))
            start = i + 1
    return spans + _stretch(jaxpr, start, len(jaxpr.eqns), counts, sizes, total, is_work)


def _stretch(
    jaxpr: Jaxpr,
    start: int,
    stop: int,
    counts: list[int],
    sizes: list[int],
    total: int,
    is_work: Callable[[JaxprEqn], bool],
) -> list[Span]:
    if start == stop:
        return []
    cuts = _one_between_works(jaxpr, [k for k in range(start + 1, stop) if counts[k] == 1], sizes, is_work)
    borders = [start, *cuts, stop]
    refined: list[int] = []
    for a, b in zip(borders, borders[1:], strict=False):
        refined += [a, *_cut_wide(jaxpr, a, b, sizes, total)]
    refined.append(stop)
    return _merge_light(jaxpr, [Span(a, b) for a, b in zip(refined, refined[1:], strict=False)], is_work)


def _one_between_works(
    jaxpr: Jaxpr, cuts: list[int], sizes: list[int], is_work: Callable[[JaxprEqn], bool]
) -> list[int]:
    """Of the cuts between two works, the one that the fewest bytes cross; of equals the first."""
    done, works = [0], 0
    for eqn in jaxpr.eqns:
        works += is_work(eqn)
        done.append(works)
    best: dict[int, int] = {}
    for k in cuts:
        if done[k] not in best or sizes[k] < sizes[best[done[k]]]:
            best[done[k]] = k
    return sorted(best.values())


def _cut_wide(jaxpr: Jaxpr, start: int, stop: int, sizes: list[int], total: int) -> list[int]:
    """Borders inside a stretch without articulation values, if it holds much of all activations."""
    produced = _produced(jaxpr.eqns[start:stop])
    if produced < total / 8 or stop - start < 8:
        return []
    quarter = (stop - start) // 4
    middle = range(start + quarter, stop - quarter)
    best = min(middle, key=lambda k: (sizes[k], abs(k - (start + stop) // 2)))
    if sizes[best] > produced / 4:
        return []
    return [
        *_cut_wide(jaxpr, start, best, sizes, total),
        best,
        *_cut_wide(jaxpr, best, stop, sizes, total),
    ]


def _merge_light(jaxpr: Jaxpr, spans: list[Span], is_work: Callable[[JaxprEqn], bool]) -> list[Span]:
    """Join units without work to the one before; what comes before all work joins the first."""
    merged: list[Span] = []
    for span in spans:
        if merged and not (_has(jaxpr, span, is_work) and _has(jaxpr, merged[-1], is_work)):
            merged[-1] = Span(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged


def _has(jaxpr: Jaxpr, span: Span, is_work: Callable[[JaxprEqn], bool]) -> bool:
    return any(is_work(e) for e in jaxpr.eqns[span.start : span.stop])


def subjaxpr(jaxpr: Jaxpr, span: Span, later: set[Any]) -> Jaxpr:
    """The equations of a span as a jaxpr. Its outputs are what `later` (reads of the rest, and outputs) contains."""
    eqns = jaxpr.eqns[span.start : span.stop]
    outs = [v for e in eqns for v in e.outvars if v in later]
    return new_jaxpr(free_vars(eqns), outs, eqns, jaxpr)


def signature(jaxpr: Jaxpr) -> str:
    """A name for the structure of a sub-program."""
    graph, _ = trace_graph(jaxpr, source_of=lambda eqn: "")
    return fingerprint(graph)


def groupings(jaxpr: Jaxpr, active: set[Var]) -> list[tuple[str, list[Span]]]:
    """Candidate partitions into stages, the most promising first, each with a name for reports."""
    spans = units(jaxpr, active)
    found: list[tuple[str, list[Span]]] = []
    repetition = find_repetition(jaxpr, crossings(jaxpr, active)[1])
    if repetition is not None and not any(s.loop for s in spans):
        for layers in (1, 2, 4):
            if layers == 1 or repetition.repeats >= 2 * layers:
                name = "one stage a layer" if layers == 1 else f"one stage per {layers} layers"
                found.append((name, _by_repetition(spans, repetition, layers)))
    lowest = ("lowest estimated peak", _lowest_peak(jaxpr, spans, crossings(jaxpr, active)[1], _work_of(jaxpr)))
    found += [("one stage a unit", spans), lowest] if repetition is not None else [lowest, ("one stage a unit", spans)]
    for shares in (8, 4):
        found.append((f"{shares} even stages", _even(jaxpr, spans, shares)))
    unique: list[tuple[str, list[Span]]] = []
    for name, partition in found:
        if partition not in [p for _, p in unique]:
            unique.append((name, partition))
    return unique


@dataclass(frozen=True)
class Repetition:
    """Equations `start` to `start + length * repeats` are `repeats` times the same `length` equations."""

    start: int
    length: int
    repeats: int


def find_repetition(jaxpr: Jaxpr, sizes: Sequence[int]) -> Repetition | None:
    """The repetition that covers most of the program, if it covers half of it.

    Two equations are alike if primitive and result shapes are. The period is looked for between heavy equations; where in
    the period a layer begins is chosen by what crosses there.
    """
    marks = [(e.primitive.name, *(getattr(v.aval, "shape", ()) for v in e.outvars)) for e in jaxpr.eqns]
    best: tuple[int, int, int] | None = None
    for length in _candidate_periods(jaxpr, marks):
        for start, stop in _runs(marks, length):
            covered = (stop - start) // length * length
            if best is None or covered > best[1] * best[2]:
                best = (start, length, covered // length)
    if best is None or best[1] * best[2] < len(marks) / 2:
        return None
    start, length, repeats = best
    slack = _run_end(marks, start, length) - start - length * repeats
    offset = min(range(slack + 1), key=lambda o: (sum(sizes[start + o + length * k] for k in range(1, repeats)), o))
    return Repetition(start + offset, length, repeats)


def _candidate_periods(jaxpr: Jaxpr, marks: Sequence[Any]) -> list[int]:
    """Distances between equal heavy equations that occur often; shorter ones first."""
    where: dict[Any, int] = {}
    count: dict[int, int] = {}
    for i, (eqn, mark) in enumerate(zip(jaxpr.eqns, marks, strict=True)):
        if not _is_heavy(eqn):
            continue
        if mark in where:
            distance = i - where[mark]
            count[distance] = count.get(distance, 0) + 1
        where[mark] = i
    # A mark that occurs twice a layer hides its period: sums of neighbouring distances may be periods too.
    common = sorted(count, key=lambda d: (-count[d], d))[:8]
    sums = {a + b for a in common for b in common}
    return sorted({d for d in {*common, *sums} if 4 <= d <= len(marks) // 2})


def _runs(marks: Sequence[Any], length: int) -> list[tuple[int, int]]:
    """Maximal runs that repeat with this period, at least twice."""
    found: list[tuple[int, int]] = []
    first = None
    for i in range(length, len(marks) + 1):
        alike = i < len(marks) and marks[i] == marks[i - length]
        if alike and first is None:
            first = i - length
        elif not alike and first is not None:
            if i - first >= 2 * length:
                found.append((first, i))
            first = None
    return found


def _run_end(marks: Sequence[Any], start: int, length: int) -> int:
    end = start + length
    while end < len(marks) and marks[end] == marks[end - length]:
        end += 1
    return end


def _by_repetition(spans: Sequence[Span], found: Repetition, layers: int) -> list[Span]:
    """Stages of `layers` repetitions each; units before and after stay, cut where they overlap."""
    end = found.start + found.length * found.repeats
    step = found.length * layers
    before = [Span(s.start, min(s.stop, found.start)) for s in spans if s.start < found.start]
    after = [Span(max(s.start, end), s.stop) for s in spans if s.stop > end]
    inside = [Span(a, min(a + step, end)) for a in range(found.start, end, step)]
    return [*before, *inside, *after]


def _join(spans: Sequence[Span]) -> list[Span]:
    if any(s.loop for s in spans) or not spans:
        return list(spans)
    return [Span(spans[0].start, spans[-1].stop)]


def _lowest_peak(
    jaxpr: Jaxpr, spans: Sequence[Span], sizes: Sequence[int], is_work: Callable[[JaxprEqn], bool]
) -> list[Span]:
    """The grouping of units whose estimated peak is lowest if every stage keeps its border and nothing else.

    While a stage runs backward, the borders before it and its own working set are alive; later borders are gone.
    """
    if any(s.loop for s in spans):
        return list(spans)
    units = _even(jaxpr, spans, MAX_UNITS) if len(spans) > MAX_UNITS else list(spans)
    works = [_materialized(jaxpr, s, is_work) for s in units]
    borders = [0, *(sizes[s.start] for s in units[1:])]
    low, high = 0, sum(borders) + sum(map(_working_set, works)) + 1
    best = units
    while high - low > high // 256:
        middle = (low + high) // 2
        groups = _groups_below(middle, works, borders)
        if groups is None:
            low = middle
        else:
            high = middle
            best = [Span(units[a].start, units[b - 1].stop) for a, b in groups]
    return best


def _materialized(jaxpr: Jaxpr, span: Span, is_work: Callable[[JaxprEqn], bool]) -> list[int]:
    """Bytes of each result of work: what a backward pass reads, or can compute by fused work from what it reads."""
    eqns = jaxpr.eqns[span.start : span.stop]
    return [_produced([e]) for e in eqns if is_work(e)] or [0]


def _working_set(work: Sequence[int]) -> int:
    """An estimate of the bytes that the backward pass of a stage needs: each result of work and what is computed from it
    once, and at the widest place three values more (the cotangents on both sides, and a copy in another layout)."""
    return 2 * sum(work) + 3 * max(work)


def _groups_below(limit: int, works: Sequence[list[int]], borders: Sequence[int]) -> list[tuple[int, int]] | None:
    """A grouping `(first, stop)` with an estimated peak of at most `limit` that keeps the fewest bytes, or `None`."""
    n = len(works)
    kept: list[int | None] = [0, *([None] * n)]
    origin = [0] * (n + 1)
    for i in range(n):
        before = kept[i]
        if before is None:
            continue
        group: list[int] = []
        for j in range(i + 1, n + 1):
            group += works[j - 1]
            if before + _working_set(group) > limit:
                break
            after = before + (borders[j] if j < n else 0)
            known = kept[j]
            if known is None or after < known:
                kept[j], origin[j] = after, i
    if kept[n] is None:
        return None
    groups: list[tuple[int, int]] = []
    stop = n
    while stop:
        groups.append((origin[stop], stop))
        stop = origin[stop]
    return groups[::-1]


def _even(jaxpr: Jaxpr, spans: Sequence[Span], shares: int) -> list[Span]:
    total = sum(_produced(jaxpr.eqns[s.start : s.stop]) for s in spans)
    result: list[Span] = []
    group: list[Span] = []
    size = 0
    for span in spans:
        if span.loop:
            result += [*_join(group), span]
            group, size = [], 0
            continue
        produced = _produced(jaxpr.eqns[span.start : span.stop])
        if group and size + produced > total / shares:
            result += _join(group)
            group, size = [], 0
        group.append(span)
        size += produced
    return result + _join(group)

