"""Which dimensions of operands and results belong together: the rule of each primitive.

    dot_general  [b, i, k] x [k, j] -> [b, i, j]         numbers are factors, as letters are here
    reduce_sum   [b, i] -> [b]                           a factor that no result has is summed over
    sort         [b, None] -> [b, None]                  `None`: the dimension has to be whole

The view of Shardy (github.com/openxla/shardy, "sharding rules"): to divide a factor divides every dimension that has it.
Only shapes and parameters are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of the dimensions of each operand and each result."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]


Maker = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], Rule]


def rule_of(
    name: str, params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]
) -> Rule:
    """The rule of an equation. What is unknown has to be whole, unless all its arrays have one shape."""
    maker = _RULES.get(name, _pointwise)
    return maker(params, operands, results)


def _numbered(shape: Shape) -> Dims:
    return tuple(range(len(shape)))


def _whole(shape: Shape) -> Dims:
    return (None,) * len(shape)


def _pointwise(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """All arrays of one shape, beside scalars and dimensions of one element; anything else has to be whole."""
    shapes = [s for s in (*operands, *results) if s]
    sizes = tuple(max(column) for column in zip(*shapes, strict=False))
    if any(
        len(s) != len(sizes) or any(n not in (1, m) for n, m in zip(s, sizes, strict=True)) for s in shapes
    ):
        return Rule(tuple(map(_whole, operands)), tuple(map(_whole, results)))

    def dims(shape: Shape) -> Dims:
        return tuple(d if n == sizes[d] else None for d, n in enumerate(shape))

    return Rule(tuple(map(dims, operands)), tuple(map(dims, results)))


def _pointwise_but(*names: str) -> Maker:
    """Pointwise in all dimensions but those that these parameters name."""

    def make(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        blocked = {d for n in names if n in params for d in _listed(params[n])}

        def dims(shape: Shape) -> Dims:
            return tuple(None if d in blocked else d for d in range(len(shape)))

        return Rule(tuple(map(dims, operands)), tuple(map(dims, results)))

    return make


def _listed(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _where_equal(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Dimensions of the first operand and the results that are of equal size; the rest, and other operands, whole."""
    first, result = operands[0], results[0]

    def dims(shape: Shape) -> Dims:
        if len(shape) != len(result):
            return _whole(shape)
        return tuple(
            d if len(first) > d and shape[d] == result[d] == first[d] else None for d in range(len(shape))
        )

    return Rule(tuple(map(dims, operands)), tuple(map(dims, results)))


def _last_whole(count: int) -> Maker:
    """Batched in all but the last `count` dimensions."""

    def make(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        batch = results[0][: max(0, len(results[0]) - count)]

        def dims(shape: Shape) -> Dims:
            n = len(batch) if shape[: len(batch)] == batch else 0
            return tuple(d if d < n else None for d in range(len(shape)))

        return Rule(tuple(map(dims, operands)), tuple(map(dims, results)))

    return make


def _first_only(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """A kernel over a batch: the first dimension of all arrays that are as long there as the first result."""
    batch = results[0][0] if results[0] else 0

    def dims(shape: Shape) -> Dims:
        return tuple(0 if d == 0 and n == batch else None for d, n in enumerate(shape))

    return Rule(tuple(map(dims, operands)), tuple(map(dims, results)))


def _reduce(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    axes = set(params["axes"] if "axes" in params else params["dimensions"])
    kept = tuple(d for d in range(len(operands[0])) if d not in axes)
    return Rule(
        tuple(_numbered(s) if s else () for s in operands),
        tuple(kept for _ in results),
    )


def _dot_general(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    (contract_l, contract_r), (batch_l, batch_r) = params["dimension_numbers"]
    lhs = list(range(len(operands[0])))
    rhs: list[int | None] = [len(lhs) + d for d in range(len(operands[1]))]
    for a, b in (*zip(contract_l, contract_r, strict=True), *zip(batch_l, batch_r, strict=True)):
        rhs[b] = lhs[a]
    free_l = [lhs[d] for d in range(len(lhs)) if d not in (*contract_l, *batch_l)]
    free_r = [rhs[d] for d in range(len(rhs)) if d not in (*contract_r, *batch_r)]
    result = (*(lhs[d] for d in batch_l), *free_l, *free_r)
    rest = tuple(map(_whole, operands[2:]))
    return Rule((tuple(lhs), tuple(rhs), *rest), (result,))


def _conv(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Batch, input and output features; windows would have to exchange their borders."""
    dims = params["dimension_numbers"]
    one_group = params["feature_group_count"] == params["batch_group_count"] == 1
    batch, contracted, made = 0, 1 if one_group else None, 2 if one_group else None
    alone = params["batch_group_count"] == 1

    def put(spec: Sequence[int], first: int | None, second: int | None) -> Dims:
        found: list[int | None] = [None] * len(spec)
        found[spec[0]], found[spec[1]] = first, second
        return tuple(found)

    return Rule(
        (
            put(dims.lhs_spec, batch if alone else None, contracted),
            put(dims.rhs_spec, made, contracted),
        ),
        (put(dims.out_spec, batch if alone else None, made),),
    )


def _broadcast(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    operand, result = operands[0], results[0]
    where = params["broadcast_dimensions"]
    dims = tuple(r if operand[d] == result[r] else None for d, r in enumerate(where))
    return Rule((dims, *map(_whole, operands[1:])), (_numbered(result),))


def _transpose(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    return Rule((_numbered(operands[0]),), (tuple(params["permutation"]),))


def _squeeze(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    gone = {d % len(operands[0]) for d in params["dimensions"]}
    dims = tuple(None if d in gone else d for d in range(len(operands[0])))
    return Rule((dims,), (tuple(d for d in dims if d is not None),))


def _expand(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    new = set(params["dimensions"])
    dims = tuple(None if d in new else d for d in range(len(results[0])))
    return Rule((tuple(d for d in dims if d is not None),), (dims,))


def _reshape(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """The first dimension of each group that is split or joined: in row-major order the others are not contiguous."""
    operand, result = operands[0], results[0]
    into: list[int | None] = [None] * len(operand)
    out: list[int | None] = [None] * len(result)
    i = j = factor = 0
    while i < len(operand) and j < len(result):
        a, b = i + 1, j + 1
        left, right = operand[i], result[j]
        while left != right and (a < len(operand) if left < right else b < len(result)):
            if left < right:
                left, a = left * operand[a], a + 1
            else:
                right, b = right * result[b], b + 1
        if left != right:
            break
        first = next((d for d in range(i, a) if operand[d] > 1), None)
        second = next((d for d in range(j, b) if result[d] > 1), None)
        if first is not None and second is not None:
            into[first] = out[second] = factor
            factor += 1
        i, j = a, b
    return Rule((tuple(into), *map(_whole, operands[1:])), (tuple(out),))


def _gather(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand, indices, result = _indexed(
        operands[0],
        operands[1],
        results[0],
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        lambda d: sizes[d] == operands[0][d],
    )
    return Rule((operand, indices, *map(_whole, operands[2:])), (result,))


def _scatter(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    numbers = params["dimension_numbers"]
    windows = [
        d
        for d in range(len(operands[0]))
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    sizes = dict(zip(windows, (operands[2][d] for d in numbers.update_window_dims), strict=True))
    operand, indices, updates = _indexed(
        operands[0],
        operands[1],
        operands[2],
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        lambda d: sizes.get(d) == operands[0][d],
    )
    return Rule((operand, indices, updates), (operand,))


def _indexed(
    operand: Shape,
    indices: Shape,
    slices: Shape,
    offset: Sequence[int],
    collapsed: Sequence[int],
    batching: Sequence[int],
    indices_batching: Sequence[int],
    is_full: Callable[[int], bool],
) -> tuple[Dims, Dims, Dims]:
    """Factors of an operand, of indices into it, and of the slices that they select: see `jax.lax.gather`.

    Dimensions that are taken whole belong to the operand and the slices, all others of the slices to the indices.
    """
    window = [d for d in range(len(operand)) if d not in (*collapsed, *batching)]
    of_operand: list[int | None] = [None] * len(operand)
    of_slices: list[int | None] = [None] * len(slices)
    for d, o in zip(window, offset, strict=True):
        if is_full(d):
            of_operand[d] = of_slices[o] = d
    base = len(operand)
    of_indices: list[int | None] = [base + d for d in range(len(indices))]
    if of_indices:
        of_indices[-1] = None
    outer = [d for d in range(len(slices)) if d not in offset]
    for i, s in enumerate(outer):
        of_slices[s] = base + i
    for d, i in zip(batching, indices_batching, strict=True):
        of_operand[d] = base + i
    return tuple(of_operand), tuple(of_indices), tuple(of_slices)


def _joined(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Parts of arrays, dimension by dimension: devices exchange borders at most. Other operands are scalars."""
    rank = len(results[0])
    return Rule(tuple(_numbered(s) if len(s) == rank else _whole(s) for s in operands), (tuple(range(rank)),))


def _stack(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    axis = params["axis"] % len(results[0])
    dims = tuple(None if d == axis else d - (d > axis) for d in range(len(results[0])))
    return Rule(tuple(map(_numbered, operands)), (dims,))


def _unstack(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    stacked = _stack(params, results, operands)
    return Rule(stacked.results, stacked.operands)


def _tile(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    dims = tuple(d if n == m else None for d, (n, m) in enumerate(zip(operands[0], results[0], strict=True)))
    return Rule((dims,), (dims,))


def _leading(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Dimensions that the first operand and the results begin with alike."""
    common = 0
    for sizes in zip(*operands[:1], *results, strict=False):
        if len(set(sizes)) > 1:
            break
        common += 1

    def dims(shape: Shape) -> Dims:
        return tuple(d if d < common else None for d in range(len(shape)))

    return Rule((dims(operands[0]), *map(_whole, operands[1:])), tuple(map(dims, results)))


def _drawn(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Bits drawn from keys: each key makes what is its own, any part of it alone."""
    return Rule(tuple(map(_numbered, operands)), tuple(map(_numbered, results)))


def _made(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Made out of nothing that is divided: any part of it can be made alone."""
    return Rule(tuple(map(_whole, operands)), tuple(map(_numbered, results)))


def _for(maker: Maker, names: str) -> dict[str, Maker]:
    return dict.fromkeys(names.split(), maker)


_RULES: Mapping[str, Maker] = {
    **_for(_dot_general, "dot_general scaled_dot"),
    **_for(_conv, "conv_general_dilated"),
    **_for(_broadcast, "broadcast_in_dim"),
    **_for(_transpose, "transpose"),
    **_for(_squeeze, "squeeze"),
    **_for(_expand, "expand_dims"),
    **_for(_reshape, "reshape"),
    **_for(_gather, "gather"),
    **_for(_scatter, "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"),
    **_for(
        _reduce,
        "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin",
    ),
    **_for(_joined, "concatenate slice pad"),
    **_for(_stack, "stack"),
    **_for(_unstack, "unstack"),
    **_for(_tile, "tile"),
    **_for(_leading, "random_wrap random_unwrap random_seed random_split bitcast_convert_type"),
    **_for(_drawn, "random_bits"),
    **_for(_pointwise_but("axis"), "cumsum cumprod cummax cummin cumlogsumexp split all_gather"),
    **_for(_pointwise_but("dimension"), "sort"),
    **_for(_last_whole(1), "top_k approx_top_k fft tridiagonal"),
    **_for(
        _last_whole(2),
        "cholesky lu qr geqrf geqp3 householder_product ormqr eigh svd eig schur hessenberg triangular_solve",
    ),
    **_for(
        _where_equal,
        "dynamic_slice dynamic_update_slice rev reduce_window reduce_window_sum reduce_window_max "
        "reduce_window_min select_and_scatter_add select_and_gather_add select_and_scatter",
    ),
    **_for(_first_only, "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"),
    **_for(_made, "iota rng_bit_generator rng_uniform"),
}
