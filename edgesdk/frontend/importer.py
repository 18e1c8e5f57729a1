"""import_model: a model's file becomes a static Relax module, or one clear error."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.frontend.model import ImportedModel, TensorSpec, ValueHint

if TYPE_CHECKING:
    import onnx

    from edgesdk.frontend.graph import Graph, Value
    from edgesdk.frontend.walk import Walker


def import_model(
    path: Path,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    outputs: Sequence[str] | None = None,
) -> ImportedModel:
    """Reads a model and returns it with static shapes, repaired, as Relax.

    `shapes` fixes the dimensions that the model leaves open, by the model's own input names or
    their safe identifiers. A batch dimension that is left open becomes 1, and `repairs` says so.
    `outputs` names the tensors to return, any that nodes of the main graph compute, in place of the
    model's own outputs.

    Raises UsageError for a missing file and for shapes that are unknown, contradict the model or
    are still needed; ModelError for a file that is no sound ONNX model; UnsupportedModelError,
    with every node concerned, when something in it cannot be compiled.
    """
    from edgesdk.frontend.costs import count_flops
    from edgesdk.frontend.integers import is_quantised
    from edgesdk.frontend.optimise import optimise
    from edgesdk.frontend.sources import open_source

    path = Path(path)
    walked = walk_model(path, shapes=shapes or {}, outputs=outputs)
    graph, walker, opset, sha256 = walked.graph, walked.walker, walked.opset, walked.sha256
    assumed, given = walked.assumed, walked.inputs
    output_names = list(outputs or (o.name for o in walked.proto.graph.output))
    quantised = is_quantised(walked.proto)
    del walked
    optimise(graph)
    names, inputs, results = name_values(graph, list(given), output_names)
    hints = {name: walker.hints[id(v)] for name, v in given.items() if id(v) in walker.hints}
    repairs = (*assumed, *open_source(path).notes, *_repair_lines(walker.notes))
    flops = count_flops(graph)
    del walker  # it holds the nodes of the model

    from edgesdk.frontend.emit import emit_module  # TVM, late: what is refused above is told fast

    return ImportedModel(
        name=model_name(path),
        module=emit_module(graph, names),
        inputs=inputs,
        outputs=results,
        source=path,
        sha256=sha256,
        opset=opset,
        shapes={s.name: s.shape for s in inputs},
        repairs=repairs,
        hints=hints,
        flops=flops,
        reference=open_source(path).reference,
        quantised=quantised,
    )


@dataclass(frozen=True)
class WalkedModel:
    """A model as a graph of core operators, before it is tidied and becomes Relax.

    `proto` is the file without its weights, `inputs` are by the model's names, and `assumed` says
    what was assumed of their shapes.
    """

    graph: Graph
    walker: Walker
    proto: onnx.ModelProto
    inputs: Mapping[str, Value]
    assumed: tuple[str, ...]
    opset: int
    sha256: str


def walk_model(
    path: Path, *, shapes: Mapping[str, Sequence[int]], outputs: Sequence[str] | None = None
) -> WalkedModel:
    """Reads a model and repairs it; arguments and errors are those of `import_model`."""
    from edgesdk.frontend.load import load_model
    from edgesdk.frontend.shapes import fix_inputs
    from edgesdk.frontend.walk import Walker

    loaded = load_model(path)
    fixed = fix_inputs(loaded.proto, set(loaded.weights), shapes)
    walker = Walker(loaded)
    graph = walker.walk(fixed.values, outputs)
    return WalkedModel(
        graph=graph,
        walker=walker,
        proto=loaded.proto,
        inputs=fixed.values,
        assumed=fixed.assumed,
        opset=loaded.opset,
        sha256=loaded.sha256,
    )


def name_values(
    graph: Graph, inputs: list[str], outputs: list[str]
) -> tuple[dict[int, str], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns an identifier for each value of `graph`, by its `id`, and what goes in and out.

    `inputs` and `outputs` are the names of the graph's own in the model.
    """
    names = _identifiers(graph, inputs, outputs)
    safe = _output_identifiers(outputs)
    return (
        names,
        tuple(_spec(n, names[id(v)], v) for n, v in zip(inputs, graph.inputs, strict=True)),
        tuple(_spec(n, s, v) for n, s, v in zip(outputs, safe, graph.outputs, strict=True)),
    )


def identifier(name: str) -> str:
    """Returns `name` as a C identifier: letters, digits and underscores, no digit first."""
    safe = re.sub(r"[^0-9A-Za-z_]", "_", name)
    safe = re.sub(r"_{2,}", "_", safe).strip("_") or "value"
    return f"v{safe}" if safe[0].isdigit() else safe


def model_name(path: Path) -> str:
    """Returns the name of the model in the file `path`: a C identifier of at most 64 characters.

    Files, symbols and `NAME.h` carry it. A name that had to be cut, or of which no character is
    left, ends with a hash of the whole; one that is a header of the C library ends with `_net`.
    """
    stem = path.stem
    lost = not re.search("[0-9A-Za-z]", stem)
    name = "model" if lost else identifier(stem)
    if lost or len(name) > _MAX_MODEL_NAME:
        digest = hashlib.sha256(stem.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        name = f"{name[: _MAX_MODEL_NAME - 9].rstrip('_')}_{digest}"
    return f"{name}_net" if name.lower() in _HEADERS.split() else name


# A file's name has 255 bytes at most, and a bundle's folder adds the target's name.
_MAX_MODEL_NAME = 64

# A bundle's folder of headers comes before the system's: `string.h` in it would hide the real one.
_HEADERS = (
    "edgesdk_model aio aliases alloca ar argp argz assert byteswap complex cpio crypt ctype"
    " dirent dlfcn elf endian envz err errno error execinfo fcntl features fenv float fmtmsg"
    " fnmatch fstab fts ftw gconv getopt glob grp gshadow iconv ifaddrs inttypes iso646"
    " langinfo lastlog libgen libintl limits link locale malloc math mcheck memory mntent"
    " monetary mqueue netdb nl_types nss obstack paths poll printf proc_service pthread pty"
    " pwd re_comp regex regexp resolv sched search semaphore setjmp sgtty shadow signal spawn"
    " stab stdalign stdarg stdatomic stdbool stddef stdint stdio stdio_ext stdlib stdnoreturn"
    " string strings stropts syscall sysexits syslog tar termio termios tgmath thread_db"
    " threads time ttyent uchar ucontext ulimit unistd utime utmp utmpx values wait wchar"
    " wctype wordexp"
)

# Words that C, C++ or Python keep for themselves; CUDA and OpenCL sources are C.
_KEYWORDS = (
    "alignas alignof and asm auto bool break case catch char class const constexpr continue"
    " default delete do double else enum explicit export extern false float for friend goto half"
    " if in inline int kernel lambda long main mutable namespace new not operator or private"
    " protected public register return short signed sizeof static struct switch template this"
    " throw true try typedef typename union unsigned using virtual void volatile while xor"
    " def from global import is None pass raise with yield True False"
)


def _unique(name: str, taken: set[str]) -> str:
    base = identifier(name)
    base = f"{base}_" if base in _KEYWORDS.split() else base
    result, count = base, 1
    while result in taken:
        count += 1
        result = f"{base}_{count}"
    taken.add(result)
    return result


def _identifiers(graph: Graph, inputs: list[str], outputs: list[str]) -> dict[int, str]:
    """Gives every value an identifier of its own, the inputs and outputs first."""
    taken: set[str] = set()
    names: dict[int, str] = {}
    for name, value in zip(inputs, graph.inputs, strict=True):
        names[id(value)] = _unique(name, taken)
    for name, value in zip(outputs, graph.outputs, strict=True):
        names.setdefault(id(value), _unique(name, taken))
    for node in graph.nodes:
        for value in node.outputs:
            if id(value) not in names:
                names[id(value)] = _unique(value.label, taken)
    return names


def _output_identifiers(outputs: list[str]) -> list[str]:
    taken: set[str] = set()
    return [_unique(name, taken) for name in outputs]


def _spec(name: str, safe: str, value: Value) -> TensorSpec:
    return TensorSpec(name, safe, value.shape, value.dtype.name)


def _repair_lines(notes: Mapping[tuple[str, str], int]) -> list[str]:
    return [
        f"{kind} x{count}: {text}" if count > 1 else f"{kind}: {text}"
        for (kind, text), count in sorted(notes.items())
    ]


__all__ = ["ImportedModel", "TensorSpec", "ValueHint", "identifier", "import_model", "model_name"]
