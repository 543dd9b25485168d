"""Compile a function for shapes and read the compiler's memory analysis. Nothing is executed.

On CPU the compiler's peak field is arguments plus outputs, so the peak is made from the parts:
arguments + outputs + temporaries - aliases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._errors import CompileError, TargetError

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a compiled program on one device.

    `peak_bytes` bounds what is alive at any time: arguments, outputs and temporaries, less the outputs that share memory with
    donated arguments. `seconds` is how long the compiler took. `flops` is the compiler's own count, which counts the body
    of a loop once, or `None` where it gives none.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int
    seconds: float
    flops: float | None = None

    @classmethod
    def read(cls, compiled: Any, seconds: float) -> MemoryUse:
        """From a compiled program. Raises `CompileError` where the backend gives no analysis."""
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise CompileError(
                "the compiler of this backend gives no memory analysis, so no budget can be verified."
            )
        arguments = int(analysis.argument_size_in_bytes)
        outputs = int(analysis.output_size_in_bytes)
        temporaries = int(analysis.temp_size_in_bytes)
        aliases = int(analysis.alias_size_in_bytes)
        return cls(
            argument_bytes=arguments,
            output_bytes=outputs,
            temp_bytes=temporaries,
            alias_bytes=aliases,
            peak_bytes=arguments + outputs + temporaries - aliases,
            seconds=seconds,
            flops=_flops(compiled),
        )


def _flops(compiled: Any) -> float | None:
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    return None if not analysis else analysis.get("flops")


def default_compiler_options(platform: str | None = None) -> dict[str, str]:
    """The options under which plans are verified: on CPU the scheduler that minimizes memory.

    The default CPU scheduler of JAX up to 0.11.0 starts recomputation early and hides all savings of unrolled code.
    """
    platform = platform or jax.default_backend()
    return dict(MEMORY_SCHEDULER) if platform == "cpu" else {}


def abstract(x: Any) -> Any:
    """The shape of an array argument; anything else stays as it is."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    aval = jax.typeof(x)
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and len(x.devices()) > 1 else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def compile_memory(
    fun: Callable[..., Any], *args: Any, compiler_options: Mapping[str, Any] | None = None, **jit_options: Any
) -> tuple[MemoryUse, Any]:
    """Compile `jit(fun)` for the shapes of `args`; returns its memory and the compiled program.

    Raises `CompileError` if the compiler fails or runs out of memory; the compiler's message is kept.
    """
    start = time.perf_counter()
    lowered = jax.jit(fun, **jit_options).lower(*jax.tree.map(abstract, args))
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        raise _explained(error) from error
    return MemoryUse.read(compiled, time.perf_counter() - start), compiled


def _explained(error: BaseException) -> CompileError:
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower() or isinstance(error, MemoryError):
        return CompileError(
            f"the compiler ran out of memory: {text.splitlines()[0] if text else error!r}. The program does not fit the "
            "device as it is. Cheapest fix: a smaller batch, or a smaller budget so that more is recomputed.",
            out_of_memory=True,
        )
    return CompileError(f"the compiler failed: {text}")


def measure(
    fun: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> MemoryUse:
    """Compile `jit(fun)` for the shapes of `args` and return the bytes that it needs, without executing it.

    **Arguments:** `fun` is any JAX function; wrap it in `jax.value_and_grad` to measure a gradient. `args` are arrays or
    `jax.ShapeDtypeStruct`s. `compiler_options` are those of `jax.jit`; left out, the memory-minimizing scheduler on CPU.

    **Raises:** `CompileError` if the compiler fails; `TargetError` for a target that is not there.
    """
    check_target(target)
    options = default_compiler_options() if compiler_options is None else compiler_options
    return compile_memory(fun, *args, compiler_options=options)[0]


def check_target(target: str | None) -> str:
    """The name of the target to compile for. Only this machine's backend can be one so far."""
    here = jax.default_backend()
    if target is None or target == here:
        return here
    raise TargetError(
        f"target {target!r} is not there: this machine compiles for {here!r} only. Cheapest fix: leave `target` out, or "
        f"run where JAX sees the device."
    )
