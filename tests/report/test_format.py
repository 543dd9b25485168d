"""Numbers with their units."""

from __future__ import annotations

import pytest

from autoremat.report import _format as f


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (512, "512 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.00 KiB"),
        (1342177280, "1.25 GiB"),
        (102.4 * 2**20, "102.4 MiB"),
        (1000 * 2**20, "1,000.0 MiB"),
        (2**20 - 1, "1.00 MiB"),  # never 1,024.0 KiB
        (3 * 2**60, "3,072.0 PiB"),
    ],
)
def test_size(nbytes: float, text: str):
    assert f.size_text(nbytes) == text


def test_exact_size():
    assert f.exact_size_text(1342177280) == "1.25 GiB (1,342,177,280 bytes)"
    assert f.exact_size_text(1) == "1 byte"


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (57_051_136, "57.05 MFLOP"),
        (999_999, "1.00 MFLOP"),
        (2e15, "2.00 PFLOP"),
    ],
)
def test_flops(flops: float, text: str):
    assert f.flops_text(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (85e-6, "85 µs"),
        (0.1204, "120 ms"),
        (0.9996, "1.0 s"),
        (3.44, "3.4 s"),
        (59.97, "1 min 00 s"),
        (125, "2 min 05 s"),
    ],
)
def test_seconds(seconds: float, text: str):
    assert f.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 2, "50.0%"),
        (0, 5, "0.0%"),
        (41, 10_000, "0.41%"),
        (1, 10**6, "<0.01%"),
        (1, 0, "-"),
        (3, 2, "150.0%"),
    ],
)
def test_share(part: int, whole: int, text: str):
    assert f.share_text(part, whole) == text


def test_difference_and_count():
    assert [f.difference_text(x) for x in (0.0, 3.14e-7)] == ["0", "3.1e-07"]
    assert [f.count_text(n, "plan") for n in (0, 1, 1200)] == ["0 plans", "1 plan", "1,200 plans"]
