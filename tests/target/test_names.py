"""Names of targets: what is read, and what is refused with what to do about it."""

from __future__ import annotations

import pytest

import autoremat as ar
from autoremat.cost import DEVICES
from autoremat.target._gpu import GPUS, target_config
from autoremat.target._names import parse
from autoremat.target._topology import HOST


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("cpu", "cpu", 1),
        (" TPU:v5e ", "tpu:v5e", 1),
        ("tpu:v5e:1x1", "tpu:v5e", 1),
        ("tpu:v5p:2x2x1", "tpu:v5p:2x2x1", 4),
        ("gpu:h100", "gpu:h100", 1),
        ("gpu:a100-80gb:8", "gpu:a100-80gb:8", 8),
    ],
)
def test_names(text: str, name: str, count: int) -> None:
    found = parse(text)
    assert (str(found), found.count) == (name, count)
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu:v9", r"no target is called 'tpu:v9'\. Known are cpu, gpu:a100-40gb,.*Cheapest fix: one of these names\."),
        ("", r"no target is called ''"),
        ("tpu:v5e:2y2", r"'2y2' is no number of devices\. Needed is a shape such as 2x2"),
        ("tpu:v5e:0x2", r"'0x2' is no number of devices"),
        ("gpu:h100:2x4", r'GPUs are counted, they have no shape\. Cheapest fix: "gpu:h100:8"'),
    ],
)  # fmt: skip
def test_names_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ar.TargetError, match=message):
        parse(text)


def test_every_device_can_be_described_to_its_compiler() -> None:
    """A device that is added to the table of rates needs a row in the table of its family."""
    families = {name: name.partition(":")[0] for name in DEVICES}
    assert {n for n, f in families.items() if f == "gpu"} == set(GPUS)
    assert {n.partition(":")[2] for n, f in families.items() if f == "tpu"} == set(HOST)


def test_what_a_compiler_is_told_of_a_gpu() -> None:
    text = target_config(DEVICES["gpu:h100"])
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert "core_count: 132" in text
    assert f"device_memory_size: {DEVICES['gpu:h100'].memory_bytes}" in text
