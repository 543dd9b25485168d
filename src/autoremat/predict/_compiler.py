"""What is known of compilers: how they fuse and in which order they run. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """How a compiler turns a program into kernels.

    - `keeps_barriers`: `optimization_barrier` orders kernels until they are scheduled; otherwise it only keeps equal operations
        apart, and is gone before fusion.
    - `library_reductions`: reductions in float32 are calls of a library, which takes few of the operations around it; otherwise
        they fuse with what they reduce.
    - `limits_duplication`: what would be computed at many places of a kernel is read from memory instead.
    - `spreads_groups`: the derivative of a depthwise convolution in its kernel is that of a full one, of which the diagonal is summed up.
    - `lends_results`: temporaries live in the memory of results that are made later.
    - `shares_stacks`: the stacks that loops fill are zeros before, of which there is one array for all of a shape.
    - `writes_slices`: what an iteration of a loop writes into a stack is written there at once; otherwise it is kept to the end of the iteration.
    - `joins_apart`: long rows, or many arrays, are joined by a kernel that does nothing else.
    - `copies_into_loops`: what a loop starts from is copied if others read it too, and what it reads transposed.
    - `counts_trips`: the order of kernels depends on the counter of a loop, and on what its body reads of the state.
    - `fuses_views`: a view in another shape is an operation like others: what is read through one is computed once more by what can.
    - `divides_once`: a division is costly, and nothing costly is computed for each element of what it is broadcast to.
    - `products_take_operands`: what computes an operand of a product element by element is computed inside its kernel.
    - `copies_slices`: what an iteration of a loop reads of a stack is a copy in memory where it is not computed on at once.
    """

    name: str
    keeps_barriers: bool = True
    library_reductions: bool = False
    limits_duplication: bool = False
    spreads_groups: bool = False
    lends_results: bool = False
    shares_stacks: bool = False
    writes_slices: bool = False
    joins_apart: bool = False
    counts_trips: bool = False
    copies_into_loops: bool = False
    fuses_views: bool = False
    divides_once: bool = False
    products_take_operands: bool = False
    copies_slices: bool = False


XLA_CPU = Compiler(
    name="XLA for CPUs",
    library_reductions=True,
    limits_duplication=True,
    spreads_groups=True,
    lends_results=True,
    shares_stacks=True,
    joins_apart=True,
    divides_once=True,
    fuses_views=True,
    counts_trips=True,
    copies_into_loops=True,
    writes_slices=True,
    copies_slices=True,
)
"""From JAX 0.11 on."""

XLA_CPU_0_10 = replace(XLA_CPU, name="XLA for CPUs, JAX 0.10", keeps_barriers=False)
"""Up to JAX 0.10."""

XLA_TPU = Compiler(name="XLA for TPUs", products_take_operands=True)
"""A first guess, which compilations correct, as is the next."""

XLA_GPU = Compiler(name="XLA for GPUs", copies_slices=True)
"""Products are calls of libraries, or kernels with few operations around them."""
