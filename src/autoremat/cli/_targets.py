"""`autoremat targets`."""

from __future__ import annotations

from typing import Any

import click

from autoremat.cli._options import json_option
from autoremat.cli._output import Output
from autoremat.report import targets_report
from autoremat.target import TargetInfo, targets


@click.command("targets")
@json_option
def targets_command(*, as_json: bool) -> None:
    """List the devices that a plan can be made for.

    A device that is elsewhere needs its compiler here, and nothing else. The last column is the compiler that is
    installed, or the command that installs it.
    """
    output = Output(as_json=as_json)
    data = {"targets": [_data(info) for info in targets()]}
    output.show(targets_report(data))
    output.finish(data)


def _data(info: TargetInfo) -> dict[str, Any]:
    device = info.device
    return {
        "name": info.name,
        "attached": info.attached,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth": device.memory_bandwidth,
        "bfloat16_flops_per_s": device.matrix_rate("bfloat16"),
        "vector_flops_per_s": device.vector_flops_per_s,
        "host_link_bytes_per_s": device.host_link_bytes_per_s,
        "interconnect_bytes_per_s": device.interconnect_bytes_per_s,
        "source": device.source,
        "compiler": info.compiler,
        "install": info.install,
        "problem": info.problem,
    }
