"""`predict`: the compiled memory of a function, before it is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._compat import FUSES_INTO_READERS, Jaxpr, Var, open_jaxpr
from autoremat.predict._compiler import XLA_CPU, XLA_CPU_0_10, XLA_GPU, XLA_TPU, Compiler
from autoremat.predict._flatten import divide, flatten
from autoremat.predict._peak import Moment, peak
from autoremat.sharding import Shards
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
    alias_bytes: int
    temp_bytes: int
    at: Moment
    timeline: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries, outputs that take the place of donated arguments counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def predict(fun: Callable[..., Any], *args: Any, target: str | Target | None = None) -> Prediction:
    """The memory that `jit(fun)` will need, from a model of the compiler; nothing is compiled.

    **Arguments:** `fun` is any JAX function; wrap it in `jax.value_and_grad` for a gradient. `args` are arrays or
    `jax.ShapeDtypeStruct`s. `target` is where it would run; left out, this machine's backend.

    The model knows the passes of XLA that matter to memory: which operations are fused, which are computed twice, in which order
    kernels run. It is that of XLA for CPUs with the memory-minimizing scheduler, the default of `autoremat.plan` there. It is no proof:
    `autoremat.measure` asks the compiler itself.
    """
    jaxpr, constants = open_jaxpr(jax.make_jaxpr(fun)(*args))
    division = divide(jaxpr, (*constants, *jax.tree.leaves(args)))
    aliases = _alias_bytes(jaxpr, division.shards)
    program, compiler = flatten(jaxpr, division), compiler_for(resolve(target).platform)
    # What takes the place of a donated argument is written over it: its memory is taken from the start.
    found = peak(program, compiler, lends=compiler.lends_results and not aliases)
    return Prediction(
        argument_bytes=sum(map(division.shards.nbytes, jaxpr.invars)),
        output_bytes=sum(division.shards.nbytes(v) for v in jaxpr.outvars if is_var(v)),
        alias_bytes=aliases,
        temp_bytes=found.temp_bytes,
        at=found.at,
        timeline=found.timeline,
    )


def _alias_bytes(jaxpr: Jaxpr, shards: Shards) -> int:
    """Bytes of the outputs that take the place of arguments which a jitted function is donated: of the same type and sharding."""
    calls = [eqn for eqn in jaxpr.eqns if any(eqn.params.get("donated_invars", ()))]
    if len(calls) != 1:
        return 0

    def kind(var: Var) -> tuple[Any, Any, int]:
        return var.aval.shape, var.aval.dtype, shards.nbytes(var)

    donated = calls[0].params["donated_invars"]
    free = Counter(kind(v) for v, d in zip(calls[0].invars, donated, strict=True) if d and is_var(v))
    returned = Counter(kind(v) for v in jaxpr.outvars if is_var(v))
    return sum(size * count for (_, _, size), count in (free & returned).items())


def compiler_for(platform: str) -> Compiler:
    """The model of the compiler for a platform that comes with the JAX installed."""
    if platform != "cpu":
        return XLA_TPU if platform == "tpu" else XLA_GPU
    return XLA_CPU_0_10 if FUSES_INTO_READERS else XLA_CPU
