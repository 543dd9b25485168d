"""Below one border for each stage: plans in which recomputation itself starts from what was computed again.

    Program -> Chain -> Nesting ...         by falling memory and rising cost

Where every stage is recomputed, all that crosses from one stage into the next is still kept. Here runs of stages keep nothing but
what leaves them. When the stages after them are done, they run once more, now with checkpoints inside. Which runs, says
`solve/_chain.py`. Only programs without loops have such plans: loops have snapshots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoremat._compat import Var
from autoremat.plan._stages import Program, Stage
from autoremat.solve import Chain, Keep, Link, Reversal, Reversals, Way
from autoremat.transform._jaxpr import is_var
from autoremat.transform._split import may_run_again

LEVELS = 12
"""Memories for which a schedule is sought, spread evenly on a logarithmic scale over what nesting can reach."""

WORTH = 0.97
"""A schedule is taken if it needs at most this share of the memory that the one before needs."""

MAX_LINKS = 64
"""Stages of a chain. Programs with more have coarser variants, whose borders are as small a part of the memory."""


@dataclass(frozen=True, slots=True)
class Nesting:
    """A schedule for the stages of a program.

    `saved` bytes less are held at most than with all borders; `cost` (picoseconds) and `flops` go to recomputation.
    """

    saved: int
    cost: int
    flops: int
    reversal: Reversal


def nestings(program: Program) -> Iterator[Nesting]:
    """Schedules that need less memory than that of all borders, by falling memory and rising cost."""
    stages = [node for node in program.nodes if isinstance(node, Stage)]
    if len(stages) < len(program.nodes) or not 3 <= len(stages) <= MAX_LINKS:
        return
    chain = chain_of(program)
    memory, cost = (all_borders := _memory(chain)), sum(s.options[-1].cost for s in stages)
    found = Reversals(chain, memory)
    for wanted in np.geomspace(memory, found.least_bytes, LEVELS + 1)[1:]:
        best = found.cheapest(round(wanted))
        if best is not None and best[0] > cost and best[1] <= WORTH * memory:
            cost, memory = best
            reversal = found.reversal(memory)
            yield Nesting(all_borders - memory, cost, _flops(stages, reversal), reversal)


def chain_of(program: Program) -> Chain:
    """The stages of a program without loops, with what crosses between them and what each works in.

    The reversal of a stage works in all that it could keep, in the cotangents of what enters and leaves it, and in those at its widest place.
    The last do not count where all runs again: then compilers fuse what runs again into what reads it.
    """
    stages = [node for node in program.nodes if isinstance(node, Stage)]
    borders = _borders(program, stages)
    n = len(stages)
    links = []
    for i, stage in enumerate(stages):
        entering = borders[i - 1][i] if i else 0
        leaving = borders[i][i + 1] if i + 1 < n else 0
        kept = [max(0, o.nbytes - stage.input_bytes) for o in stage.options]
        eqns = program.jaxpr.eqns[
            stage.span.start : stages[i + 1].span.start if i + 1 < n else stage.span.stop
        ]
        widest = max(program.shards.nbytes(v) for e in eqns for v in e.outvars)
        working = entering + max(kept) + leaving
        links.append(
            Link(
                options=tuple(
                    Way(nbytes, option.cost, working + min(nbytes, widest))
                    for nbytes, option in zip(kept, stage.options, strict=True)
                ),
                forward=stage.forward_cost,
                repeatable=all(map(may_run_again, eqns)),
            )
        )
    return Chain(tuple(links), borders)


def _borders(program: Program, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """For each two stages i < j, the bytes of what stages i to j-1 make and stages from j on read.

    Equations between two stages count as the first one's.
    """
    starts = [s.span.start for s in stages]
    made: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for number, eqn in enumerate(program.jaxpr.eqns):
        stage = bisect_right(starts, number) - 1
        last.update((v, stage) for v in eqn.invars if is_var(v) and v in made)
        made.update((v, stage) for v in eqn.outvars)
    sizes = np.zeros((len(stages), len(stages)), np.int64)
    for v, reader in last.items():
        if made[v] >= 0:
            sizes[made[v], reader] += program.shards.nbytes(v)
    n = len(stages)
    return tuple(tuple(int(sizes[i:j, j:].sum()) if i < j else 0 for j in range(n)) for i in range(n))


def _memory(chain: Chain) -> int:
    """What it takes to reverse a chain if every link keeps as little as it can, and all borders are kept."""
    held, peak = 0, 0
    for i, link in enumerate(chain.links):
        lowest = link.options[-1]
        peak = max(peak, held + lowest.working)
        if i + 1 < len(chain.links):
            held += lowest.nbytes + chain.borders[i][i + 1]
    return peak


def _flops(stages: Sequence[Stage], reversal: Reversal) -> int:
    """The FLOPs of all that runs again. The last stage of a run that runs again computes what its reversal misses, no more."""
    total = 0
    for item in reversal:
        if isinstance(item, Keep):
            total += stages[item.link].options[item.option].flops
        else:
            total += sum(s.forward_flops for s in stages[item.start : item.stop - 1])
            total += _flops(stages, item.inner)
    return total
