"""The languages in which a bundle's library can be called, beside C: C++, Python, C# and Java.

Each gets one small file for the network at hand and, from `device_scripts/`, one that is the same
in every bundle. All of them stand on the C API of edgesdk_model.h alone.

include/NAME.hpp, edgesdk_model.hpp    C++17
python/NAME/                           Python 3.8 and newer, with NumPy
csharp/NAME.cs                         .NET and Mono
java/NAME/Model.java, model_jni.c      Java 8 and newer, Kotlin, Android
"""

from __future__ import annotations

import keyword
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from edgesdk.bundle.manifest import Manifest, TensorInfo
from edgesdk.compiler.emit import comment
from edgesdk.resources import data_folder

_CPP_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "edgesdk::Float16",
    "bfloat16": "edgesdk::BFloat16",
    "int8": "std::int8_t",
    "int16": "std::int16_t",
    "int32": "std::int32_t",
    "int64": "std::int64_t",
    "uint8": "std::uint8_t",
    "uint16": "std::uint16_t",
    "uint32": "std::uint32_t",
    "uint64": "std::uint64_t",
    "bool": "bool",
}

# ECMA-334, "Keywords", in lower case as all of them are.
_CSHARP_KEYWORDS = (
    "abstract as base bool break byte case catch char checked class const continue decimal default"
    " delegate do double else enum event explicit extern false finally fixed float for foreach goto"
    " if implicit in int interface internal is lock long namespace new null object operator out"
    " override params private protected public readonly ref return sbyte sealed short sizeof"
    " stackalloc static string struct switch this throw true try typeof uint ulong unchecked unsafe"
    " ushort using virtual void volatile while"
)
_JAVA_KEYWORDS = (
    "boolean extends final implements instanceof native package strictfp super synchronized throws"
    " transient"
)


_LOADING = Template("""
Python 3.8 and newer, with NumPy; `python/` of this folder must be in `PYTHONPATH`:

```python
from $module import Model

outputs = Model()($arguments)  # output name -> array
```

C# on .NET or Mono: add `csharp/$module.cs`, which says how, to your project. Java and Kotlin, on
Android, too: `java/$module/Model.java`, with `model_jni.c` beside it.
""")


def write_faces(folder: Path, manifest: Manifest) -> None:
    """Writes the faces of the bundle in `folder`, whose `include/` exists.

    Python and C# load a library when they run; an archive of objects has none for them.
    """
    scripts = data_folder("device_scripts")
    include = folder / "include"
    shutil.copyfile(scripts / "include" / "edgesdk_model.hpp", include / "edgesdk_model.hpp")
    (include / f"{manifest.name}.hpp").write_text(_cpp(manifest), encoding="utf-8")
    if not _can_be_loaded(manifest):
        return
    module = module_name(manifest.name)
    python = folder / "python" / module
    python.mkdir(parents=True)
    (python / "__init__.py").write_text(_python(manifest), encoding="utf-8")
    shutil.copyfile(scripts / "faces" / "model.py", python / "model.py")
    csharp = folder / "csharp"
    csharp.mkdir()
    source = (scripts / "faces" / "Model.cs").read_text(encoding="utf-8")
    (csharp / f"{module}.cs").write_text(_csharp(manifest, source), encoding="utf-8")
    java = folder / "java" / module
    java.mkdir(parents=True)
    for file in ("Model.java", "model_jni.c"):
        source = (scripts / "faces" / file).read_text(encoding="utf-8")
        (java / file).write_text(_java(manifest, source), encoding="utf-8")


def readme_parts(manifest: Manifest) -> dict[str, str]:
    """What the bundle's README says of this network in each language."""
    fill = [
        f"auto x{index} = model.{port}();  // write {_count(tensor)} x {tensor.dtype} there"
        for index, (port, tensor) in enumerate(_ports("input", manifest.inputs))
    ]
    use = [
        f"auto y{index} = model.{port}();"
        for index, (port, _) in enumerate(_ports("output", manifest.outputs))
    ]
    loading = _LOADING.substitute(module=module_name(manifest.name), arguments=_arguments(manifest))
    return {
        "cpp_lines": "\n".join([*fill, "if (!model.run()) return fail(model.error());", *use]),
        "loading": loading if _can_be_loaded(manifest) else "",
    }


def module_name(name: str) -> str:
    """Returns the model's name as a Python and a Java package and as a C# namespace.

    A word of one of these languages, and a module that Python has already, ends with `_net`.
    """
    taken = keyword.iskeyword(name) or name in sys.stdlib_module_names or name == "numpy"
    taken = taken or name in _CSHARP_KEYWORDS.split() or name in _JAVA_KEYWORDS.split()
    return f"{name}_net" if taken else name


def _can_be_loaded(manifest: Manifest) -> bool:
    return Path(manifest.library).suffix != ".a"


_CPP = Template("""\
/* $name.hpp: a network compiled by edgesdk, for C++17. See edgesdk_model.hpp for how to use it. */
#ifndef EDGESDK_${upper}_HPP_
#define EDGESDK_${upper}_HPP_

#include <array>

#include "$name.h"
#include "edgesdk_model.hpp"

namespace edgesdk_$name {

class Model : public edgesdk::Model {
 public:
  explicit Model(const edgesdk::Options& options = {}) noexcept
      : edgesdk::Model(&edgesdk_open_$name, options) {}
$ports};

}  // namespace edgesdk_$name

#endif /* EDGESDK_${upper}_HPP_ */
""")

_CPP_INPUT = Template("""
  /* "$name", $dtype, $size */
  static constexpr std::array<std::int64_t, $ndim> ${port}_shape{$shape};
  edgesdk::Span<$type> $port() noexcept { return input<$type>($index); }
  [[nodiscard]] bool bind_$port(edgesdk::Span<const $type> data) noexcept {
    return bind_input<$type>($index, data);
  }
""")

_CPP_OUTPUT = Template("""
  /* "$name", $dtype, $size */
  static constexpr std::array<std::int64_t, $ndim> ${port}_shape{$shape};
  edgesdk::Span<const $type> $port() noexcept { return output<$type>($index); }
  [[nodiscard]] bool bind_$port(edgesdk::Span<$type> data) noexcept {
    return bind_output<$type>($index, data);
  }
""")


def _cpp(manifest: Manifest) -> str:
    ports = [
        template.substitute(
            index=index,
            port=port,
            name=comment(tensor.name),
            dtype=tensor.dtype,
            type=_CPP_TYPES[tensor.dtype],
            ndim=len(tensor.shape),
            shape=", ".join(str(size) for size in tensor.shape),
            size=_size_text(tensor),
        )
        for kind, tensors, template in (
            ("input", manifest.inputs, _CPP_INPUT),
            ("output", manifest.outputs, _CPP_OUTPUT),
        )
        for index, (port, tensor) in enumerate(_ports(kind, tensors))
    ]
    return _CPP.substitute(name=manifest.name, upper=manifest.name.upper(), ports="".join(ports))


def _ports(kind: str, tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """Yields the name of each accessor, `input_x` and so on, each once."""
    from edgesdk.frontend.importer import identifier

    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        port = f"{kind}_{identifier(tensor.name)}"
        # `x` and `x_shape` would both want input_x_shape.
        if seen & {port, f"{port}_shape"}:
            port = f"{port}_{index}"
        seen |= {port, f"{port}_shape"}
        yield port, tensor


_PYTHON = Template('''\
"""$name: a network compiled by edgesdk for $target.

    from $module import Model  # with python/ of this bundle in PYTHONPATH

    model = Model()
    outputs = model($arguments)  # output name -> array

$ports
"""

from pathlib import Path

from . import model as _model
from .model import ModelError, Tensor

__all__ = ["Model", "ModelError", "Tensor"]


class Model(_model.Model):
    __doc__ = _model.Model.__doc__

    library = Path(__file__).resolve().parents[2] / "$library"
    open_function = "edgesdk_open_$name"
    abi_version = $abi_version
''')


def _python(manifest: Manifest) -> str:
    ports = [
        f"{kind} {index}: {comment(tensor.name)}, {tensor.dtype}, {_size_text(tensor)}"
        for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs))
        for index, tensor in enumerate(tensors)
    ]
    return _PYTHON.substitute(
        name=manifest.name,
        module=module_name(manifest.name),
        target=manifest.target,
        arguments=_arguments(manifest),
        ports="\n".join(ports),
        library=manifest.library,
        abi_version=manifest.abi_version,
    )


def _csharp(manifest: Manifest, source: str) -> str:
    name = manifest.name
    for placeholder, value in (
        ("edgesdk_open_EDGESDK_NAME", f"edgesdk_open_{name}"),
        ("EDGESDK_NAME", module_name(name)),
        # Without its ending: each system's runtime tries its own.
        ("EDGESDK_LIBRARY", Path(manifest.library).stem),
        ("EDGESDK_ABI", str(manifest.abi_version)),
    ):
        source = source.replace(placeholder, value)
    return source


def _java(manifest: Manifest, source: str) -> str:
    name = manifest.name
    for placeholder, value in (
        ("edgesdk_open_EDGESDK_MODEL", f"edgesdk_open_{name}"),
        ("EDGESDK_HEADER", name),
        ("EDGESDK_NAME", module_name(name)),
    ):
        source = source.replace(placeholder, value)
    return source


def _arguments(manifest: Manifest) -> str:
    return ", ".join(f"array_{index}" for index in range(len(manifest.inputs)))


def _count(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape)


def _size_text(tensor: TensorInfo) -> str:
    return "x".join(str(size) for size in tensor.shape) or "scalar"
