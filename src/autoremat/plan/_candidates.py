"""Candidate plans of one function, and what the compiler says of them.

Candidates and their compiled peaks belong to the function, the target and the compiler options, never to a budget: calls
that share this record are monotone. It holds numbers and decisions, no arrays and no functions.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from autoremat.cost import Costs, CostTable, Device, priced
from autoremat.measure import MemoryUse, abstract, memory_of
from autoremat.plan._alike import Alike
from autoremat.plan._bound import Relaxation, relax
from autoremat.plan._calibrate import coverage
from autoremat.plan._path import Path, build_path
from autoremat.plan._program import Program
from autoremat.plan._rewrite import Decisions, LoopFences, decide, without_prices
from autoremat.plan._segments import Span
from autoremat.plan._stages import Builder, Stage, movable_bytes, partitions
from autoremat.plan._stages import Program as Staged
from autoremat.plan._trace import Traced
from autoremat.predict import predict
from autoremat.sharding import WHOLE, Shards
from autoremat.target import Target


class Progress(Protocol):
    """Told of each compilation."""

    def compiling(self, what: str) -> None:
        """A compilation starts."""
        ...

    def compiled(self, what: str, use: MemoryUse) -> None:
        """It ended; `use.seconds` is how long it took."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan that was compiled: state `index` of a variant's path. `index` -1 is the function as it is."""

    variant: int
    index: int
    nbytes: int
    cost: int
    flops: int
    use: MemoryUse


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to cut the program into stages and to fence them (see `transform._fence`), with its path of plans.

    Variants of one `partition` differ in what views cost, in whether a small last stage is left as it is, and in fences. `doubt`: the share by which
    what is predicted of the first plan may be too high, while none of the partition was compiled.
    """

    name: str
    fence: str
    path: Path
    partition: str = ""
    doubt: float = 0.0


@dataclass
class Record:
    """Everything known of one function on one target."""

    variants: list[Variant] = field(default_factory=list)
    source: Iterator[Variant] | None = None
    measured: dict[tuple[int, int], Measured] = field(default_factory=dict)
    predicted: dict[tuple[int, int], int] = field(default_factory=dict)
    relaxed: Relaxation | None = None
    seconds: float = 0.0


_RECORDS: OrderedDict[Any, Record] = OrderedDict()
_MAX_RECORDS = 64


def record_for(key: Any) -> Record:
    """The record of a function, made empty if there is none."""
    record = _RECORDS.setdefault(key, Record())
    _RECORDS.move_to_end(key)
    while len(_RECORDS) > _MAX_RECORDS:
        _RECORDS.popitem(last=False)
    return record


@dataclass
class Candidates:
    """Builds and compiles the candidate plans of a traced function.

    `device`: that of the target, with the rates, or measured times, that price recomputation. `notes`: what a user should know of
    that. Raises `CostTableError` if `costs` are of another device or program.
    """

    traced: Traced
    program: Program
    target: Target
    options: dict[str, Any]
    progress: Progress
    costs: Costs = None
    device: Device = field(init=False)
    record: Record = field(init=False)
    notes: tuple[str, ...] = field(default=(), init=False)
    trace_seconds: float = 0.0
    _alike: Alike = field(default_factory=Alike, init=False)

    def __post_init__(self) -> None:
        self.device = priced(self.target.device, self.costs)
        key = (
            self.traced.fingerprint,
            self.program.key,
            self.target.name,
            tuple(sorted(self.options.items())),
            _costs_key(self.costs),
            jax.config.read("jax_enable_x64"),
        )
        self.record = record_for(key)
        if isinstance(self.costs, CostTable):
            self.notes = (coverage(self.costs, self.traced),)
        elif self.costs:
            self.notes = (
                "Recomputation is priced by its FLOPs alone: memory traffic and communication cost nothing.",
            )

    def variants(self) -> Iterator[Variant]:
        """The candidate ways to stage the program, the most promising first; each is built when it is asked for."""
        number = 0
        while (variant := self.variant(number)) is not None:
            yield variant
            number += 1

    def variant(self, number: int) -> Variant | None:
        """The variant of this number, or `None` if there are not so many."""
        start = time.perf_counter()
        if self.record.source is None:
            shards = self.program.shards
            fences = fences_for(self.target.platform, divided=bool(shards.mesh))
            self.record.source = build_variants(
                self.traced,
                self.device,
                fences,
                shards,
                spared_tail=self.target.platform in SPARED_TAIL,
                products_alone=self.target.platform in PRODUCTS_ALONE,
            )
        while len(self.record.variants) <= number and (found := next(self.record.source, None)) is not None:
            self.record.variants.append(found)
        self.record.seconds += time.perf_counter() - start
        return self.record.variants[number] if number < len(self.record.variants) else None

    def decisions(self, variant: int, index: int) -> Decisions:
        """The decisions of a candidate; none for the function as it is."""
        if index < 0:
            return ()
        chosen = self._known(variant)
        in_loops = LoopFences() if self.target.platform == "cpu" else LOOP_FENCES_OF_ACCELERATORS
        return decide(chosen.path.program, chosen.path.states[index], chosen.fence, in_loops)

    def same(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether two candidates, by variant and index, decide the same: a compiler makes one program of both."""
        return without_prices(self.decisions(*one)) == without_prices(self.decisions(*other))

    def relaxation(self) -> Relaxation:
        """What bounds every plan from below, whatever its budget."""
        start = time.perf_counter()
        if self.record.relaxed is None:
            gradient, args = self.program.gradient()
            self.record.relaxed = relax(gradient, args, self.device)
        self.record.seconds += time.perf_counter() - start
        return self.record.relaxed

    def _known(self, number: int) -> Variant:
        variant = self.variant(number)
        if variant is None:
            raise IndexError(f"there is no variant {number}")
        return variant

    def measure(self, variant: int, index: int) -> Measured:
        """Compile a candidate, or look it up."""
        key = (0, -1) if index < 0 else (variant, index)
        if key not in self.record.measured:
            self.record.measured[key] = self._compile(*key)
        return self.record.measured[key]

    def _compile(self, variant: int, index: int) -> Measured:
        if index < 0:
            what, nbytes, cost, flops = "no recomputation", 0, 0, 0
        else:
            chosen = self._known(variant)
            state = chosen.path.states[index]
            nbytes, cost, flops = state.nbytes, state.cost, state.flops
            what = f"plan {index} of {len(chosen.path.states) - 1}, {chosen.name}, {chosen.fence}"
        if not self.target.attached:
            what = f"{what}, for {self.target.name}"
        self.progress.compiling(what)
        use = self.compile(self.decisions(variant, index))
        self.progress.compiled(what, use)
        return Measured(variant, index, nbytes, cost, flops, use)

    @property
    def predicts_well(self) -> bool:
        """Whether predictions tell plans of different partitions apart: XLA for CPUs alone is modeled in detail."""
        return self.target.platform == "cpu"

    def predicted(self, variant: int, index: int) -> int:
        """The peak in bytes that a candidate is expected to have, from a model of the compiler."""
        key = (0, -1) if index < 0 else (variant, index)
        if key not in self.record.predicted:
            start = time.perf_counter()
            # What is divided among devices may be divided in other ways in parts that are alike.
            alike = None if self.program.shards.mesh else self._alike
            whole = self.program.whole(self.decisions(*key), alike)
            shapes = jax.tree.map(abstract, self.program.args)
            self.record.predicted[key] = predict(whole, *shapes, target=self.target).peak_bytes
            self.record.seconds += time.perf_counter() - start
        return self.record.predicted[key]

    def compile(self, decisions: Decisions) -> MemoryUse:
        """Compile the program with decisions written in."""
        whole = self.program.whole(decisions)
        return memory_of(whole, *self.program.args, target=self.target, compiler_options=self.options)


def _costs_key(costs: Costs) -> Hashable:
    if not isinstance(costs, CostTable):
        return costs
    rates = (costs.memory_bandwidth, costs.vector_flops_per_s, *sorted(costs.matrix_flops_per_s.items()))
    return rates, tuple(sorted(costs.seconds.items()))


FENCES = {"cpu": ("dependence", "barrier"), "tpu": ("barrier",), "cuda": ("barrier",), "rocm": ("barrier",)}
"""Of each platform the kinds of fences that are tried (see `transform._fence`), the most promising first.

XLA for CPUs drops barriers before it schedules; those for accelerators do not, and take several times as long over dependences.
"""


LOOP_FENCES_OF_ACCELERATORS = LoopFences(one="barrier", several="barrier")
"""A TPU's compiler keeps one carry more in the backward pass of a loop whose body has no barrier."""


SMALL_TAIL = 0.03
"""How small the last stage is, as a share of what all stages can give back, that may be left as it is."""


SPARED_TAIL = frozenset({"tpu"})
"""Platforms where a small last stage is also tried as it is.

A TPU's compiler keeps one carry more where a barrier stands between a loop and the loss. Where it recomputes everything else, it may
rather fuse a last stage that is recomputed into what reads it.
"""


PRODUCTS_ALONE = frozenset({"cuda", "rocm"})
"""Platforms whose compilers fuse all of a softmax from a product to the next: where its middle is kept, both it and the product are in memory."""


DOUBT = 0.1
"""By what share a prediction may be too high where products alone are kept: what is fused between them is never in memory as a whole, of which the
model of the compiler knows less than of what is kept. Measured: 6.5 %, of six unrolled layers."""


def fences_for(platform: str, *, divided: bool) -> tuple[str, ...]:
    """The kinds of fences to try. XLA for CPUs drops barriers before it merges what equals, where it divides a program among devices."""
    return ("dependence",) if platform == "cpu" and divided else FENCES[platform]


def build_variants(
    traced: Traced,
    on: Device,
    fences: Sequence[str],
    shards: Shards = WHOLE,
    *,
    spared_tail: bool = False,
    products_alone: bool = False,
) -> Iterator[Variant]:
    """Cut the program into stages in each promising way, solve the stages, and order the plans.

    The first partition also comes, with `spared_tail`, with its last stage as it is, if that is small, and with `products_alone` solved as if all but
    products cost nothing to run again. That starts where a policy that keeps products stands, which nobody applies to the loss: a small last
    stage is left as it is there too.
    """
    builder = Builder(on, shards)
    active = set(traced.differentiated)
    # Everything that the caller passes in is alive until the gradient is done.
    free = set(traced.jaxpr.invars)
    seen: set[Any] = set()

    def build(spans: Sequence[Span]) -> Staged:
        return builder.program(traced.jaxpr, spans, active, free, 1, "")[0]

    for name, spans in partitions(traced.jaxpr, shards, active):
        for halve in (False, True) if any(s.loop for s in spans) else (False,):
            builder.halve_loops = halve
            program = build(spans)
            shape = tuple((s.label, s.trips) for s in program.stages())
            if not shape or shape in seen:
                continue
            first = not seen
            seen.add(shape)
            label = f"{name}, loop bodies in two stages" if halve else name
            yield from _fenced(label, program, fences if first else fences[:1])
            if first:
                small_tail = program.has_small_tail(SMALL_TAIL)
                builder.gratis = "views"
                viewed = build(spans)
                yield from _fenced(label, viewed, fences, ", views for nothing")
                if products_alone:
                    builder.gratis = "all but products"
                    alone = build(spans)
                    alone = alone.without_tail() if small_tail else alone
                    kind = f"{label}, all but products for nothing"
                    yield Variant(kind, fences[0], build_path(alone), kind, DOUBT)
                builder.gratis = "nothing"
                if spared_tail and small_tail:
                    for one, how in ((program, ""), (viewed, ", views for nothing")):
                        yield from _fenced(label, one.without_tail(), fences, f", last stage as it is{how}")


def _fenced(partition: str, program: Staged, fences: Sequence[str], how: str = "") -> Iterator[Variant]:
    """The variants of a staged program: with the first kind of fence, and with the others where fences matter."""
    path = build_path(program)
    for number, fence in enumerate(fences):
        if number == 0 or _fences_matter(program):
            yield Variant(partition + how, fence, path, partition)


def _fences_matter(program: Staged) -> bool:
    """Whether much can be recomputed outside loops: inside a loop no barrier is needed, and the two kinds are one."""
    outside = (node for node in program.nodes if isinstance(node, Stage))
    return 10 * movable_bytes(outside) > movable_bytes(program.stages())
