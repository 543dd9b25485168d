"""What is known of compilers: how they fuse and in which order they run. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """How a compiler turns a program into kernels.

    - `keeps_barriers`: `optimization_barrier` orders kernels until they are scheduled; otherwise it only keeps equal operations
        apart, and is gone before fusion.
    - `library_reductions`: reductions in float32 are calls of a library, which takes few of the operations around it; otherwise
        they fuse with what they reduce.
    - `products_take_operands`: what computes an operand of a product element by element is computed inside its kernel.
    - `copies_slices`: what an iteration of a loop reads of a stack is a copy in memory where it is not computed on at once.
    """

    name: str
    keeps_barriers: bool = True
    library_reductions: bool = False
    products_take_operands: bool = False
    copies_slices: bool = False


XLA_CPU = Compiler(name="XLA for CPUs", library_reductions=True)
"""From JAX 0.11 on."""

XLA_CPU_0_10 = Compiler(name="XLA for CPUs, JAX 0.10", keeps_barriers=False, library_reductions=True)
"""Up to JAX 0.10."""

XLA_TPU = Compiler(name="XLA for TPUs", products_take_operands=True)
"""A first guess, which compilations correct, as is the next."""

XLA_GPU = Compiler(name="XLA for GPUs", copies_slices=True)
"""Products are calls of libraries, or kernels with few operations around them."""
