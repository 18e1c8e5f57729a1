"""Writes a plan down for the device: one C++ source of constant tables, and one file of weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesdk.compiler.cuda import Image
from edgesdk.compiler.device_code import Launch
from edgesdk.compiler.plan import Plan, PlanTensor, align, size_of

# edgesdk_dtype in edgesdk_model.h
_DTYPES = {
    "float32": 1,
    "float64": 2,
    "float16": 3,
    "bfloat16": 4,
    "int8": 5,
    "int16": 6,
    "int32": 7,
    "int64": 8,
    "uint8": 9,
    "uint16": 10,
    "uint32": 11,
    "uint64": 12,
    "bool": 13,
}
_STORAGE = {
    "input": "kEdgertInput",
    "output": "kEdgertOutput",
    "weight": "kEdgertWeight",
    "arena": "kEdgertArena",
    "device_input": "kEdgertDeviceInput",
    "device_output": "kEdgertDeviceOutput",
    "device_weight": "kEdgertDeviceWeight",
    "device_arena": "kEdgertDeviceArena",
}
_IMAGE_FORMATS = {
    "cubin": "kEdgertCubin",
    "ptx": "kEdgertPtx",
    "opencl": "kEdgertOpenclSource",
    "metal": "kEdgertMetalSource",
}
# The driver that runs device code -> what edgert calls it.
_ACCELERATORS = {"cuda": "edgert_cuda", "opencl": "edgert_opencl", "metal": "edgert_metal"}


@dataclass(frozen=True)
class Port:
    """An input or output as the caller sees it: the model's own name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class DeviceImages:
    """Code of the accelerator in all its forms; `api` is that of GpuInfo."""

    api: str
    images: tuple[Image, ...]


def write_weights(plan: Plan, path: Path, device: DeviceImages | None = None) -> None:
    """Writes the constants at their offsets, one at a time: none is copied as a whole in memory.

    The images of `device` follow them, see `_image_offsets`.
    """
    import numpy as np

    with path.open("wb") as file:
        for array, offset in zip(plan.weights, plan.weight_offsets, strict=True):
            file.write(b"\0" * (offset - file.tell()))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        # An empty section would have no address.
        file.write(b"\0" * (max(plan.weights_bytes, 64) - file.tell()))
        if device is not None:
            for image, offset in zip(device.images, _image_offsets(plan, device), strict=True):
                file.write(b"\0" * (offset - file.tell()))
                file.write(image.data)


def _image_offsets(plan: Plan, device: DeviceImages) -> list[int]:
    """Bytes from the start of the weights: a library has one block of constants."""
    offsets = []
    end = max(plan.weights_bytes, 64)
    for image in device.images:
        offsets.append(align(end))
        end = offsets[-1] + len(image.data)
    return offsets


@dataclass(frozen=True)
class Variant:
    """The network for one set of shapes; `layers` holds one readable name per step of `plan`."""

    plan: Plan
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    layers: tuple[str, ...]


def model_source(
    variants: Sequence[Variant],
    *,
    name: str,
    target: str,
    build_id: str,
    cpu_features: Sequence[str],
    weights_file: Path,
    device: DeviceImages | None = None,
) -> str:
    """Returns the C++ source that defines `edgert_model_plan` and `edgesdk_open_NAME`.

    The first of `variants` is what a handle has when it is opened. Their plans share one block of
    weights, `weights_file`, which is included by the assembler.
    """
    shapes = _Shapes()
    tables = [_plan_tables(i, variant, shapes, device) for i, variant in enumerate(variants)]
    steps = [step for variant in variants for step in variant.plan.steps]
    kernels = sorted({s.kernel for s in steps if s.kernel is not None and s.launch is None})
    features = [*(_c_string(f) for f in cpu_features), "nullptr"]
    names = (_c_string(name), _c_string(target), _c_string(build_id))
    others = [_plan_fields(i, v, names, device) for i, v in enumerate(variants)][1:]
    return f"""\
// Written by edgesdk for model {comment(name)}, target {comment(target)}. Do not edit.
{"" if device is None else '#include "accelerator.h"'}
#include "plan.h"
#include "weights.h"

extern "C" {{

{_lines(f"int __tvm_ffi_{k}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);" for k in kernels)}

}}  // extern "C"

EDGERT_WEIGHTS("{_asm_string(weights_file)}");

namespace {{

const char* const cpu_features[] = {{{", ".join(features)}}};

{shapes.source()}
{_image_table(variants[0].plan, device)}
{_lines(tables)}
{_lines(["const edgert_plan others[] = {", *(f"{{{o}}}," for o in others), "};"] if others else [])}
}}  // namespace

extern "C" {{

const edgert_plan edgert_model_plan = {{
{_plan_fields(0, variants[0], names, device, others=len(others))}}};

EDGESDK_API edgesdk_status edgesdk_open_{name}(uint32_t abi_version,
                                               const edgesdk_options* options,
                                               edgesdk_model** model) {{
  return edgert_open(abi_version, options, model);
}}

}}  // extern "C"
"""


def _plan_tables(
    number: int, variant: Variant, shapes: _Shapes, device: DeviceImages | None
) -> str:
    """The arrays that the plan of variant `number` points to, in a namespace of its own."""
    plan = variant.plan
    tensors = [_tensor(t, shapes) for t in plan.tensors]
    arguments: list[str] = []
    steps = []
    launches: list[str] = []
    for step, layer in zip(plan.steps, variant.layers, strict=True):
        kernel = f"__tvm_ffi_{step.kernel}" if step.kernel and not step.launch else "nullptr"
        function = step.launch.function if step.launch else step.kernel or "copy"
        launch = f", launches + {len(launches)}" if step.launch else ""
        steps.append(
            f"{{{kernel}, {_c_string(function)}, {_c_string(layer)}, "
            f"arguments + {len(arguments)}, {len(step.args)}{launch}}}"
        )
        arguments += [str(a) for a in step.args]
        if step.launch:
            launches.append(_launch(step.launch))
    launch_table = ""
    if device is not None:
        launch_table = _table("edgert_launch launches", launches)
    # Some compilers refuse arrays of no elements, and a network may well have no steps.
    return f"""\
namespace variant{number} {{

{_table("edgert_tensor tensors", tensors)}
const uint32_t arguments[] = {{{", ".join([*arguments, "0"])}}};

{launch_table}
{_table("edgert_step steps", steps)}
{_table("edgert_port inputs", [_port(p, shapes) for p in variant.inputs])}
{_table("edgert_port outputs", [_port(p, shapes) for p in variant.outputs])}
}}  // namespace variant{number}
"""


def _table(declaration: str, entries: Sequence[str]) -> str:
    return f"const {declaration}[] = {{\n{_lines(f'    {e},' for e in [*entries, '{}'])}\n}};\n"


def _plan_fields(
    number: int,
    variant: Variant,
    names: Sequence[str],
    device: DeviceImages | None,
    *,
    others: int = 0,
) -> str:
    """The fields of an edgert_plan; that of the first variant points to the `others`."""
    plan, space = variant.plan, f"variant{number}"
    accelerated = ["nullptr", "nullptr", "0u", "0u"]
    if device is not None:
        accelerated = [
            f"&{_ACCELERATORS[device.api]}",
            "images",
            f"{len(device.images)}u",
            f"{plan.device_arena_bytes}u",
        ]
    fields = [
        *names,
        "cpu_features",
        *(f"{space}::{table}" for table in ("inputs", "outputs", "tensors", "steps")),
        f"{len(variant.inputs)}u",
        f"{len(variant.outputs)}u",
        f"{len(plan.tensors)}u",
        f"{len(plan.steps)}u",
        "edgert_weights",
        f"{plan.weights_bytes}u",
        f"{plan.arena_bytes}u",
        *accelerated,
        "others" if others else "nullptr",
        f"{others}u",
    ]
    return _lines(f"    {field}," for field in fields) + "\n"


def model_header(name: str, variants: Sequence[tuple[tuple[Port, ...], tuple[Port, ...]]]) -> str:
    """Returns the header NAME.h: the opening function, and the inputs and outputs of `variants`."""
    guard = f"EDGESDK_{name.upper()}_H_"
    lines = [f"/* {name}.h: a network compiled by edgesdk. See edgesdk_model.h for how to use it."]
    lines.append(" *")
    for number, (inputs, outputs) in enumerate(variants):
        if len(variants) > 1:
            lines.append(f" * variant {number}:")
        for kind, ports in (("input", inputs), ("output", outputs)):
            for index, port in enumerate(ports):
                shape = "x".join(str(d) for d in port.shape) or "scalar"
                lines.append(f" * {kind} {index}: {comment(port.name)}, {port.dtype}, {shape}")
    lines.append(" */")
    return (
        "\n".join(lines)
        + f"""
#ifndef {guard}
#define {guard}

#include "edgesdk_model.h"

#ifdef __cplusplus
extern "C" {{
#endif

/* Like edgesdk_model_open, for this very library. */
edgesdk_status edgesdk_open_{name}(uint32_t abi_version, const edgesdk_options* options,
                                   edgesdk_model** model);

#ifdef __cplusplus
}}
#endif

#endif /* {guard} */
"""
    )


def _launch(launch: Launch) -> str:
    grid, block = (", ".join(str(n) for n in sizes) for sizes in (launch.grid, launch.block))
    flags = "kEdgertStartsEarly" if launch.starts_early else "0u"
    function, shared = _c_string(launch.function), f"{launch.shared_bytes}u"
    return f"{{{function}, {{{grid}}}, {{{block}}}, {shared}, {flags}}}"


def _image_table(plan: Plan, device: DeviceImages | None) -> str:
    if device is None:
        return ""
    images = [
        f"{{{_IMAGE_FORMATS[image.format]}, {image.architecture}u, edgert_weights + {offset}u, "
        f"{len(image.data)}u}}"
        for image, offset in zip(device.images, _image_offsets(plan, device), strict=True)
    ]
    return _table("edgert_image images", images)


class _Shapes:
    """Static arrays of shapes, each once."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], str] = {}

    def name(self, shape: tuple[int, ...]) -> str:
        if not shape:
            return "nullptr"
        return self._names.setdefault(shape, f"shape{len(self._names)}")

    def source(self) -> str:
        return _lines(
            f"const int64_t {name}[] = {{{', '.join(str(d) for d in shape)}}};"
            for shape, name in self._names.items()
        )


def _tensor(tensor: PlanTensor, shapes: _Shapes) -> str:
    import tvm_ffi

    dtype = tvm_ffi.dtype(tensor.dtype)
    return (
        f"{{{_STORAGE[tensor.storage]}, {int(dtype.type_code)}, {int(dtype.bits)}, "
        f"{len(tensor.shape)}, {tensor.index}, {tensor.offset}u, {tensor.size_bytes}u, "
        f"{shapes.name(tensor.shape)}}}"
    )


def _port(port: Port, shapes: _Shapes) -> str:
    return (
        f"{{{_c_string(port.name)}, {_DTYPES[port.dtype]}, {len(port.shape)}, "
        f"{shapes.name(tuple(port.shape))}, {size_of(port.shape, port.dtype)}u}}"
    )


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _c_string(text: str) -> str:
    """A C string literal; bytes beyond ASCII as octal escapes, which end after three digits."""
    out = []
    for byte in text.encode("utf-8"):
        char = chr(byte)
        if char in '"\\' or byte < 32 or byte > 126 or char == "?":
            out.append(f"\\{byte:03o}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def _asm_string(path: Path) -> str:
    """A path inside an assembler string inside a C string."""
    return json.dumps(json.dumps(str(path), ensure_ascii=False), ensure_ascii=False)[1:-1]


def comment(text: str) -> str:
    """Returns a model's name for something, so that it ends no comment and no string around it."""
    kept = "".join(c if c.isprintable() and c not in '\\"' else "." for c in text)
    return kept.replace("*/", "* /").replace("/*", "/ *")
