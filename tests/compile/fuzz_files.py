"""Damaged and inconsistent ONNX files: whatever is in them, the end is a clean error or a report.

Run as a program it is the process that reads the files, so that a crash is seen from outside:
python fuzz_files.py FOLDER reads FOLDER/*.onnx and prints a line for each.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

# What one file may take: far more than reading a small model needs.
LIMIT_S = 30
LIMIT_BYTES = 12 << 30


def mutations(model: onnx.ModelProto, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields `count` damaged forms of `model`: how each was made, and the file's content."""
    rng = random.Random(seed)
    content = model.SerializeToString()
    kinds = [_flip, _truncate, _cut_out, _repeat, _swap_type, _swap_shape, _swap_operator]
    kinds += [_swap_inputs, _swap_attribute, _swap_opset, _drop_node]
    for index in range(count):
        kind = kinds[index % len(kinds)]
        if kind in (_flip, _truncate, _cut_out, _repeat):
            data = bytearray(content)
            kind(data, rng)
            yield kind.__name__, bytes(data)
        else:
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            kind(copy, rng)
            yield kind.__name__, copy.SerializeToString()


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _cut_out(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 40)]


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randint(1, 40)]


def _swap_type(model: Any, rng: random.Random) -> None:
    graph = model.graph
    info = rng.choice([*graph.input, *graph.output])
    if graph.initializer and rng.random() < 0.5:
        rng.choice(graph.initializer).data_type = rng.randint(0, 25)
    else:
        info.type.tensor_type.elem_type = rng.randint(0, 25)


def _swap_shape(model: Any, rng: random.Random) -> None:
    graph = model.graph
    number = rng.choice((-1, 0, 1, 2, 3, 5, 1000, 2**31, 2**62))
    if graph.initializer and rng.random() < 0.5:
        tensor = rng.choice(graph.initializer)
        if tensor.dims and rng.random() < 0.7:
            tensor.dims[rng.randrange(len(tensor.dims))] = number
        else:
            tensor.dims.append(number)
        return
    dims = rng.choice([*graph.input, *graph.output]).type.tensor_type.shape.dim
    if dims and rng.random() < 0.7:
        rng.choice(dims).dim_value = number
    else:
        dims.add().dim_value = number


def _swap_operator(model: Any, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    node.op_type = rng.choice([*sorted({s.name for s in onnx.defs.get_all_schemas()}), "Nonsense"])
    if rng.random() < 0.1:
        node.domain = rng.choice(("com.microsoft", "ai.onnx.ml", "mine"))


def _swap_inputs(model: Any, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    names = [n for m in model.graph.node for n in (*m.input, *m.output)] + ["", "nowhere"]
    if node.input and rng.random() < 0.7:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif node.input and rng.random() < 0.5:
        del node.input[rng.randrange(len(node.input)) :]
    else:
        node.input.append(rng.choice(names))


def _swap_attribute(model: Any, rng: random.Random) -> None:
    nodes = [n for n in model.graph.node if n.attribute]
    if not nodes:
        return _swap_inputs(model, rng)
    attribute = rng.choice(rng.choice(nodes).attribute)
    number = rng.choice((-(2**63), -7, -1, 0, 1, 2, 7, 2**31, 2**63 - 1))
    what = rng.randrange(4)
    if what == 0:
        attribute.type = rng.randint(0, 14)
    elif what == 1:
        attribute.name = rng.choice(("axis", "pads", "to", "mode", "nonsense"))
    elif attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = number
        if what == 3:
            attribute.ints.append(number)
    elif attribute.s:
        attribute.s = rng.choice((b"", b"\xff\xfe", b"nonsense"))
    else:
        attribute.i, attribute.f = number, rng.choice((float("nan"), float("inf"), -1e30, 0.0))
    return None


def _swap_opset(model: Any, rng: random.Random) -> None:
    model.opset_import[0].version = rng.choice((-1, 0, 1, 6, 7, 9, 11, 13, 18, 21, 24, 99, 2**40))


def _drop_node(model: Any, rng: random.Random) -> None:
    del model.graph.node[rng.randrange(len(model.graph.node))]


def read(path: Path) -> str:
    """Reads a file as `inspect` and `compile` do; returns how that ended."""
    from edgesdk.cli.inspection import inspect_model, report_text
    from edgesdk.errors import ModelError, UsageError
    from edgesdk.frontend import Reference, draw_inputs, import_model

    try:
        report_text(inspect_model(path, {}))
        model = import_model(path)
        Reference(path, model.shapes).run(draw_inputs(model.inputs, seed=0, hints=model.hints))
    except (ModelError, UsageError) as error:  # exit codes 5 and 2
        if "\n" in error.message or not error.message.strip() or "Traceback" in error.message:
            return f"unclean: {error.message!r}"
        return f"code {error.exit_code}: {error.message}"
    except Exception:
        return f"unclean: {traceback.format_exc()[-1500:]}"
    return "accepted"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        print(json.dumps({"file": path.name}), flush=True)
        signal.alarm(LIMIT_S)
        ended = read(path)
        signal.alarm(0)
        print(json.dumps({"file": path.name, "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
