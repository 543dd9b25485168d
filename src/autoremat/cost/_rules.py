"""One cost rule per primitive.

FLOPs follow the conventions of XLA's cost analysis where it counts at all: a multiply-add is two, every other
elementwise operation is one an output element, whatever the function; padding and dilation holes of a
convolution are not counted. (XLA files `exp` and its like under "transcendentals"; here they are FLOPs.)
Decompositions take the leading terms of Golub & Van Loan, "Matrix Computations", 4th edition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from autoremat.cost import _names as names
from autoremat.cost._model import Cost, CostRule, elements, nbytes
from autoremat.cost._registry import graph_cost, inner_cost, register_cost, unknown_cost
from autoremat.graph import Op, Value

Shape = tuple[int, ...]
Values = Sequence[Value]


def elementwise(flops: int = 1) -> CostRule:
    """Return the rule "`flops` FLOPs for each output element".

    For a device on which a function is dear: `register_cost("exp", fusible=True)(elementwise(8))`.
    """

    def rule(op: Op, inputs: Values, outputs: Values) -> Cost:
        return Cost(vector_flops=flops * elements(outputs), bytes_moved=_traffic(inputs, outputs))

    return rule


def _traffic(inputs: Values, outputs: Values) -> int:
    return nbytes(inputs) + nbytes(outputs)


def _shapes(op: Op, inputs: Values) -> tuple[Shape, ...]:
    """The shapes of all operands, literals included where the tracer has noted them."""
    noted = op.params.get("operand_shapes")
    return cast("tuple[Shape, ...]", noted) if noted is not None else tuple(v.shape for v in inputs)


def _ints(op: Op, name: str) -> Shape:
    return cast(Shape, op.params[name])


def _complex_factor(values: Values) -> int:
    """A complex multiply-add is four real ones."""
    return 4 if any(v.dtype.startswith("complex") for v in values) else 1


register_cost(*names.ARITHMETIC, *names.COMPARISON, *names.TRANSCENDENTAL, *names.SPECIAL, fusible=True)(
    elementwise()
)
register_cost(*names.COPY)(elementwise(0))


@register_cost(*names.VIEW, *names.CONSTANT, fusible=True)
def _view(op: Op, inputs: Values, outputs: Values) -> Cost:
    """What comes out is read, if there is something to read, and written."""
    return Cost(bytes_moved=nbytes(outputs) * (2 if inputs else 1))


@register_cost(
    *names.ANNOTATION, *names.REFERENCE, *names.SYNCHRONISATION, *names.COLLECTIVE_DONE, fusible=True
)
def _nothing(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost()


@register_cost("integer_pow", fusible=True)
def _integer_pow(op: Op, inputs: Values, outputs: Values) -> Cost:
    """Repeated squaring: `x**3` is two multiplications, `x**-3` a division more."""
    y = cast(int, op.params.get("y", 2))
    multiplications = max(y.bit_length() - 1 + y.bit_count() - 1, 0)
    return elementwise(multiplications + int(y < 0))(op, inputs, outputs)


@register_cost("device_put")
def _device_put(op: Op, inputs: Values, outputs: Values) -> Cost:
    """Without a destination it is the identity; with one, every byte is copied."""
    return Cost(bytes_moved=_traffic(inputs, outputs) if op.params.get("moves", True) else 0)


# --- products -----------------------------------------------------------------------------------------------


@register_cost("dot_general", "scaled_dot")
def _dot(op: Op, inputs: Values, outputs: Values) -> Cost:
    """2 · output elements · contracted elements."""
    (lhs_contract, _), _ = cast("tuple[tuple[Shape, Shape], object]", op.params["dimension_numbers"])
    lhs = _shapes(op, inputs)[0]
    flops = 2 * elements(outputs) * math.prod(lhs[d] for d in lhs_contract) * _complex_factor(outputs)
    return Cost(matrix_flops=flops, bytes_moved=_traffic(inputs, outputs))


@register_cost("ragged_dot", "ragged_dot_general")
def _ragged_dot(op: Op, inputs: Values, outputs: Values) -> Cost:
    """A row belongs to one group, so the groups together are one product.

    A compiler without a grouped kernel computes every group in full; that is not charged.
    """
    numbers = cast("tuple[tuple[tuple[Shape, Shape], object], Shape, Shape]", op.params["dimension_numbers"])
    ((lhs_contract, _), _), ragged, _ = numbers
    shapes = _shapes(op, inputs)
    lhs, groups = shapes[0], shapes[2][-1]
    outer = elements(outputs) // (groups if set(ragged) & set(lhs_contract) else 1)
    flops = 2 * outer * math.prod(lhs[d] for d in lhs_contract) * _complex_factor(outputs)
    return Cost(matrix_flops=flops, bytes_moved=_traffic(inputs, outputs))


@register_cost("scaled_matmul_wrapper", "scaled_matmul")
def _scaled_matmul(op: Op, inputs: Values, outputs: Values) -> Cost:
    """cuDNN's block-scaled product: `[B, M, K]` by `[B, N, K]`."""
    flops = 2 * elements(outputs) * _shapes(op, inputs)[0][-1]
    return Cost(matrix_flops=flops, bytes_moved=_traffic(inputs, outputs))


def _attention(products: int) -> CostRule:
    def rule(op: Op, inputs: Values, outputs: Values) -> Cost:
        query, key = _shapes(op, inputs)[:2]
        kv_length = key[1] if op.params.get("layout", 0) == 0 else key[2]
        flops = products * 2 * math.prod(query) * kv_length
        return Cost(matrix_flops=flops, bytes_moved=_traffic(inputs, outputs))

    return rule


# cuDNN's fused attention: two products forward, five backward (it computes the scores again).
register_cost(
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_fwd_wrapper",
)(_attention(2))
register_cost(
    "dot_product_attention_bwd",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_bwd_wrapper",
)(_attention(5))


@register_cost("conv_general_dilated")
def _conv(op: Op, inputs: Values, outputs: Values) -> Cost:
    """2 · batch · output features · input features of a group · valid (output, kernel) position pairs."""
    lhs_spec, rhs_spec, out_spec = cast("tuple[Shape, Shape, Shape]", op.params["dimension_numbers"])
    lhs, rhs = _shapes(op, inputs)[:2]
    out = outputs[0].shape
    padding = cast("tuple[tuple[int, int], ...]", op.params["padding"])
    strides, lhs_dilation, rhs_dilation = (
        _ints(op, p) for p in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    taps = 1
    for i in range(len(strides)):
        taps *= valid_taps(
            lhs[lhs_spec[i + 2]],
            rhs[rhs_spec[i + 2]],
            out[out_spec[i + 2]],
            stride=strides[i],
            pad_low=padding[i][0],
            lhs_dilation=lhs_dilation[i],
            rhs_dilation=rhs_dilation[i],
        )
    flops = 2 * out[out_spec[0]] * out[out_spec[1]] * rhs[rhs_spec[1]] * taps * _complex_factor(outputs)
    return Cost(matrix_flops=flops, bytes_moved=_traffic(inputs, outputs))


def valid_taps(
    size: int, kernel: int, out: int, *, stride: int, pad_low: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Return how many (output, kernel) positions of one dimension meet a real input element.

    Output position `o` and kernel position `k` meet at `o * stride + k * rhs_dilation - pad_low` of the
    dilated input, which is real if it is inside and a multiple of `lhs_dilation`.
    """
    if lhs_dilation == 1 and out < kernel:  # the same count: loop over the shorter one
        stride, rhs_dilation, out, kernel = rhs_dilation, stride, kernel, out
    span = (size - 1) * lhs_dilation + 1 if size else 0
    period = lhs_dilation // math.gcd(lhs_dilation, stride)
    count = 0
    for k in range(kernel):
        offset = k * rhs_dilation - pad_low
        first = max(-(offset // stride), 0)
        last = min((span - 1 - offset) // stride, out - 1)
        for o in range(first, min(first + period, last + 1)):
            if (o * stride + offset) % lhs_dilation == 0:
                count += (last - o) // period + 1
                break
    return count


# --- reductions and orders ----------------------------------------------------------------------------------


@register_cost(*names.REDUCTION)
def _reduction(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(vector_flops=elements(inputs), bytes_moved=_traffic(inputs, outputs))


@register_cost(*names.WINDOW_REDUCTION)
def _window_reduction(op: Op, inputs: Values, outputs: Values) -> Cost:
    window = math.prod(_ints(op, "window_dimensions"))
    return Cost(vector_flops=elements(outputs) * window, bytes_moved=_traffic(inputs, outputs))


@register_cost("select_and_scatter", "select_and_scatter_add")
def _select_and_scatter(op: Op, inputs: Values, outputs: Values) -> Cost:
    """The window of each source element is searched, then one element added."""
    source = math.prod(_shapes(op, inputs)[0])
    window = math.prod(_ints(op, "window_dimensions"))
    return Cost(vector_flops=source * (window + 1), bytes_moved=_traffic(inputs, outputs))


@register_cost("sort")
def _sort(op: Op, inputs: Values, outputs: Values) -> Cost:
    """n log2 n comparisons of `num_keys` keys each."""
    shape = _shapes(op, inputs)[0]
    n = shape[cast(int, op.params["dimension"])]
    keys = cast(int, op.params.get("num_keys", 1))
    return Cost(vector_flops=math.prod(shape) * _log2(n) * keys, bytes_moved=_traffic(inputs, outputs))


@register_cost("top_k", "approx_top_k")
def _top_k(op: Op, inputs: Values, outputs: Values) -> Cost:
    """As much as sorting the axis, an upper bound."""
    shape = _shapes(op, inputs)[0]
    n = shape[cast(int, op.params.get("axis", op.params.get("reduction_dimension", -1)))]
    return Cost(vector_flops=math.prod(shape) * _log2(n), bytes_moved=_traffic(inputs, outputs))


def _log2(n: int) -> int:
    """log2 rounded up, at least 1."""
    return max((n - 1).bit_length(), 1) if n > 0 else 1


# --- indexing: only what is touched moves -------------------------------------------------------------------


@register_cost("gather")
def _gather(op: Op, inputs: Values, outputs: Values) -> Cost:
    """Reads what it writes, and the indices; the rest of the operand is not touched."""
    return Cost(bytes_moved=2 * nbytes(outputs) + nbytes(inputs[1:]))


@register_cost("dynamic_update_slice")
def _dynamic_update_slice(op: Op, inputs: Values, outputs: Values) -> Cost:
    """In place, as XLA does it when it may: reads and writes the update's bytes."""
    update = math.prod(_shapes(op, inputs)[1])
    return Cost(bytes_moved=2 * update * _itemsize(outputs[0]))


def _scatter_cost(flops_per_update: int) -> CostRule:
    def rule(op: Op, inputs: Values, outputs: Values) -> Cost:
        """In place: for each update element, read the old and the new one and write; and the indices."""
        update = math.prod(_shapes(op, inputs)[2])
        moved = 3 * update * _itemsize(outputs[0]) + nbytes(inputs[1:2])
        return Cost(vector_flops=flops_per_update * update, bytes_moved=moved)

    return rule


register_cost("scatter")(_scatter_cost(0))
register_cost(*names.SCATTER_COMBINE)(_scatter_cost(1))


def _itemsize(value: Value) -> int:
    return -(-value.nbytes // value.size) if value.size else 0


@register_cost(*names.REFERENCE_ACCESS)
def _reference_access(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(bytes_moved=2 * nbytes(outputs))


@register_cost(*names.REFERENCE_UPDATE)
def _reference_update(op: Op, inputs: Values, outputs: Values) -> Cost:
    update = inputs[1:2]
    return Cost(vector_flops=elements(update), bytes_moved=3 * nbytes(update))


# --- random bits --------------------------------------------------------------------------------------------

_HASH_FLOPS = 60
"""Integer operations a 32-bit word: Threefry-2x32 makes two by 20 rounds of 5 and five key injections of 3."""

_GAMMA_FLOPS = 10 * _HASH_FLOPS
"""A rejection loop: a few rounds, each with a normal and a uniform. A rough estimate."""


def _words(values: Values) -> int:
    return -(-nbytes(values) // 4)


@register_cost(
    "random_bits", "random_seed", "random_split", "random_fold_in", "threefry2x32", "threefry4x32",
    "philox2x32", "philox4x32", "rng_bit_generator", "rng_uniform", fusible=True,
)  # fmt: skip
def _random(op: Op, inputs: Values, outputs: Values) -> Cost:
    """Counter-based: computed where it is read, from a key of a few bytes."""
    return Cost(vector_flops=_HASH_FLOPS * _words(outputs), bytes_moved=_traffic(inputs, outputs))


register_cost("random_gamma")(elementwise(_GAMMA_FLOPS))


# --- transforms and decompositions --------------------------------------------------------------------------


@register_cost("fft")
def _fft(op: Op, inputs: Values, outputs: Values) -> Cost:
    """5 n log2 n for a complex transform of length n, half for a real one (Cooley-Tukey)."""
    n = math.prod(_ints(op, "fft_lengths"))
    real = [v for v in (*inputs, *outputs) if not v.dtype.startswith("complex")]
    size = elements(real[:1] or outputs)
    factor = 2.5 if real else 5.0
    flops = math.ceil(factor * size * math.log2(n)) if n > 1 else size
    return Cost(vector_flops=flops, bytes_moved=_traffic(inputs, outputs))


def _decomposition(cubic: float) -> CostRule:
    """The rule "`cubic` · max(m, n) · min(m, n)²" for each matrix.

    Counted as vector FLOPs: libraries block some of it into products, but their panels dominate.
    """

    def rule(op: Op, inputs: Values, outputs: Values) -> Cost:
        *batch, m, n = _shapes(op, inputs)[0]
        flops = math.ceil(cubic * max(m, n) * min(m, n) ** 2) * math.prod(batch)
        return Cost(vector_flops=flops * _complex_factor(inputs), bytes_moved=_traffic(inputs, outputs))

    return rule


register_cost("cholesky")(_decomposition(1 / 3))
register_cost("lu")(_decomposition(2 / 3))
register_cost("qr", "geqrf", "geqp3", "householder_product")(_decomposition(2))
register_cost("ormqr", "symmetric_product")(_decomposition(4))
register_cost("tridiagonal")(_decomposition(4 / 3))
register_cost("hessenberg")(_decomposition(10 / 3))
register_cost("eigh")(_decomposition(9))
register_cost("svd")(_decomposition(22))
register_cost("eig", "schur")(_decomposition(25))


@register_cost("triangular_solve")
def _triangular_solve(op: Op, inputs: Values, outputs: Values) -> Cost:
    """n² for each right-hand side of length n."""
    n = _shapes(op, inputs)[0][-1]
    flops = n * elements(outputs) * _complex_factor(outputs)
    return Cost(vector_flops=flops, bytes_moved=_traffic(inputs, outputs))


@register_cost("tridiagonal_solve")
def _tridiagonal_solve(op: Op, inputs: Values, outputs: Values) -> Cost:
    """Thomas' algorithm: 8 FLOPs an unknown."""
    return elementwise(8)(op, inputs, outputs)


@register_cost("cholesky_update")
def _cholesky_update(op: Op, inputs: Values, outputs: Values) -> Cost:
    """A rank-one update: 4 FLOPs an entry."""
    return elementwise(4)(op, inputs, outputs)


register_cost("lu_pivots_to_permutation")(elementwise())


# --- communication ------------------------------------------------------------------------------------------


@register_cost(*names.ALL_REDUCE)
def _all_reduce(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(0, elements(inputs), _traffic(inputs, outputs), 2 * nbytes(inputs))


@register_cost(*names.REDUCE_SCATTER)
def _reduce_scatter(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(0, elements(inputs), _traffic(inputs, outputs), nbytes(inputs))


@register_cost(*names.GATHERED)
def _gathered(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(0, 0, _traffic(inputs, outputs), nbytes(outputs))


@register_cost(*names.PERMUTED)
def _permuted(op: Op, inputs: Values, outputs: Values) -> Cost:
    return Cost(0, 0, _traffic(inputs, outputs), nbytes(inputs))


# --- inner programs -----------------------------------------------------------------------------------------


@register_cost(*names.CALL)
def call_cost(op: Op, inputs: Values, outputs: Values) -> Cost:
    """All inner graphs, `op.trips` times each. A call whose program the tracer could not see is unknown."""
    return inner_cost(op) if op.inner else unknown_cost(op, inputs, outputs)


@register_cost("cond")
def branch_cost(op: Op, inputs: Values, outputs: Values) -> Cost:
    """The branch with the most FLOPs, bytes deciding a tie."""
    costs = [graph_cost(g) for g in op.inner]
    return max(costs, key=lambda c: (c.flops, c.bytes_moved), default=Cost())


@register_cost(*names.KERNEL)
def _kernel(op: Op, inputs: Values, outputs: Values) -> Cost:
    """The author's own estimate if there is one, else the arithmetic of all trips; operands moved once."""
    stated = cast("tuple[int, int, int] | None", op.params.get("cost_estimate"))
    if stated is not None:
        flops, transcendentals, moved = stated
        return Cost(matrix_flops=flops, vector_flops=transcendentals, bytes_moved=moved)
    inner = inner_cost(op)
    return Cost(inner.matrix_flops, inner.vector_flops, _traffic(inputs, outputs), inner.collective_bytes)
