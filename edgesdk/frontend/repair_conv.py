"""Repairs of convolutions, pools and Gemm: explicit padding, exact extents, 1-D as 2-D."""

from __future__ import annotations

import itertools
import math

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Attributes, Op, Repaired, refuse, repairs
from edgesdk.frontend.repair_basic import reduced

# A pool with a larger window than this gives no indices: each element would be a node.
INDEX_WINDOW_LIMIT = 128


def window(op: Op, kernel: list[int], spatial: tuple[int, ...]) -> tuple[list[int], ...]:
    """Returns (strides, dilations, pads at the begin, pads at the end), auto_pad resolved."""
    n = len(kernel)
    strides = list(op.attr("strides") or [1] * n)
    dilations = list(op.attr("dilations") or [1] * n)
    pads = list(op.attr("pads") or [0] * (2 * n))
    mode = op.attr("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = [0] * (2 * n)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * n)
        for i in range(n):
            outputs = -(-spatial[i] // strides[i])
            reach = dilations[i] * (kernel[i] - 1) + 1
            total = max(0, (outputs - 1) * strides[i] + reach - spatial[i])
            pads[i] = total // 2 if mode == "SAME_UPPER" else total - total // 2
            pads[i + n] = total - pads[i]
    elif mode not in ("NOTSET", ""):
        raise refuse(f"auto_pad {mode!r} is unknown")
    return strides, dilations, pads[:n], pads[n:]


def _kernel(op: Op, weight: Value) -> list[int]:
    return list(op.attr("kernel_shape") or weight.shape[2:])


def _two_dimensional(op: Op, x: Value) -> Value:
    """[N, C, W] as [N, C, 1, W]: one set of schedules serves both."""
    return op.b.reshape(x, (*x.shape[:2], 1, *x.shape[2:])) if x.rank == 3 else x


def _check_rank(x: Value) -> None:
    if not 3 <= x.rank <= 5:
        raise refuse(f"{x.rank - 2} spatial dimensions are not supported, only 1 to 3")


def biased(op: Op, x: Value, bias: Value | None) -> Value:
    if bias is None or (bias.const is not None and not bias.const.any()):
        return x
    return op.b("Add", x, op.b.reshape(bias, (1, bias.size, *[1] * (x.rank - 2))))


@repairs("Conv")
def _conv(op: Op) -> Repaired:
    x, weight = op[0], op[1]
    _check_rank(x)
    kernel = _kernel(op, weight)
    strides, dilations, before, after = window(op, kernel, x.shape[2:])
    result = conv(op, x, weight, strides, dilations, before, after, int(op.attr("group", 1)))
    return biased(op, result, op.get(2))


def conv(
    op: Op,
    x: Value,
    weight: Value,
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    group: int,
) -> Value:
    """A convolution over one to three spatial dimensions, without bias."""
    b, flat = op.b, x.rank == 3
    if any(p < 0 for p in (*before, *after)):
        for i, (low, high) in enumerate(zip(before, after, strict=True)):
            x = b.slice(x, i + 2, max(-low, 0), x.shape[i + 2] - max(-high, 0))
        before, after = [max(p, 0) for p in before], [max(p, 0) for p in after]
    for i, size in enumerate(x.shape[2:]):
        reach = dilations[i] * (weight.shape[i + 2] - 1) + 1
        if reach > size + before[i] + after[i]:
            raise refuse(f"its window is larger than the padded input {list(x.shape)}")
    if flat:
        strides, dilations = [1, *strides], [1, *dilations]
        before, after = [0, *before], [0, *after]
    result = b(
        "Conv",
        _two_dimensional(op, x),
        _two_dimensional(op, weight),
        strides=strides,
        dilations=dilations,
        pads=[*before, *after],
        group=group,
    )
    return b.reshape(result, (*result.shape[:2], result.shape[3])) if flat else result


@repairs("ConvTranspose")
def _conv_transpose(op: Op) -> Repaired:
    b, x, weight = op.b, op[0], op[1]
    _check_rank(x)
    kernel, n = _kernel(op, weight), x.rank - 2
    strides = list(op.attr("strides") or [1] * n)
    dilations = list(op.attr("dilations") or [1] * n)
    extra = list(op.attr("output_padding") or [0] * n)
    pads = list(op.attr("pads") or [0] * (2 * n))
    mode = op.attr("auto_pad", "NOTSET")
    wanted = list(op.attr("output_shape") or [])[-n:]
    if not wanted and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [d * s for d, s in zip(x.shape[2:], strides, strict=True)]
    if mode == "VALID":
        pads = [0] * (2 * n)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    whole = [(d - 1) * s + r for d, s, r in zip(x.shape[2:], strides, reach, strict=True)]
    for i in range(n if wanted else 0):
        total = max(0, whole[i] + extra[i] - wanted[i])
        pads[i] = total // 2 if mode == "SAME_UPPER" else total - total // 2
        pads[i + n] = total - pads[i]
    sizes = wanted or [whole[i] + extra[i] - pads[i] - pads[i + n] for i in range(n)]
    # The library pads no more than the kernel reaches; the rest is cut from, or added to, it.
    inner = [min(pads[i], reach[i] - 1) for i in range(n)]
    ends = [min(max(whole[i] - inner[i] - sizes[i], 0), reach[i] - 1) for i in range(n)]
    flat = x.rank == 3
    lead = [0] if flat else []
    result = b(
        "ConvTranspose",
        _two_dimensional(op, x),
        _two_dimensional(op, weight),
        strides=[1] * len(lead) + strides,
        dilations=[1] * len(lead) + dilations,
        pads=[*lead, *inner, *lead, *ends],
        group=int(op.attr("group", 1)),
    )
    if flat:
        result = b.reshape(result, (*result.shape[:2], result.shape[3]))
    for i in range(n):
        start = pads[i] - inner[i]
        stop = min(start + sizes[i], result.shape[i + 2])
        result = b.slice(result, i + 2, start, stop)
    short = [sizes[i] - result.shape[i + 2] for i in range(n)]
    if any(short):
        amounts = [0] * x.rank + [0, 0, *short]
        result = b("Pad", result, b.ints(amounts), b.constant(np.zeros((), x.dtype)))
    return biased(op, result, op.get(2))


def _pool_window(op: Op) -> tuple[list[int], ...]:
    """Returns (kernel, strides, dilations, begin, end, counted end) of a pool.

    `end` reaches as far as the last window, `counted end` only as far as the model's own padding.
    """
    x = op[0]
    _check_rank(x)
    kernel = list(op.attrs["kernel_shape"])
    strides, dilations, before, after = window(op, kernel, x.shape[2:])
    reached = []
    for i, size in enumerate(x.shape[2:]):
        reach = dilations[i] * (kernel[i] - 1) + 1
        span = size + before[i] + after[i] - reach
        steps = span // strides[i]
        if op.attr("ceil_mode", 0) and op.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
            steps = -(-span // strides[i])
            if steps * strides[i] >= size + before[i]:  # it would start in the padding
                steps -= 1
        if steps < 0:
            raise refuse(f"its window is larger than the padded input {list(x.shape)}")
        reached.append(max(after[i], steps * strides[i] + reach - size - before[i]))
    return kernel, strides, dilations, before, reached, after


def _pool(op: Op, kind: str, x: Value, sides: tuple[list[int], ...]) -> Value:
    kernel, strides, dilations, before, after = sides
    flat = x.rank == 3
    if flat:
        kernel, strides, dilations = [1, *kernel], [1, *strides], [1, *dilations]
        before, after = [0, *before], [0, *after]
    extra = {"dilations": dilations} if kind == "MaxPool" else {}
    result = op.b(
        kind,
        _two_dimensional(op, x),
        kernel_shape=kernel,
        strides=strides,
        pads=[*before, *after],
        **extra,
    )
    return op.b.reshape(result, (*result.shape[:2], result.shape[3])) if flat else result


@repairs("MaxPool")
def _max_pool(op: Op) -> Repaired:
    kernel, strides, dilations, before, after, _ = _pool_window(op)
    if op.wants(1):
        return _max_pool_indices(op, kernel, strides, dilations, before, after)
    return _pool(op, "MaxPool", op[0], (kernel, strides, dilations, before, after))


def _max_pool_indices(
    op: Op,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
) -> Repaired:
    """Compares the window's elements one after another; the first of equals wins."""
    b, x, n = op.b, op[0], len(kernel)
    if math.prod(kernel) > INDEX_WINDOW_LIMIT:
        raise refuse(f"indices of a pool over more than {INDEX_WINDOW_LIMIT} elements")
    lowest = -math.inf if x.is_float else np.iinfo(x.dtype).min
    pads = [0, 0, *before, 0, 0, *after]
    fill = b.constant(np.asarray(lowest, x.dtype))
    padded = b("Pad", x, b.ints(pads), fill) if any(pads) else x
    columns_first = bool(op.attr("storage_order", 0))
    lead = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * n)
    plane = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:])
    if columns_first:
        plane = plane.reshape(x.shape[:1:-1]).T
    flat = lead * plane.size + plane
    where = np.pad(flat, [(0, 0), (0, 0), *zip(before, after, strict=True)]).astype(np.int64)
    best, at = None, None
    for offset in itertools.product(*map(range, kernel)):
        value = padded
        picked: tuple[slice, ...] = (slice(None), slice(None))
        for i in range(n):
            start = offset[i] * dilations[i]
            reach = dilations[i] * (kernel[i] - 1) + 1
            stop = start + (padded.shape[i + 2] - reach) // strides[i] * strides[i] + 1
            value = b.slice(value, i + 2, start, stop, strides[i])
            picked += (slice(start, stop, strides[i]),)
        position = b.constant(where[picked])
        if best is None or at is None:
            best, at = value, position
            continue
        better = b("Greater", value, best)
        best, at = b("Where", better, value, best), b("Where", better, position, at)
    assert best is not None and at is not None
    return [best, at]


@repairs("AveragePool")
def _average_pool(op: Op) -> Repaired:
    b, x = op.b, op[0]
    kernel, strides, dilations, before, after, own = _pool_window(op)
    padding_counts = bool(op.attr("count_include_pad", 0))
    if any(d > 1 for d in dilations):
        return _counted_pool(op, (kernel, strides, dilations, before, after), own, padding_counts)
    if padding_counts and (any(before) or any(own)):
        amounts = [0, 0, *before, 0, 0, *own]
        x = b("Pad", x, b.ints(amounts), b.constant(np.zeros((), x.dtype)))
        after = [a - o for a, o in zip(after, own, strict=True)]
        before = [0] * len(before)
    return _pool(op, "AveragePool", x, (kernel, strides, dilations, before, after))


def _counted_pool(
    op: Op, sides: tuple[list[int], ...], own: list[int], padding_counts: bool
) -> Value:
    """A dilated average: the sum over the window by the number of elements that count."""
    b, x = op.b, op[0]
    total = window_sum(op, x, sides)
    counts = np.ones(x.shape[2:])
    _, _, _, before, after = sides
    pads = list(zip(before, own, strict=True))
    counts = np.pad(counts, pads, constant_values=1.0 if padding_counts else 0.0)
    counts = np.pad(counts, [(0, a - o) for a, o in zip(after, own, strict=True)])
    one = Op(op.kind, op.name, [], Attributes({}), [], op.opset, b)
    kernel, strides, dilations = sides[:3]
    none = [0] * len(kernel)
    plane = b.constant(counts.astype(x.dtype)[None, None])
    per_window = window_sum(one, plane, (kernel, strides, dilations, none, none))
    return b("Div", total, per_window)


def window_sum(op: Op, x: Value, sides: tuple[list[int], ...]) -> Value:
    """The sum over each window, as a convolution with ones, channel by channel."""
    kernel, strides, dilations, before, after = sides
    ones = op.b.constant(np.ones((x.shape[1], 1, *kernel), x.dtype))
    return conv(op, x, ones, strides, dilations, before, after, x.shape[1])


@repairs("LpPool")
def _lp_pool(op: Op) -> Repaired:
    b, x = op.b, op[0]
    kernel, strides, dilations, before, after, _ = _pool_window(op)
    p = int(op.attr("p", 2))
    size = b("Abs", x)
    power = size if p == 1 else b("Mul", x, x) if p == 2 else b("Pow", size, float(p))
    total = window_sum(op, power, (kernel, strides, dilations, before, after))
    return total if p == 1 else b("Sqrt", total) if p == 2 else b("Pow", total, 1.0 / p)


@repairs("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axes = list(range(2, x.rank))
    if op.kind == "GlobalAveragePool":
        return reduced(op, "ReduceMean", x, axes, True)
    if op.kind == "GlobalMaxPool":
        return reduced(op, "ReduceMax", x, axes, True)
    p = int(op.attr("p", 2))
    if p in (1, 2):
        return reduced(op, f"ReduceL{p}", x, axes, True)
    total = reduced(op, "ReduceSum", b("Pow", b("Abs", x), float(p)), axes, True)
    return b("Pow", total, 1.0 / p)


@repairs("Gemm")
def _gemm(op: Op) -> Repaired:
    b = op.b
    left = b.transpose(op[0], (1, 0)) if op.attr("transA", 0) else op[0]
    right = b.transpose(op[1], (1, 0)) if op.attr("transB", 0) else op[1]
    product = scaled(op, b("MatMul", left, right), float(op.attr("alpha", 1.0)))
    addend = op.get(2)
    beta = float(op.attr("beta", 1.0))
    if addend is None or beta == 0.0:
        return product
    return b("Add", product, scaled(op, addend, beta))


def scaled(op: Op, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else op.b("Mul", x, factor)
