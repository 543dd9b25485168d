"""Numbers as a person reads them: sizes in IEC units, FLOPs with SI prefixes, times, shares."""

from __future__ import annotations

_SI = ("", "k", "M", "G", "T", "P", "E")
_IEC = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def _scaled(value: float, base: int, steps: int) -> tuple[str, int]:
    """A number of three or four digits, and the power of `base` that it was divided by."""
    power = 0
    # What rounds up to the next unit is shown in it: 1.00 MiB, never 1024.0 KiB.
    while abs(value) >= base - 0.05 * (power > 0) and power < steps - 1:
        value /= base
        power += 1
    if power == 0:
        return f"{value:,.0f}", 0
    return f"{value:,.{2 if abs(value) < 99.995 else 1}f}", power


def size_text(nbytes: float) -> str:
    """Bytes in the unit that fits: `1.25 GiB`, `512 bytes`."""
    text, power = _scaled(nbytes, 1024, len(_IEC))
    return "1 byte" if power == 0 and text == "1" else f"{text} {_IEC[power]}"


def exact_size_text(nbytes: int) -> str:
    """The same with every byte: `1.25 GiB (1,342,177,280 bytes)`."""
    short = size_text(nbytes)
    return short if nbytes < 1024 else f"{short} ({nbytes:,} bytes)"


def flops_text(flops: float) -> str:
    """FLOPs with an SI prefix: `13.75 GFLOP`."""
    text, power = _scaled(flops, 1000, len(_SI))
    return f"{text} {_SI[power]}FLOP"


def seconds_text(seconds: float) -> str:
    """A time: `85 µs`, `120 ms`, `3.4 s`, `2 min 05 s`."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"


def share_text(part: float, whole: float) -> str:
    """`part` in percent of `whole`; `-` if there is no whole."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "<0.01%"
    return f"{percent:.{1 if percent >= 0.995 or percent == 0 else 2}f}%"


def difference_text(value: float) -> str:
    """A difference of two computations: `0` if there is none, else `3.1e-07`."""
    return "0" if value == 0 else f"{value:.1e}"


def count_text(number: int, noun: str) -> str:
    """`1 compile`, `3 compiles`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
