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

import itertools
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat._compat import DropVar, Jaxpr, JaxprEqn, Var, defined_at, new_jaxpr
from autoremat.cost import is_fusible
from autoremat.graph import fingerprint
from autoremat.graph._trace import trace_graph
from autoremat.sharding import Shards
from autoremat.transform._jaxpr import OWN_DERIVATIVES, all_eqns, free_vars, is_var, subjaxprs

_WINDOWS = frozenset({"reduce_window_max", "reduce_window_min", "reduce_window"})

MAX_PIECES = 128
"""Pieces among which the partition with the lowest peak is sought; more are joined to even shares first."""

_DEAR = frozenset(
    {
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "scan",
        "while",
        "pallas_call",
    }
)


@dataclass(frozen=True)
class Span:
    """Equations `start` to `stop` (exclusive). `loop` marks a single `scan` that is planned from inside."""

    start: int
    stop: int
    loop: bool = False


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


def crossings(
    jaxpr: Jaxpr, shards: Shards, active: set[Var], streams: Collection[Var] = ()
) -> tuple[list[int], list[int]]:
    """For each position, how many activations cross it, and their bytes. Position k is before equation k.

    `streams` are inputs that count as activations from their first to their last use: what a loop carries, or the batch that
    the first layers read.
    """
    n = len(jaxpr.eqns)
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if not isinstance(v, DropVar)}
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if is_var(v) and v in streams:
                made.setdefault(v, i)
                last[v] = i
            elif is_var(v) and v in made and v in active:
                last[v] = i
    counts, sizes = [0] * (n + 2), [0] * (n + 2)
    for v, end in last.items():
        counts[made[v] + 1] += 1
        counts[end + 1] -= 1
        sizes[made[v] + 1] += shards.nbytes(v)
        sizes[end + 1] -= shards.nbytes(v)
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


def _produced(eqns: Sequence[JaxprEqn], shards: Shards) -> int:
    return sum(shards.nbytes(v) for e in eqns for v in e.outvars if not isinstance(v, DropVar))


def batch_streams(jaxpr: Jaxpr, active: set[Var]) -> set[Var]:
    """Inputs without a tangent that only the first part of a program reads: the batch, not a mask that every layer reads."""
    uses: dict[Var, list[int]] = {v: [] for v in jaxpr.invars if v not in active}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if is_var(v) and v in uses:
                uses[v].append(i)
    return {v for v, at in uses.items() if at and at[-1] < len(jaxpr.eqns) / 3}


def units(jaxpr: Jaxpr, shards: Shards, active: set[Var], streams: Collection[Var] = ()) -> list[Span]:
    """The finest stages that make sense, in program order. See the module's docstring and `crossings`."""
    counts, sizes = crossings(jaxpr, shards, active, streams)
    total = max(1, _produced(jaxpr.eqns, shards))
    is_work = _work_of(jaxpr)
    spans: list[Span] = []
    start = 0
    for i, eqn in enumerate(jaxpr.eqns):
        if is_loop(eqn, active):
            spans += _stretch(jaxpr, shards, start, i, counts, sizes, total, is_work)
            spans.append(Span(i, i + 1, loop=True))
            start = i + 1
    return spans + _stretch(jaxpr, shards, start, len(jaxpr.eqns), counts, sizes, total, is_work)


def _stretch(
    jaxpr: Jaxpr,
    shards: Shards,
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
    for a, b in itertools.pairwise(borders):
        refined += [a, *_cut_wide(jaxpr, shards, a, b, sizes, total)]
    refined.append(stop)
    return _merge_light(jaxpr, [Span(a, b) for a, b in itertools.pairwise(refined)], is_work)


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


def _cut_wide(jaxpr: Jaxpr, shards: Shards, start: int, stop: int, sizes: list[int], total: int) -> list[int]:
    """Borders inside a stretch without articulation values, if it holds much of all activations."""
    produced = _produced(jaxpr.eqns[start:stop], shards)
    if produced < total / 8 or stop - start < 8:
        return []
    quarter = (stop - start) // 4
    middle = range(start + quarter, stop - quarter)
    best = min(middle, key=lambda k: (sizes[k], abs(k - (start + stop) // 2)))
    if sizes[best] > produced / 4:
        return []
    return [
        *_cut_wide(jaxpr, shards, start, best, sizes, total),
        best,
        *_cut_wide(jaxpr, shards, best, stop, sizes, total),
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


def subjaxpr(jaxpr: Jaxpr, span: Span, later: Container[Any]) -> Jaxpr:
    """The equations of a span as a jaxpr. Its outputs are what `later` (reads of the rest, and outputs) contains."""
    eqns = jaxpr.eqns[span.start : span.stop]
    outs = [v for e in eqns for v in e.outvars if v in later]
    return new_jaxpr(free_vars(eqns), outs, eqns, jaxpr)


def halves(
    jaxpr: Jaxpr, shards: Shards, active: set[Var], carried: Collection[Var], length: int
) -> list[Span]:
    """The body of a loop of so many iterations in two stages, cut where it helps most.

    What crosses the cut is kept for every iteration; what is gained is that only one stage works at a time.
    """
    sizes = crossings(jaxpr, shards, active, carried)[1]
    made = [_produced([eqn], shards) for eqn in jaxpr.eqns]
    whole = sum(made)
    best, least, before = 0, whole, 0
    for k in range(1, len(made)):
        before += made[k - 1]
        need = length * sizes[k] + max(before, whole - before)
        if need < least:
            best, least = k, need
    return [Span(0, best), Span(best, len(made))] if best else [Span(0, len(made))]


def signature(jaxpr: Jaxpr) -> str:
    """A name for the structure of a sub-program: of what it computes, and of the functions in it that have derivatives of their own."""
    graph, _ = trace_graph(jaxpr, source_of=lambda eqn: "")
    own = [e for e in all_eqns(jaxpr) if e.primitive.name in OWN_DERIVATIVES]
    return " ".join(
        [fingerprint(graph), *(defined_at(e.params[OWN_DERIVATIVES[e.primitive.name]]) for e in own)]
    )


def groupings(jaxpr: Jaxpr, shards: Shards, active: set[Var]) -> list[tuple[str, list[Span]]]:
    """Candidate partitions into stages, the most promising first, each with a name for reports."""
    spans = units(jaxpr, shards, active, batch_streams(jaxpr, active))
    found: list[tuple[str, list[Span]]] = []
    sizes = crossings(jaxpr, shards, active)[1]
    repetition = find_repetition(jaxpr, sizes)
    if repetition is not None and not any(s.loop for s in spans):
        for layers in (1, 2, 4):
            if layers == 1 or repetition.repeats >= 2 * layers:
                name = "one stage a layer" if layers == 1 else f"one stage per {layers} layers"
                found.append((name, _by_repetition(spans, repetition, layers)))
    found.append(("one stage a unit", spans))
    if not any(s.loop for s in spans):
        lowest = ("lowest estimated peak", _lowest_peak(jaxpr, shards, active))
        found.insert(len(found) if repetition is not None else 0, lowest)
    for shares in (8, 4):
        found.append((f"{shares} even stages", _even(jaxpr, shards, spans, shares)))
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
    offset = min(
        range(slack + 1), key=lambda o: (sum(sizes[start + o + length * k] for k in range(1, repeats)), o)
    )
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


def _lowest_peak(jaxpr: Jaxpr, shards: Shards, active: set[Var]) -> list[Span]:
    """The partition whose estimated peak is lowest if every stage keeps its border and nothing else.

    While a stage runs backward, the borders before it and its own working set are alive; later borders are gone.
    """
    counts, sizes = crossings(jaxpr, shards, active)
    pieces = _pieces(jaxpr, counts, sizes)
    if len(pieces) > MAX_PIECES:
        pieces = _even(jaxpr, shards, pieces, MAX_PIECES)
    estimate = _PeakEstimate.of(jaxpr, shards, active, sizes, pieces)
    low, high = 0, estimate.most() + 1
    best = estimate.groups_below(high) or [(0, len(pieces))]
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        groups = estimate.groups_below(middle)
        if groups is None:
            low = middle
        else:
            high, best = middle, groups
    return [Span(pieces[a].start, pieces[b - 1].stop) for a, b in best]


def _pieces(jaxpr: Jaxpr, counts: Sequence[int], sizes: Sequence[int]) -> list[Span]:
    """Runs of equations between articulation values, with work each. A window reduction begins a piece too: its derivative
    may need several times its operand."""
    is_work = _work_of(jaxpr)
    narrow = [k for k in range(1, len(jaxpr.eqns)) if counts[k] == 1]
    cuts = set(_one_between_works(jaxpr, narrow, list(sizes), is_work))
    cuts |= {k for k in narrow if jaxpr.eqns[k].primitive.name in _WINDOWS}
    borders = [0, *sorted(cuts), len(jaxpr.eqns)]
    return [Span(a, b) for a, b in itertools.pairwise(borders)]


@dataclass(frozen=True)
class _PeakEstimate:
    """Bytes of pieces of a program: `widest` of the arrays that a piece works on, all results of `works`, what the
    derivative of a window reduction needs besides (`windows`), what crosses into the `next` piece, and `outs`, for each
    activation that leaves a piece with the last piece that reads it."""

    widest: list[int]
    works: list[int]
    windows: list[int]
    next: list[int]
    outs: list[list[tuple[int, int]]]

    @staticmethod
    def of(
        jaxpr: Jaxpr, shards: Shards, active: set[Var], sizes: Sequence[int], pieces: Sequence[Span]
    ) -> _PeakEstimate:
        is_work = _work_of(jaxpr)
        made: dict[Var, int] = {}
        last: dict[Var, int] = {}
        widest, works, windows = [], [], []
        for number, piece in enumerate(pieces):
            eqns = jaxpr.eqns[piece.start : piece.stop]
            inputs = [v for v in free_vars(eqns) if v in active and v in made]
            last.update((v, number) for v in inputs)
            results = [_produced([e], shards) for e in eqns if is_work(e)]
            widest.append(max([*results, *map(shards.nbytes, inputs)], default=0))
            works.append(sum(results))
            windows.append(max((_window_need(e, shards) for e in eqns), default=0))
            made.update((v, number) for e in eqns for v in e.outvars)
        outs: list[list[tuple[int, int]]] = [[] for _ in pieces]
        for v, reader in last.items():
            outs[made[v]].append((reader, shards.nbytes(v)))
        return _PeakEstimate(widest, works, windows, [sizes[p.stop] for p in pieces], outs)

    def most(self) -> int:
        """An upper bound of every estimate."""
        return sum(b for outs in self.outs for _, b in outs) + self._working_set(0, len(self.works))

    def groups_below(self, limit: int) -> list[tuple[int, int]] | None:
        """The grouping `(first, stop)` with an estimated peak of at most `limit` that keeps the fewest bytes, or `None`."""
        n = len(self.works)
        kept: list[int | None] = [0, *([None] * n)]
        origin = [0] * (n + 1)
        for i in range(n):
            before = kept[i]
            if before is None:
                continue
            for j in range(i + 1, n + 1):
                if before + self._working_set(i, j) > limit:
                    break
                after, known = before + self._leaving(i, j), kept[j]
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

    def _leaving(self, first: int, stop: int) -> int:
        return sum(b for outs in self.outs[first:stop] for reader, b in outs if reader >= stop)

    def _working_set(self, first: int, stop: int) -> int:
        """What the backward pass of a stage needs: the cotangents that come in, each result of work and some of what is
        computed from it, and at the widest place one cotangent more. The factor fits compiled convolutional networks."""
        results = sum(self.works[first:stop])
        window = max(self.windows[first:stop])
        at_window = 2 * results + window if window else 0
        return self.next[stop - 1] + max(at_window, results * 5 // 4 + max(self.widest[first:stop]))


def _window_need(eqn: JaxprEqn, shards: Shards) -> int:
    """Bytes that the derivative of a window reduction may need: XLA on CPU makes an index array for each dimension, of the
    operand and of the result."""
    if eqn.primitive.name not in _WINDOWS:
        return 0
    operand = eqn.invars[0]
    return (
        (shards.nbytes(operand) + _produced([eqn], shards)) * (1 + len(operand.aval.shape))
        if is_var(operand)
        else 0
    )


def _even(jaxpr: Jaxpr, shards: Shards, spans: Sequence[Span], shares: int) -> list[Span]:
    total = sum(_produced(jaxpr.eqns[s.start : s.stop], shards) for s in spans)
    result: list[Span] = []
    group: list[Span] = []
    size = 0
    for span in spans:
        if span.loop:
            result += [*_join(group), span]
            group, size = [], 0
            continue
        produced = _produced(jaxpr.eqns[span.start : span.stop], shards)
        if group and size + produced > total / shares:
            result += _join(group)
            group, size = [], 0
        group.append(span)
        size += produced
    return result + _join(group)
