"""Reversals of chains: against enumeration of tiny chains, and against the closed formula for equal links."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve import Again, Chain, Keep, Link, Reversal, Reversals, Way, forward_steps
from autoremat.solve._chain import IMPOSSIBLE, SLOTS


class Machine:
    """Does what a reversal says: what is held, at most, and how much is computed."""

    def __init__(self, chain: Chain, reversal: Reversal) -> None:
        self.chain = chain
        self.held = self.peak = self.cost = 0
        self.reversed: list[int] = []
        self._run(reversal, inside=False)
        assert self.held == 0
        assert self.reversed == [*reversed(range(len(chain.links)))]
        self.extra = self.cost - sum(link.forward for link in chain.links)

    def _run(self, items: Reversal, *, inside: bool) -> None:
        """`inside`: the results of the last link are there already."""
        links = self.chain.links
        borders: list[int] = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            start, stop = span(item)
            for link in range(start, stop):
                if following is not None or not inside:
                    self.cost += links[link].forward
            borders.append(0 if following is None else self.chain.borders[start][stop])
            self.held += borders[-1] + self._kept(item)
        for item, border in zip(reversed(items), reversed(borders), strict=True):
            self.held -= border + self._kept(item)
            if isinstance(item, Again):
                assert all(links[k].repeatable for k in range(item.start, item.stop))
                self._run(item.inner, inside=True)
                continue
            way = links[item.link].options[item.option]
            # What the link itself keeps is a part of what its reversal works in.
            assert way.nbytes <= way.working
            self.peak = max(self.peak, self.held + way.working)
            self.cost += way.cost
            self.reversed.append(item.link)

    def _kept(self, item: Keep | Again) -> int:
        return self.chain.links[item.link].options[item.option].nbytes if isinstance(item, Keep) else 0


def span(item: Keep | Again) -> tuple[int, int]:
    return (item.link, item.link + 1) if isinstance(item, Keep) else (item.start, item.stop)


def every_reversal(chain: Chain, i: int, j: int, *, inside: bool) -> Iterator[Reversal]:
    options = range(len(chain.links[i].options))
    if i == j:
        yield from ((Keep(i, o),) for o in (options[-1:] if inside else options))
        return
    for rest in every_reversal(chain, i + 1, j, inside=inside):
        yield from ((Keep(i, o), *rest) for o in options)
    for k in range(i + 2, j + 1):
        if all(link.repeatable for link in chain.links[i:k]):
            for inner in every_reversal(chain, i, k - 1, inside=True):
                for rest in every_reversal(chain, k, j, inside=inside):
                    yield (Again(i, k, inner), *rest)


def least_cost(chain: Chain, nbytes: int) -> int | None:
    machines = (Machine(chain, r) for r in every_reversal(chain, 0, len(chain.links) - 1, inside=False))
    return min((m.extra for m in machines if m.peak <= nbytes), default=None)


def equal_links(n: int) -> Chain:
    """A border is 1 byte, keeping everything takes 100, and a link costs 1."""
    link = Link((Way(100, 0, 100), Way(0, 1, 100)), forward=1)
    return Chain((link,) * n, tuple(tuple(int(i < j) for j in range(n)) for i in range(n)))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    n = draw(st.integers(1, 4))
    links = []
    for _ in range(n):
        forward = draw(st.integers(1, 9))
        whole = draw(st.integers(0, 9))
        working, wider = whole + draw(st.integers(0, 3)), draw(st.integers(0, 2))
        options = [Way(whole, 0, working + wider)]
        if draw(st.booleans()):
            options.append(Way(whole // 2, forward // 2, working + wider // 2))
        options.append(Way(0, forward - draw(st.integers(0, 1)), working))
        links.append(Link(tuple(options), forward, draw(st.booleans())))
    sizes = [draw(st.integers(1, 5)) for _ in range(n)]
    # What links make is read by the next one, and what one of them makes by all.
    wide = draw(st.integers(0, n - 1))
    borders = tuple(
        tuple(sizes[j - 1] + 2 * (i <= wide < j) if i < j else 0 for j in range(n)) for i in range(n)
    )
    return Chain(tuple(links), borders)


@settings(deadline=None, max_examples=60)
@given(chains())
def test_no_reversal_costs_less(chain: Chain) -> None:
    most = 50
    found = Reversals(chain, most)
    assert found.unit == 1
    for nbytes in range(0, most + 1, 3):
        best = found.cheapest(nbytes)
        assert (best and best[0]) == least_cost(chain, nbytes), nbytes
        if best is not None:
            machine = Machine(chain, found.reversal(best[1]))
            assert machine.extra == best[0]
            assert machine.peak <= best[1] <= nbytes


def test_equal_links_are_reversed_in_the_binomial_number_of_steps() -> None:
    for n in (1, 2, 3, 7, 20, 45):
        chain = equal_links(n)
        found = Reversals(chain, 499)
        for snapshots in range(1, 12):
            best = found.cheapest(snapshots + 100)
            assert best is not None
            assert best[0] == forward_steps(n, snapshots), (n, snapshots)
            machine = Machine(chain, found.reversal(snapshots + 100))
            assert machine.extra == best[0]
            assert machine.peak <= snapshots + 100


def test_what_may_not_run_again_runs_once() -> None:
    chain = equal_links(6)
    fixed = Chain(
        tuple(Link(k.options, k.forward, repeatable=i != 2) for i, k in enumerate(chain.links)),
        chain.borders,
    )
    assert Reversals(chain, 499).least_bytes == 101
    # Those before link 2 are one run, those after it another: it is itself kept between its two borders.
    found = Reversals(fixed, 499)
    assert found.least_bytes == 103
    assert Machine(fixed, found.reversal(103)).peak == 103


def test_memory_rounds_down_and_needs_round_up() -> None:
    sizes = (3_331, 9_973, 1_009, 7_907, 5_003, 2_203)
    links = tuple(
        Link((Way(10 * s, 0, 11 * s), Way(3 * s, s // 2, 11 * s), Way(0, s, 11 * s)), s) for s in sizes
    )
    borders = tuple(tuple(sizes[j - 1] if i < j else 0 for j in range(6)) for i in range(6))
    chain = Chain(links, borders)
    found = Reversals(chain, 150_000)
    assert found.unit > 1
    for nbytes in range(found.least_bytes, 150_000, 10_007):
        assert Machine(chain, found.reversal(nbytes)).peak <= nbytes
    assert found.cheapest(found.least_bytes - 1) is None
    assert found.cheapest(10**9) is not None


def test_a_chain_that_fits_nowhere() -> None:
    found = Reversals(Chain((Link((Way(9, 0, 9),), 1),), ((0,),)), 5)
    assert found.cheapest(5) is None
    assert found.least_bytes > 5


def test_equal_links_are_solved_once() -> None:
    start = time.perf_counter()
    found = Reversals(equal_links(64), 300)
    assert len(found._tables) == 127
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("n", [2, 64])
def test_costs_add_up_without_overflow(n: int) -> None:
    assert 4 * IMPOSSIBLE < 2**63
    found = Reversals(equal_links(n), SLOTS)
    assert found.cheapest(99) is None
