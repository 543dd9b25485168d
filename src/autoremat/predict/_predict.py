"""`predict`: the compiled memory of a function, before it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import FUSES_INTO_READERS, open_jaxpr
from autoremat.graph._trace import aval_size
from autoremat.predict._compiler import XLA_ACCELERATOR, XLA_CPU, XLA_CPU_0_10, Compiler
from autoremat.predict._flatten import flatten
from autoremat.predict._peak import Moment, peak
from autoremat.target import Target, resolve
from autoremat.transform._jaxpr import is_var


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Bytes that a program is expected to need on one device, as `autoremat.MemoryUse` has them once it is compiled.

    `at` is the kernel that runs when most temporaries are alive, `timeline` all kernels in order, each with the bytes of temporaries
    alive while it runs.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    at: Moment
    timeline: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def predict(fun: Callable[..., Any], *args: Any, target: str | Target | None = None) -> Prediction:
    """The memory that `jit(fun)` will need, from a model of the compiler; nothing is compiled.

    **Arguments:** `fun` is any JAX function; wrap it in `jax.value_and_grad` for a gradient. `args` are arrays or
    `jax.ShapeDtypeStruct`s. `target` is where it would run; left out, this machine's backend.

    The model knows the passes of XLA that matter to memory: which operations are fused, which are computed twice, in which order
    kernels run. It is that of XLA for CPUs with the memory-minimizing scheduler, the default of `autoremat.plan` there. It is no proof:
    `autoremat.measure` asks the compiler itself.
    """
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fun)(*args))
    found = peak(flatten(jaxpr), compiler_for(resolve(target).platform))
    return Prediction(
        argument_bytes=sum(aval_size(v.aval)[2] for v in jaxpr.invars),
        output_bytes=sum(aval_size(v.aval)[2] for v in jaxpr.outvars if is_var(v)),
        temp_bytes=found.temp_bytes,
        at=found.at,
        timeline=found.timeline,
    )


def compiler_for(platform: str) -> Compiler:
    """The model of the compiler for a platform that comes with the JAX installed."""
    if platform != "cpu":
        return XLA_ACCELERATOR
    return XLA_CPU_0_10 if FUSES_INTO_READERS else XLA_CPU
