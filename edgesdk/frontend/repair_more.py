"""Repairs of operators that are written out as several: top-k, einsum, sequences, transforms."""

from __future__ import annotations

import math
import string

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.model import ValueHint
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs
from edgesdk.frontend.repair_basic import reduced

# TopK compares every pair of elements up to this length (64 million pairs take tens of ms) ...
PAIR_LIMIT = 8192
# ... and picks one maximum after another on longer axes, up to this many.
PICK_LIMIT = 64


@repairs("TopK")
def _top_k(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.attr("axis", -1), x.rank)
    k = int(op.attrs["k"]) if op.opset < 10 else op.int_list(1, "k")[0]
    largest = bool(op.attr("largest", 1))
    last = [i for i in range(x.rank) if i != axis] + [axis]
    rows = b.transpose(x, last)
    length = rows.shape[-1]
    if not 0 <= k <= length:
        raise refuse(f"its k is {k} on an axis of {length}")
    op.note("written out as comparisons; equal elements keep their order")
    if length > PAIR_LIMIT and k > PICK_LIMIT:
        raise refuse(
            f"k = {k} of {length} elements: above {PAIR_LIMIT} elements k is at most {PICK_LIMIT}"
        )
    choose = _by_rank if length <= PAIR_LIMIT else _one_by_one
    values, positions = choose(op, rows, k, largest)
    back = list(np.argsort(last))
    return [b.transpose(values, back), b.transpose(positions, back)]


def _by_rank(op: Op, rows: Value, k: int, largest: bool) -> tuple[Value, Value]:
    """An element's rank is the number of elements before it in the order."""
    b, length = op.b, rows.shape[-1]
    this = b.reshape(rows, (*rows.shape, 1))
    other = b.reshape(rows, (*rows.shape[:-1], 1, length))
    numbers = np.arange(length, dtype=np.int32)
    tie = b("Less", b.constant(numbers.reshape(1, -1)), b.constant(numbers.reshape(-1, 1)))
    ahead = b("Greater" if largest else "Less", other, this)
    ahead = b("Or", ahead, b("And", b("Equal", other, this), tie))
    rank = b("ReduceSum", b.cast(ahead, np.int32), b.ints([rows.rank]), keepdims=0)
    places = b.constant(np.arange(k, dtype=np.int32).reshape(-1, 1))
    at = b("Equal", b.reshape(rank, (*rows.shape[:-1], 1, length)), places)
    zero = b.constant(np.zeros((), rows.dtype))
    values = b("Where", at, other, zero)
    numbered = b("Where", at, b.constant(numbers), b.constant(np.zeros((), np.int32)))
    axes = b.ints([rows.rank])
    positions = b("ReduceSum", numbered, axes, keepdims=0)
    if rows.is_float or rows.dtype.name in ("int32", "int64"):
        picked = b("ReduceSum", values, axes, keepdims=0)
    else:
        picked = b.cast(b("ReduceSum", b.cast(values, np.int64), axes, keepdims=0), rows.dtype)
    return picked, b.cast(positions, np.int64)


def _one_by_one(op: Op, rows: Value, k: int, largest: bool) -> tuple[Value, Value]:
    b, axis = op.b, rows.rank - 1
    if rows.dtype.kind == "u" or not (rows.is_float or rows.dtype.kind == "i"):
        raise refuse(f"{rows.dtype.name} on an axis of more than {PAIR_LIMIT} elements")
    worst = -math.inf if rows.is_float else np.iinfo(rows.dtype).min
    if not largest:
        worst = math.inf if rows.is_float else np.iinfo(rows.dtype).max
    gone = b.constant(np.asarray(worst, rows.dtype))
    numbers = b.constant(np.arange(rows.shape[-1], dtype=np.int64))
    values, positions, left = [], [], rows
    for _ in range(k):
        at = b("ArgMax" if largest else "ArgMin", left, axis=axis, keepdims=1)
        values.append(b("GatherElements", rows, at, axis=axis))
        positions.append(at)
        left = b("Where", b("Equal", numbers, at), gone, left)
    return b.concat(values, axis), b.concat(positions, axis)


@repairs("Einsum")
def _einsum(op: Op) -> Repaired:
    operands = [op[i] for i in range(len(op.inputs))]
    terms, output = _equation(op.attrs["equation"], operands)
    parts = [_without_diagonals(op, v, t) for v, t in zip(operands, terms, strict=True)]
    value, labels = parts[0]
    for index, (other, more) in enumerate(parts[1:], start=1):
        later = set("".join(t for _, t in parts[index + 1 :])) | set(output)
        value, labels = _contracted(op, value, labels, other, more, later)
    value, labels = _summed(op, value, labels, set(output))
    return op.b.transpose(value, [labels.index(c) for c in output])


def _equation(text: str, operands: list[Value]) -> tuple[list[str], str]:
    """Splits an equation into one label per axis; an ellipsis becomes labels of its own."""
    text = text.replace(" ", "")
    left, arrow, right = text.partition("->")
    free = [c for c in string.ascii_letters if c not in text]
    inputs = left.split(",")
    if len(inputs) != len(operands):
        raise refuse(f"the equation {text!r} has {len(inputs)} terms for {len(operands)} inputs")
    dots = [v.rank - len(t.replace("...", "")) for v, t in zip(operands, inputs, strict=True)]
    wide = max((d for d, t in zip(dots, inputs, strict=True) if "..." in t), default=0)
    names = "".join(free[:wide])
    terms = [
        t.replace("...", names[wide - d :] if d else "") for t, d in zip(inputs, dots, strict=True)
    ]
    if any(len(t) != v.rank for t, v in zip(terms, operands, strict=True)):
        raise refuse(f"the equation {text!r} does not fit the ranks of its inputs")
    if arrow:
        return terms, right.replace("...", names)
    once = sorted(c for c in set("".join(terms)) if "".join(terms).count(c) == 1)
    return terms, names + "".join(c for c in once if c not in names)


def _without_diagonals(op: Op, value: Value, labels: str) -> tuple[Value, str]:
    b = op.b
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            rest = [i for i in range(value.rank) if i not in (first, second)]
            moved = b.transpose(value, [*rest, first, second])
            n = value.shape[first]
            flat = b.reshape(moved, (*moved.shape[:-2], n * n))
            value = b.slice(flat, flat.rank - 1, 0, n * n, n + 1)
            labels = "".join(labels[i] for i in rest) + label
    return value, labels


def _summed(op: Op, value: Value, labels: str, keep: set[str]) -> tuple[Value, str]:
    axes = [i for i, c in enumerate(labels) if c not in keep]
    if not axes:
        return value, labels
    result = reduced(op, "ReduceSum", value, axes, False)
    return result, "".join(c for c in labels if c in keep)


def _contracted(
    op: Op, x: Value, x_labels: str, y: Value, y_labels: str, later: set[str]
) -> tuple[Value, str]:
    """One matrix product: shared labels that stay are batches, the others are summed over."""
    b = op.b
    x, x_labels = _summed(op, x, x_labels, later | set(y_labels))
    y, y_labels = _summed(op, y, y_labels, later | set(x_labels))
    both = [c for c in x_labels if c in y_labels]
    batch = [c for c in both if c in later]
    inner = [c for c in both if c not in later]
    rows = [c for c in x_labels if c not in both]
    columns = [c for c in y_labels if c not in both]
    size = dict(zip(x_labels, x.shape, strict=True))
    for c, d in zip(y_labels, y.shape, strict=True):
        size[c] = max(size.get(c, 1), d)
    x = _ordered(op, x, x_labels, [batch, rows, inner], size)
    y = _ordered(op, y, y_labels, [batch, inner, columns], size)
    product = b("MatMul", x, y)
    labels = [*batch, *rows, *columns]
    return b.reshape(product, [size[c] for c in labels]), "".join(labels)


def _ordered(
    op: Op, value: Value, labels: str, groups: list[list[str]], size: dict[str, int]
) -> Value:
    """Brings the groups of labels into order, each flattened to one axis."""
    b = op.b
    order = [c for group in groups for c in group]
    moved = b.transpose(value, [labels.index(c) for c in order])
    moved = b.expand(moved, [size[c] for c in order])
    return b.reshape(moved, [math.prod(size[c] for c in group) for group in groups])


@repairs("ReverseSequence")
def _reverse_sequence(op: Op) -> Repaired:
    b, x = op.b, op[0]
    time, batch = op.attr("time_axis", 0), op.attr("batch_axis", 1)
    length, count = x.shape[time], x.shape[batch]
    op.hint(op[1], ValueHint(1, length))
    lengths = b.reshape(b.cast(op[1], np.int64), (count, 1))
    steps = b.constant(np.arange(length, dtype=np.int64).reshape(1, length))
    one = b.constant(np.asarray(1, np.int64))
    mirrored = b("Sub", b("Sub", lengths, one), steps)
    source = b("Where", b("Less", steps, lengths), mirrored, steps)  # [batch, time]
    shape = [1] * x.rank
    shape[time], shape[batch] = length, count
    if time < batch:
        source = b.transpose(source, (1, 0))
    index = b.expand(b.reshape(source, shape), x.shape)
    return b("GatherElements", x, index, axis=time)


@repairs("MaxUnpool")
def _max_unpool(op: Op) -> Repaired:
    b, x = op.b, op[0]
    kernel = list(op.attrs["kernel_shape"])
    n = len(kernel)
    strides = list(op.attr("strides") or [1] * n)
    pads = list(op.attr("pads") or [0] * (2 * n))
    target = [*x.shape[:2]] + [
        (d - 1) * s - p - q + k
        for d, s, p, q, k in zip(x.shape[2:], strides, pads[:n], pads[n:], kernel, strict=True)
    ]
    if op.get(2) is not None:  # ONNX Runtime takes the indices as positions in what it is given
        target = op.int_list(2, "dimensions")
    zeros = b.constant(np.zeros((math.prod(target),), x.dtype))
    flat = b("ScatterElements", zeros, b.reshape(op[1], (x.size,)), b.reshape(x, (x.size,)),
             axis=0, reduction="none")  # fmt: skip
    return b.reshape(flat, target)


@repairs("Col2Im")
def _col2im(op: Op) -> Repaired:
    """Adds every column to the place it was taken from: one scatter with constant indices."""
    b, x = op.b, op[0]
    image, block = op.int_list(1, "image shape"), op.int_list(2, "block shape")
    n = len(image)
    strides = list(op.attr("strides") or [1] * n)
    dilations = list(op.attr("dilations") or [1] * n)
    pads = list(op.attr("pads") or [0] * (2 * n))
    padded = [image[i] + pads[i] + pads[i + n] for i in range(n)]
    steps = [(padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(n)]
    offsets = np.meshgrid(*[np.arange(block[i]) * dilations[i] for i in range(n)], indexing="ij")
    starts = np.meshgrid(*[np.arange(steps[i]) * strides[i] for i in range(n)], indexing="ij")
    at = [o.reshape(-1, 1) + s.reshape(1, -1) for o, s in zip(offsets, starts, strict=True)]
    flat = np.ravel_multi_index([a.reshape(-1) for a in at], padded).astype(np.int64)
    rows = x.shape[0] * x.shape[1] // math.prod(block)
    table = b.constant(np.zeros((rows, math.prod(padded)), x.dtype))
    index = b.constant(np.broadcast_to(flat, (rows, len(flat))))
    total = b("ScatterElements", table, index, b.reshape(x, (rows, len(flat))),
              axis=1, reduction="add")  # fmt: skip
    result = b.reshape(total, (x.shape[0], rows // x.shape[0], *padded))
    for i in range(n):
        result = b.slice(result, i + 2, pads[i], pads[i] + image[i])
    return result


@repairs("DFT")
def _dft(op: Op) -> Repaired:
    x = op[0]
    if op.opset < 20:
        axis = op.attr("axis", 1)
    else:
        axis = op.int_list(2, "axis")[0] if op.get(2) is not None else -2
    axis = positive_axis(axis, x.rank)
    length = op.int_list(1, "length")[0] if op.get(1) is not None else x.shape[axis]
    inverse, onesided = bool(op.attr("inverse", 0)), bool(op.attr("onesided", 0))
    if inverse and onesided:
        raise refuse("an inverse of one side is not supported")
    if length < x.shape[axis]:
        x = op.b.slice(x, axis, 0, length)
    elif length > x.shape[axis]:
        pads = [0] * (2 * x.rank)
        pads[x.rank + axis] = length - x.shape[axis]
        zero = op.b.constant(np.zeros((), x.dtype))
        x = op.b("Pad", x, op.b.ints(pads), zero)
    return _fourier(op, x, axis, inverse, onesided)


def _fourier(op: Op, x: Value, axis: int, inverse: bool, onesided: bool) -> Value:
    """The discrete Fourier transform as a product with cosines and sines. [..., 1 or 2] at last."""
    b, n = op.b, x.shape[axis]
    bins = n // 2 + 1 if onesided else n
    sign = 1.0 if inverse else -1.0
    turn = sign * 2 * np.pi * (np.outer(np.arange(n), np.arange(bins)) % n) / n
    cosine, sine = np.cos(turn), np.sin(turn)
    if inverse:
        cosine, sine = cosine / n, sine / n
    # [n * parts, bins * 2]: real and imaginary parts interleaved as the last axis has them.
    table = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], 1)
    parts = x.shape[-1]
    matrix = table[:, :parts].reshape(n * parts, bins * 2)
    last = [i for i in range(x.rank - 1) if i != axis]
    moved = b.transpose(x, [*last, axis, x.rank - 1])
    flat = b.reshape(moved, (*moved.shape[:-2], n * parts))
    product = b("MatMul", flat, b.constant(matrix.astype(x.dtype)))
    result = b.reshape(product, (*moved.shape[:-2], bins, 2))
    order = [*last, axis, x.rank - 1]
    return b.transpose(result, [order.index(i) for i in range(x.rank)])


@repairs("STFT")
def _stft(op: Op) -> Repaired:
    """Inputs: signal [batch, samples(, 1 or 2)], step, window, length."""
    b, x = op.b, op[0]
    if x.rank == 2:
        x = b.reshape(x, (*x.shape, 1))
    step = op.int_list(1, "step")[0]
    given = op.get(2)
    if op.get(3) is not None:
        length = op.int_list(3, "length")[0]
    elif given is not None:
        length = given.shape[0]
    else:
        raise refuse("it has neither a window nor a length")
    frames = (x.shape[1] - length) // step + 1
    starts = np.arange(frames).reshape(-1, 1) * step + np.arange(length)
    cut = b("Gather", x, b.constant(starts.astype(np.int64)), axis=1)
    if given is not None:
        cut = b("Mul", cut, b.reshape(given, (length, 1)))
    onesided = bool(op.attr("onesided", 1)) and x.shape[-1] == 1
    return _fourier(op, cut, 2, False, onesided)


@repairs("MelWeightMatrix")
def _mel(op: Op) -> Repaired:
    if any(op[i].const is None for i in range(5)):
        raise refuse("its parameters are computed at run time")
    return op.b("MelWeightMatrix", *op.inputs, output_datatype=op.attr("output_datatype", 1))


@repairs("Det")
def _det(op: Op) -> Repaired:
    b, x = op.b, op[0]
    n = x.shape[-1]
    if n > 4:
        raise refuse(f"determinants of {n}x{n} matrices are not supported, only up to 4x4")

    def entry(i: int, j: int) -> Value:
        row = b.slice(x, x.rank - 2, i, i + 1)
        return b.reshape(b.slice(row, x.rank - 1, j, j + 1), x.shape[:-2])

    def minor(rows: list[int], columns: list[int]) -> Value:
        if len(rows) == 1:
            return entry(rows[0], columns[0])
        total: Value | None = None
        for sign, column in enumerate(columns):
            rest = [c for c in columns if c != column]
            term = b("Mul", entry(rows[0], column), minor(rows[1:], rest))
            sign_word = "Sub" if sign % 2 else "Add"
            total = term if total is None else b(sign_word, total, term)
        assert total is not None
        return total

    return minor(list(range(n)), list(range(n)))


@repairs("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
         "RandomUniformLike")  # fmt: skip
def _random(op: Op) -> Repaired:
    raise refuse("it draws random numbers; export the model in inference mode")
