"""Schedules for reversing a chain of stages within a memory, where what is computed again may be computed again from further back.

**Problem.** A chain of links is run forward and then reversed, the last link first. To reverse a link one must have what it reads,
and it works in some memory of its own. Each link has options: to keep so many bytes when it runs, and then to run what is missing
again, at a cost, when it is reversed. All that may be kept at all times is to fit in a memory; what costs least?

**Answer.** With C(i, j, m) the least cost of reversing the links i to j within m bytes, what link i reads being there anyway,

    C(i, j, m) = min over the options o of link i:     cost(o) + C(i+1, j, m - kept(o) - border(i, i+1))      if working(o) fits in m
                 min over k:   again(i, k) + C(k, j, m - border(i, k)) + C(i, k-1, m)

In the second line the links i to k-1 run without keeping anything but what later links read. After the links from k on are reversed, they
run once more, `again(i, k)`, this time to be reversed by the best schedule within all of m. The last of them does not run for its
results then, which are known: only what its reversal misses is computed.

**Source.** Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, *Optimal checkpointing for heterogeneous chains*, 2019 (Rotor), with whole
frontiers as options in place of all or nothing. For equal links with all or nothing it is the binomial optimum of `_binomial`.

**Precision.** The memory is counted in `SLOTS` slots; what needs memory is rounded up, the memory down. So a schedule never needs more than
was asked for, and may cost more than the best one.

**Complexity.** O(n^2 (n + options) SLOTS) for n different links. Equal runs of links are solved once: O(n (n + options) SLOTS) for equal links.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOTS = 500

IMPOSSIBLE = 1 << 60
"""A cost beyond all others. The sum of four is still a 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Way:
    """One option of a link: it keeps `nbytes`, and to run the rest again costs `cost` (picoseconds).

    `working` are the bytes that the reversal of the link works in, what it keeps among them.
    """

    nbytes: int
    cost: int
    working: int


@dataclass(frozen=True, slots=True)
class Link:
    """One stage of a chain.

    `options` come by falling bytes, of both kinds, and rising cost. `forward` is the cost of running the link once. `repeatable`: whether it
    may run more often than its options say.
    """

    options: tuple[Way, ...]
    forward: int
    repeatable: bool = True


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in program order. `borders[i][j]`: bytes that the links i to j-1 make and links from j on read, for i < j."""

    links: tuple[Link, ...]
    borders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """A link runs once and keeps what its option says; its reversal runs the rest again."""

    link: int
    option: int


@dataclass(frozen=True, slots=True)
class Again:
    """The links `start` to `stop` (exclusive) keep nothing; for their reversal they run again, as `inner` says."""

    start: int
    stop: int
    inner: Reversal


Reversal = tuple[Keep | Again, ...]
"""How a run of links is reversed, in the order in which it runs forward."""


class Reversals:
    """The cheapest reversals of a chain, for every memory of up to `most` bytes beside what the first link reads."""

    def __init__(self, chain: Chain, most: int) -> None:
        self.chain = chain
        self.unit = max(1, -(-most // SLOTS))
        self._forward = [0, *itertools.accumulate(link.forward for link in chain.links)]
        self._tables: list[NDArray[np.int64]] = []
        self._table_of: dict[tuple[int, int], int] = {}
        self._solve()

    @property
    def least_bytes(self) -> int:
        """The least memory that any reversal is known for; beyond `most` if there is none."""
        possible = np.flatnonzero(self._whole() < IMPOSSIBLE)
        return int(possible[0] if possible.size else SLOTS + 1) * self.unit

    def cheapest(self, nbytes: int) -> tuple[int, int] | None:
        """The least cost within a memory, and the least memory in bytes that suffices for it; `None` if nothing fits."""
        table = self._whole()
        cost = int(table[self._slot(nbytes)])
        return None if cost >= IMPOSSIBLE else (cost, int(np.argmax(table == cost)) * self.unit)

    def reversal(self, nbytes: int) -> Reversal:
        """A cheapest reversal within a memory in which there is one."""
        return self._read(0, len(self.chain.links) - 1, self._slot(nbytes))

    def again(self, start: int, stop: int) -> int:
        """The cost of running links once more to reverse them: the last one runs as for its lowest option."""
        lowest = self.chain.links[stop - 1].options[-1].cost
        return self._forward[stop - 1] - self._forward[start] + lowest

    # ------------------------------------------------------------------------------------------------------ tables by memory

    def _slot(self, nbytes: int) -> int:
        return min(nbytes // self.unit, SLOTS)

    def _need(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _whole(self) -> NDArray[np.int64]:
        return self._table(0, len(self.chain.links) - 1)

    def _table(self, i: int, j: int) -> NDArray[np.int64]:
        """The cost of reversing links i to j, by slots of memory."""
        return self._tables[self._table_of[i, j]]

    def _solve(self) -> None:
        """Fill the tables, short runs of links first. Runs that differ in nothing share one.

        Only the run to the very end of the chain is not the inside of an `Again`.
        """
        known: dict[Hashable, int] = {}
        n = len(self.chain.links)
        for length in range(1, n + 1):
            for i in range(n - length + 1):
                j = i + length - 1
                key: Hashable = (self.chain.links[i], j == n - 1)
                if length > 1:
                    key = self._table_of[i, j - 1], self._table_of[i + 1, j], self.chain.borders[i][j]
                if key not in known:
                    known[key] = len(self._tables)
                    self._tables.append(self._compute(i, j) if length > 1 else self._compute_last(j))
                self._table_of[i, j] = known[key]

    def _compute_last(self, j: int) -> NDArray[np.int64]:
        """Of one link alone. Inside an `Again`, its lowest option is paid for already."""
        table = np.full(SLOTS + 1, IMPOSSIBLE, np.int64)
        for option in self._last_options(j):
            way = self.chain.links[j].options[option]
            cost = way.cost if self._is_end(j) else 0
            table[self._need(way.working) :] = np.minimum(table[self._need(way.working) :], cost)
        return table

    def _is_end(self, j: int) -> bool:
        return j == len(self.chain.links) - 1

    def _last_options(self, j: int) -> range:
        """What the last link of a run may keep: inside an `Again` only the least, since it does not run for its results there."""
        count = len(self.chain.links[j].options)
        return range(count) if self._is_end(j) else range(count - 1, count)

    def _compute(self, i: int, j: int) -> NDArray[np.int64]:
        table = np.full(SLOTS + 1, IMPOSSIBLE, np.int64)
        rest = self._table(i + 1, j)
        for least, shift, cost in self._options(i):
            table[least:] = np.minimum(table[least:], cost + rest[least - shift : len(rest) - shift])
        for k, shift, cost in self._breaks(i, j):
            rest, first = self._table(k, j), self._table(i, k - 1)
            table[shift:] = np.minimum(table[shift:], cost + first[shift:] + rest[: len(rest) - shift])
        return np.minimum(table, IMPOSSIBLE)

    def _options(self, i: int) -> Iterator[tuple[int, int, int]]:
        """For each option of a link that others follow: the least slots that it works in, those that it takes, and its cost."""
        border = self._need(self.chain.borders[i][i + 1])
        for way in self.chain.links[i].options:
            shift = min(self._need(way.nbytes) + border, SLOTS + 1)
            yield max(shift, min(self._need(way.working), SLOTS + 1)), shift, way.cost

    def _breaks(self, i: int, j: int) -> Iterator[tuple[int, int, int]]:
        """Each link k from which on links may be reversed before i to k-1 run again: with the slots that takes, and the cost."""
        for k in range(i + 1, j + 1):
            if not self.chain.links[k - 1].repeatable:
                return
            # One link alone that keeps nothing has an option that says so.
            if k > i + 1:
                yield k, min(self._need(self.chain.borders[i][k]), SLOTS + 1), self.again(i, k)

    # ------------------------------------------------------------------------------------------------------------- schedules

    def _read(self, i: int, j: int, slot: int) -> Reversal:
        """The reversal that the tables speak of."""
        items: list[Keep | Again] = []
        while i < j:
            item, i, slot = self._first(i, j, slot)
            items.append(item)
        options = self.chain.links[j].options
        fitting = [o for o in self._last_options(j) if self._need(options[o].working) <= slot]
        return (*items, Keep(j, min(fitting, key=lambda o: options[o].cost)))

    def _first(self, i: int, j: int, slot: int) -> tuple[Keep | Again, int, int]:
        """What a cheapest reversal of links i to j begins with, where it goes on, and the slots that are left for that."""
        best, rest = self._table(i, j)[slot], self._table(i + 1, j)
        # Of equal ones that which keeps least.
        for option, (least, shift, cost) in reversed([*enumerate(self._options(i))]):
            if least <= slot and cost + rest[slot - shift] == best:
                return Keep(i, option), i + 1, slot - shift
        for k, shift, cost in self._breaks(i, j):
            if shift <= slot and cost + self._table(i, k - 1)[slot] + self._table(k, j)[slot - shift] == best:
                return Again(i, k, self._read(i, k - 1, slot)), k, slot - shift
        raise AssertionError("no reversal has the cost that the tables say")
