"""The numbers of the ground floor as Markdown: start-up, sizes, overhead, memory, compiling.

    make bench > benchmarks/RESULTS.md      (on a quiet machine; takes some minutes)

What each means stands in its table. Nothing here is a test: nothing fails.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

import edgesdk
from edgesdk.compiler import codegen, link
from edgesdk.host import detect_host
from edgesdk.proc import run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain

KERNEL_CALLS = 1000
RUNS = 300

# Compiles argv[1] into argv[2]; a process of its own, so that its memory can be watched.
_COMPILE = "import sys, edgesdk; edgesdk.compile(sys.argv[1], output=sys.argv[2])"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print_machine()
        print_startup()
        print_sizes(folder)
        print_overhead(folder)
        print_memory_of_a_run(folder)
        print_compile(folder)


def print_machine() -> None:
    packages = ("edgesdk", "apache-tvm", "apache-tvm-ffi", "onnx", "onnxruntime", "numpy")
    print("# First light\n")
    print(f"{detect_host().cpu_name}, {psutil.cpu_count()} CPUs,", end=" ")
    print(f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.platform()},", end=" ")
    print(f"Python {platform.python_version()}, {load_toolchain('native').version()};")
    print(", ".join(f"{name} {version(name)}" for name in packages) + ".\n")
    load = psutil.getloadavg()[0]
    print(
        f"Written by `make bench`. Times are medians. Load of the machine at the start: {load:.1f};"
    )
    print("sizes and memory do not depend on it, times do.\n")


def print_startup() -> None:
    program = Path(sys.executable).with_name("edgesdk")
    heading("Start-up (aim for --help: 0.2 s)", "command", "time")
    for arguments in (["--help"], ["targets"], ["devices"]):
        times = []
        for _ in range(11):
            start = time.perf_counter()
            result = run_command([program, *arguments], timeout_s=60)
            times.append(time.perf_counter() - start)
            assert result.ok, result.stderr_text
        row(f"`edgesdk {' '.join(arguments)}`", f"{statistics.median(times):.2f} s")


def print_sizes(folder: Path) -> None:
    """Stripped files; the library is one of a network that has neither kernels nor weights."""
    heading("Size on the device, without a model", "target", "runtime", "launcher", "sum", "aim")
    for target in ("rpi4", "rpi4-32", "linux-x86_64"):
        toolchain = load_toolchain(load_target(target).toolchain)
        library = link_plan(folder / target, toolchain_of=target, steps=[])
        toolchain.strip(library)
        sizes = [library.stat().st_size, link.launcher(toolchain).stat().st_size]
        row(target, *(f"{size / 1024:.0f} KiB" for size in (*sizes, sum(sizes))), "256 KiB")


def print_overhead(folder: Path) -> None:
    """A plan of many calls of one kernel, all that is measured being the call."""
    heading(
        f"Time per kernel call, in a plan of {KERNEL_CALLS} calls",
        "kernel",
        "per call",
        "with `--per-layer`",
    )
    compiled = folder / "add_one.o"
    codegen.write_object({"add_one": add_one()}, load_target("local").tvm, compiled)
    for what, kernel, objects in (
        ("empty C function", "empty", []),
        ("x + 1 over one float, compiled by TVM with its argument checks", "add_one", [compiled]),
    ):
        library = link_plan(
            folder / kernel, toolchain_of="local", steps=[kernel] * KERNEL_CALLS, objects=objects
        )
        times = []
        for options in ([], ["--per-layer"]):
            report = launch(library, "--repeat", str(RUNS), "--warmup", "10", *options)
            times.append(statistics.median(report["latency_ms"]) * 1e6 / KERNEL_CALLS)
        row(what, *(f"{time_ns:.1f} ns" for time_ns in times))


def print_memory_of_a_run(folder: Path) -> None:
    heading(
        "Memory of a run, one thread",
        "network",
        "weights",
        "activations",
        "inputs and outputs",
        "peak of the process",
    )
    empty = launch(link_plan(folder / "nothing", toolchain_of="local", steps=[]), "--threads", "1")
    row("none", *["0 MB"] * 3, megabytes(empty["memory"]["peak_rss_bytes"]))
    for name in ("squeezenet", "resnet50"):
        model = random_network(name, folder)
        bundle = edgesdk.compile(model, output=folder / f"{name}-bundle")
        options = ["--selftest", str(bundle.golden), "--threads", "1"]
        memory = launch(bundle.library, *options)["memory"]
        input_bytes = sum(
            int(np.prod(t.shape)) * np.dtype(t.dtype).itemsize for t in bundle.manifest.inputs
        )
        row(
            name,
            megabytes(memory["weights_bytes"]),
            megabytes(memory["activations_bytes"]),
            megabytes(memory["io_bytes"] + input_bytes),
            megabytes(memory["peak_rss_bytes"]),
        )


def print_compile(folder: Path) -> None:
    """Wall time, and the largest sum of the resident memory of all processes at work.

    Part of it is TVM, ONNX Runtime and the network's graph. What the weights cost shows in the
    step from SqueezeNet, which has next to none.
    """
    heading(
        "Compiling for this machine, comparison with ONNX Runtime included (aim: 3 bytes per byte)",
        "network",
        "weights",
        "time",
        "peak memory",
        "above SqueezeNet",
        "per further byte of weights",
    )
    base: tuple[int, float] | None = None
    for name in ("relu", "squeezenet", "resnet50", "vgg19"):
        model = one_relu(folder) if name == "relu" else random_network(name, folder)
        seconds, peak_bytes = watch_compile(model, folder / f"{name}-watched")
        weights = edgesdk.open_bundle(folder / f"{name}-watched").manifest.weights_bytes
        cells = [name, megabytes(weights), f"{seconds:.1f} s", megabytes(peak_bytes)]
        if base is None:
            cells += ["", ""]
        else:
            above = peak_bytes - base[1]
            cells += [megabytes(above), f"{above / (weights - base[0]):.1f}"]
        if name == "squeezenet":
            base = (weights, peak_bytes)
        row(*cells)


def heading(title: str, *columns: str) -> None:
    print(f"\n## {title}\n")
    row(*columns)
    row("---", *["---:"] * (len(columns) - 1))


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def launch(library: Path, *options: str) -> dict:
    launcher = link.launcher(load_toolchain("native"))
    result = run_command([launcher, library, *options, "--json"], timeout_s=600)
    assert result.ok, result.stderr_text
    return json.loads(result.stdout)


_SOURCE = """\
#include "plan.h"
extern "C" int __tvm_ffi_add_one(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
namespace {{
[[maybe_unused]] int Empty(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) {{ return 0; }}
const int64_t shape[] = {{1}};
alignas(64) const uint8_t weights[64] = {{0}};
const edgert_tensor tensors[] = {{
    {{kEdgertWeight, kDLFloat, 32, 1, 0, 0, 4, shape}},
    {{kEdgertArena, kDLFloat, 32, 1, 0, 0, 4, shape}}}};
const uint32_t args[] = {{0, 1}};
const edgert_step steps[] = {{{steps}{{}}}};
const edgert_port no_ports[] = {{{{}}}};
const char* const features[] = {{nullptr}};
}}
extern "C" const edgert_plan edgert_model_plan = {{
    "bench", "bench", "0", features, no_ports, no_ports, tensors, steps,
    0, 0, 2, {count}, weights, 64, 64}};
"""


def link_plan(
    folder: Path, *, toolchain_of: str, steps: list[str], objects: list[Path] | None = None
) -> Path:
    """Links a library whose plan calls `steps` ("empty" or "add_one") one after the other."""
    folder.mkdir()
    functions = {"empty": "Empty", "add_one": "__tvm_ffi_add_one"}
    text = "".join(f'{{{functions[step]}, "{step}", "{step}", args, 2}},\n' for step in steps)
    source = folder / "model.cc"
    source.write_text(_SOURCE.format(steps=text, count=len(steps)))
    link.link_library(
        objects=objects or [],
        model_source=source,
        toolchain=load_toolchain(load_target(toolchain_of).toolchain),
        output=folder / "libbench.so",
        exported=[],
        build=folder,
    )
    return folder / "libbench.so"


def add_one() -> object:
    from tvm import te

    x = te.placeholder((1,), name="x")
    return te.create_prim_func([x, te.compute((1,), lambda i: x[i] + 1.0, name="y")])


def one_relu(folder: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", *zip(values))
    path = folder / "relu.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def random_network(name: str, folder: Path) -> Path:
    """A network of the onnx package, with random weights instead of its constant ones.

    Drawn as He et al. 2015 do ("Delving deep into rectifiers"), so that no layer dies out.
    """
    import onnx
    from onnx import numpy_helper

    path = folder / f"{name}.onnx"
    if path.exists():
        return path
    light = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx"
    model = onnx.load(light)
    rng = np.random.default_rng(0)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(d) for d in constants[node.input[0]])
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 0
        drawn = rng.standard_normal(shape) * np.sqrt(2 / fan_in) if fan_in else np.full(shape, 0.1)
        array = drawn.astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    for repeated in (model.graph.initializer, model.graph.input):
        left = [item for item in repeated if item.name in used]
        del repeated[:]
        repeated.extend(left)
    onnx.save(model, path)
    return path


def watch_compile(model: Path, output: Path) -> tuple[float, float]:
    """Returns the seconds that compiling took, and its peak memory in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", _COMPILE, str(model), str(output)])
    watched, peak_bytes = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        for part in [watched, *_children(watched)]:
            try:
                total += part.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        peak_bytes = max(peak_bytes, total)
        time.sleep(0.01)
    assert process.returncode == 0
    return time.perf_counter() - start, peak_bytes


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Those with memory of their own: until it calls exec, a child shares its parent's."""
    children = []
    try:
        for child in process.children(recursive=True):
            if child.cmdline() != process.cmdline():
                children.append(child)
    except psutil.Error:  # one of them has just ended
        pass
    return children


if __name__ == "__main__":
    main()
