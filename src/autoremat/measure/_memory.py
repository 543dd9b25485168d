"""Compile a function for shapes and read the compiler's memory analysis. Nothing is executed.

On CPU the compiler's peak field is arguments plus outputs, and on GPU it leaves out what is lost between buffers, so there the peak
is made from the parts: arguments + outputs + temporaries - aliases. The TPU compiler's peak is what it compares with the memory of
the device, and is taken as it is; its temporaries may be more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoremat._errors import CompileError
from autoremat.measure._cache import cached_use, store_use
from autoremat.measure._lower import abstract, lower, nbytes, place
from autoremat.target import Target, resolve

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a compiled program on one device.

    `peak_bytes` bounds what is alive at any time: arguments, outputs and temporaries, less the outputs that share memory with
    donated arguments. `seconds` is how long the compiler took. `flops` is the compiler's own count, which counts the body
    of a loop once, or `None` where it gives none. `compiler_reruns` is how many operations the compiler itself computes again to save
    memory, where it can (not on CPUs). `fits` is false where the compiler refused the program because it needs more than
    the device has: then the peak is the one that it named, to two decimals, and the temporaries are what it leaves. `cached`: read
    from an earlier compilation of the same program, on disk.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int
    seconds: float
    flops: float | None = None
    compiler_reruns: int = 0
    fits: bool = True
    cached: bool = False

    @classmethod
    def read(cls, compiled: Any, seconds: float, platform: str = "cpu") -> MemoryUse:
        """From a program compiled for a platform. Raises `CompileError` where the backend gives no analysis."""
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise CompileError(
                "the compiler of this backend gives no memory analysis, so no budget can be verified."
            )
        arguments = int(analysis.argument_size_in_bytes)
        outputs = int(analysis.output_size_in_bytes)
        temporaries = int(analysis.temp_size_in_bytes)
        aliases = int(analysis.alias_size_in_bytes)
        parts = arguments + outputs + temporaries - aliases
        return cls(
            argument_bytes=arguments,
            output_bytes=outputs,
            temp_bytes=temporaries,
            alias_bytes=aliases,
            peak_bytes=int(analysis.peak_memory_in_bytes) if platform == "tpu" else parts,
            seconds=seconds,
            flops=_flops(compiled),
            compiler_reruns=0 if platform == "cpu" else len(set(_RERUN.findall(compiled.as_text()))),
        )


_RERUN = re.compile(r"%([\w.-]+\.remat\d*(?:\.\d+)?) =")
"""What XLA's pass for rematerialization calls the copies that it makes."""


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


def compile_memory(
    fun: Callable[..., Any],
    *args: Any,
    target: Target | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> tuple[MemoryUse, Any]:
    """Compile `jit(fun)` for the shapes of `args`; returns its memory and the compiled program.

    Raises `CompileError` if the compiler fails or runs out of memory; the compiler's message is kept.
    """
    where = resolve(target)
    start = time.perf_counter()
    lowered = lower(fun, args, where)
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        raise _explained(error) from error
    return MemoryUse.read(compiled, time.perf_counter() - start, where.platform), compiled


def memory_of(
    fun: Callable[..., Any],
    *args: Any,
    target: Target,
    compiler_options: Mapping[str, Any],
) -> MemoryUse:
    """The memory of `jit(fun)` alone: of a program that was compiled before, in any process, it is read from disk.

    A program that the compiler refuses for the memory that it names has that as its peak, and does not fit. Raises `CompileError` if
    the compiler fails otherwise.
    """
    start = time.perf_counter()
    lowered = lower(fun, args, target)
    key, known = cached_use(MemoryUse, lowered, target, compiler_options)
    if known is not None:
        return known
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options))
        use = MemoryUse.read(compiled, time.perf_counter() - start, target.platform)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        refused = _refused(error, args, lowered, target, time.perf_counter() - start)
        if refused is None:
            raise _explained(error) from error
        use = refused
    store_use(key, use)
    return use


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")


def _refused(
    error: BaseException, args: Any, lowered: Any, target: Target, seconds: float
) -> MemoryUse | None:
    """What a compiler says that a program needs which does not fit its device; `None` if it says no such thing."""
    found = _NEEDED.search(str(error)) if "RESOURCE_EXHAUSTED" in str(error) else None
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    peak = int(float(number) * _UNITS[unit])
    placed = jax.tree.leaves(place(jax.tree.map(abstract, args), target))
    arguments = nbytes(placed)
    outputs, aliases = _returned(lowered, placed)
    return MemoryUse(
        argument_bytes=arguments,
        output_bytes=outputs,
        temp_bytes=max(0, peak - arguments - outputs + aliases),
        alias_bytes=aliases,
        peak_bytes=peak,
        seconds=seconds,
        fits=False,
    )


def _returned(lowered: Any, arguments: Sequence[Any]) -> tuple[int, int]:
    """Bytes of the results on one device, and of those among them that take the place of donated arguments.

    How results are divided is the compiler's to say, which refused: those of the type of an argument are taken to be divided as it is.
    """
    infos = [(x, info.donated) for x, info in zip(arguments, jax.tree.leaves(lowered.args_info), strict=True)]
    outputs = aliases = 0
    for out in jax.tree.leaves(lowered.out_info):
        alike = [i for i, (x, _) in enumerate(infos) if (x.shape, x.dtype) == (out.shape, out.dtype)]
        # Donated ones first: a compiler puts results there.
        found = min(alike, key=lambda i: not infos[i][1], default=None)
        like, donated = infos.pop(found) if found is not None else (out, False)
        outputs += nbytes([like])
        aliases += nbytes([like]) if donated else 0
    return outputs, aliases


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
    target: str | Target | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> MemoryUse:
    """Compile `jit(fun)` for the shapes of `args` and return the bytes that it needs, without executing it.

    **Arguments:** `fun` is any JAX function; wrap it in `jax.value_and_grad` to measure a gradient. `args` are arrays or
    `jax.ShapeDtypeStruct`s. `target` is where it would run, such as `"tpu:v5e"` (see `autoremat.targets`); left out, this machine's
    backend. `compiler_options` are those of `jax.jit`; left out, the memory-minimizing scheduler on CPU.

    **Raises:** `CompileError` if the compiler fails; `TargetError` for a target that is unknown, or whose compiler is missing.
    """
    where = resolve(target)
    options = default_compiler_options(where.platform) if compiler_options is None else compiler_options
    return memory_of(fun, *args, target=where, compiler_options=options)
