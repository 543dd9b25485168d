"""Which compilers of accelerators are installed, and whether they belong to the JAX installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from autoremat._errors import TargetError


@dataclass(frozen=True, slots=True)
class Compiler:
    """What must be installed to compile for a family of devices.

    `extra` is that of autoremat, `jax_extra` the one of JAX that says which versions belong to it, `packages` what is looked for, the
    compiler itself first.
    """

    extra: str
    jax_extra: str
    packages: tuple[str, ...]

    @property
    def command(self) -> str:
        """The one command that installs it."""
        return f'pip install "autoremat[{self.extra}]"'

    @property
    def installed(self) -> str:
        """Its name and version, or `""` if a part of it is missing."""
        versions = [_version(p) for p in self.packages]
        return f"{self.packages[0]} {versions[0]}" if all(versions) else ""

    def check(self, target: str) -> None:
        """Raise `TargetError` if a part is missing, or is of a version that does not belong to the JAX installed."""
        missing = [p for p in self.packages if not _version(p)]
        if missing:
            raise TargetError(
                f"target {target!r} needs its compiler, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"installed. Cheapest fix: {self.command}"
            )
        for wanted in _wanted(self.jax_extra):
            found = _version(wanted.name)
            if wanted.name in self.packages and found not in wanted.specifier:
                raise TargetError(
                    f"target {target!r}: {wanted.name} {found} does not belong to JAX {version('jax')}, which needs "
                    f"{wanted.name}{wanted.specifier}. Cheapest fix: {self.command}"
                )


LIBTPU = Compiler("tpu", "tpu", ("libtpu",))
CUDA = Compiler("gpu", "cuda12-local", ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"))


def compiler_of(family: str) -> Compiler | None:
    """The compiler of a family of targets; `None` for CPUs, whose compiler is a part of JAX."""
    return {"tpu": LIBTPU, "gpu": CUDA}.get(family)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _wanted(extra: str) -> Iterator[Requirement]:
    """What JAX says that this extra of it needs."""
    for text in requires("jax") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield requirement
