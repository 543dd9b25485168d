"""`targets`: what can be compiled for, and what is missing for the rest."""

from __future__ import annotations

from dataclasses import dataclass

from autoremat._errors import TargetError
from autoremat.cost import DEVICES, Device
from autoremat.target._installed import compiler_of
from autoremat.target._start import start_without_accelerators
from autoremat.target._target import Target, attached


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """One target of the table.

    `compiler` is the compiler that is installed for it, with its version, or `""`; `problem` then says what is wrong, and `install` is
    the command that puts it right, where there is one. `attached`: it is this machine's backend.
    """

    name: str
    device: Device
    attached: bool
    compiler: str
    problem: str
    install: str


def targets() -> tuple[TargetInfo, ...]:
    """All targets by name, with the compilers that are installed. The CPU comes first; nothing is compiled."""
    start_without_accelerators()
    here = attached()
    return tuple(_info(device, here) for device in DEVICES.values())


def _info(device: Device, here: Target) -> TargetInfo:
    compiler = compiler_of(device.name.partition(":")[0])
    found, problem = "", ""
    if device.name == here.name or compiler is None:
        found = here.compiler
    else:
        try:
            compiler.check(device.name)
            found = compiler.installed
        except TargetError as error:
            problem = str(error)
    return TargetInfo(
        name=device.name,
        device=device,
        attached=device.name == here.name,
        compiler=found,
        problem=problem,
        install=compiler.command if compiler is not None and problem else "",
    )
