"""The primitives in groups that share a rule, each with the reason why it does.

No group is "everything in that module": a new primitive of JAX is unknown, with a warning, until somebody
has put it here.
"""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ARITHMETIC = _names("""
    abs add add_any and cbrt ceil clamp clz complex conj div floor imag is_finite max min mul mulhi
    neg nextafter not one_minus_square or population_count polynomial real reciprocal rem round sign sqrt
    square sub xor rsqrt shift_left shift_right_arithmetic shift_right_logical select_n convert_element_type
    reduce_precision
""")
"""One arithmetic instruction an element, or a few; the compiler fuses them.

A conversion is an instruction too.
"""

COMPARISON = _names("eq ne lt le gt ge eq_to lt_to le_to")
"""One comparison an element, fused."""

TRANSCENDENTAL = _names("""
    acos acosh asin asinh atan atan2 atanh cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic
    pow sin sinh tan tanh
""")
"""Many instructions an element, but one FLOP by convention, so that counts compare across tools; fused."""

SPECIAL = _names("""
    bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma regularized_incomplete_beta
    zeta
""")
"""Series and continued fractions: one FLOP an element by the same convention; fused as one loop."""

VIEW = _names("""
    bitcast_convert_type broadcast_in_dim broadcast_to expand_dims from_edtype reshape rev slice split squeeze
    stack tile to_edtype transpose unstack pad dynamic_slice
""")
"""Another indexing of the same elements: the compiler folds it into the reader, or into the layout."""

CONSTANT = _names(
    "iota iota_2x32_shape empty empty2 zeros_like program_id num_programs axis_index platform_index"
)
"""Made from nothing where it is read: no arithmetic worth counting, no memory read."""

ANNOTATION = _names("""
    name stop_gradient optimization_barrier add_dependency tie stage program_order sharding_constraint
    layout_constraint shard_alike xla_metadata_value random_wrap random_unwrap random_clone pvary
    vary_unreduced_cast vary_unreduced_cast_p reduced_vary_cast reduced_vary_cast_p preduced create_token
    after_all dce_sink inspect_sharding dimension_size dim_as_value shape_assertion has_memory_space
    multiple_of max_contiguous unreachable with_memory_space_constraint pin unpin
""")
"""Says something about a value, or orders two of them, and computes nothing: the result is the operand."""

REFERENCE = _names("new_ref freeze empty_ref free_ref create_linear")
"""Making and ending a mutable array: at worst a copy, which its reads and writes are charged."""

COPY = _names("copy copy_p concatenate reshard relayout")
"""Every byte is read and written once, as its own kernel: no arithmetic."""

SYNCHRONISATION = _names("""
    semaphore_read semaphore_signal semaphore_wait semaphore_signal_multicast semaphore_signal_parallel
    get_barrier_semaphore barrier delay dma_start dma_wait debug_barrier debug_callback debug_print check
""")
"""Waiting inside a kernel, and debugging output: no arithmetic, and time that no model knows."""

REDUCTION = _names("""
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
""")
"""One FLOP an input element. Not fusible: the readers need it finished."""

WINDOW_REDUCTION = _names("reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add")
"""One FLOP an output element and window position."""

SCATTER_COMBINE = _names("scatter-add scatter-sub scatter-mul scatter-max scatter-min")
"""One FLOP an update element."""

REFERENCE_UPDATE = _names("addupdate accum_grad_in_ref")
"""One FLOP an element that is added to a mutable array."""

REFERENCE_ACCESS = _names("get swap masked_load masked_swap load store get_global")
"""Reading or writing a part of a mutable array: its bytes twice."""

ALL_REDUCE = _names("""
    psum psum_invariant pmax pmin psum_start psum_invariant_start unreduced_psum unreduced_psum_start
    unreduced_pmax unreduced_pmin
""")
"""A ring sends each byte twice (reduce, then gather), and each element is combined once."""

REDUCE_SCATTER = _names("""
    reduce_scatter reduce_scatter_start unreduced_reduce_scatter unreduced_reduce_scatter_start
""")
"""A ring sends each byte of the operand once, and combines it."""

GATHERED = _names("""
    all_gather all_gather_invariant all_gather_reduced all_gather_start all_gather_reduced_start
    pbroadcast pbroadcast_start pbroadcast_dynamic ragged_all_to_all
""")
"""A device receives, and sends on, each byte of the result once."""

PERMUTED = _names("all_to_all all_to_all_start ppermute ppermute_start psend precv")
"""A device sends each byte of the operand once."""

COLLECTIVE_DONE = _names("""
    psum_done reduce_scatter_done all_gather_done all_to_all_done ppermute_done pbroadcast_done
""")
"""The end of a collective whose start has been charged."""

CALL = _names("""
    jit pjit closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_jvp_call_jaxpr custom_vmap_call custom_partitioning custom_linear_solve linear_call eval_jaxpr
    composite compute_on xla_metadata_call remat_opt call_hi_primitive shard_map run_state core_map run_scoped
    jaxpr_call fusible custom_fusion cudnn_fusion scan while autoremat_checkpoint autoremat_linear
    autoremat_scan autoremat_sweep autoremat_linear_map
""")
"""Runs its inner programs, `op.trips` times each, and nothing else.

`scan` has as many trips as its length. `while` has one: the number is unknown before it runs, so its
condition and its body are charged once, too little whenever it loops. `shard_map` costs what one shard costs.
"""

KERNEL = _names("pallas_call reduce reduce_window")
"""Runs an inner program many times as *one* kernel: operands and results move once."""
