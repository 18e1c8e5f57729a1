"""Code for every shipped GPU target, made on a machine without a GPU and read back.

What such a bundle does is tried with a stand-in for NVIDIA's driver (device_scripts/fake_cuda),
whose kernels are NumPy.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from command_line import Cli
from elftools.elf.elffile import ELFFile
from onnx import TensorProto, helper, numpy_helper
from test_targets_tvm import BY_MACHINE, features
from tvm.target import Target, codegen

import edgesdk
from edgesdk.bundle import Bundle, open_bundle
from edgesdk.compiler import cuda, device_code
from edgesdk.compiler.lower import lower
from edgesdk.errors import CompileError, DeviceMismatchError, ToolMissingError
from edgesdk.frontend import import_model
from edgesdk.profiles import GpuInfo, load_target, target_names
from edgesdk.schedules import schedule_kernels
from edgesdk.toolchain import load_toolchain

ROOT = Path(__file__).resolve().parents[2]
GPU_TARGETS = [
    name for name in target_names() if (gpu := load_target(name).gpu) and gpu.api == "cuda"
]

# The ELF header of NVIDIA's machine code, which NVIDIA does not document. Seen with the compilers
# of CUDA 11.8, 12.9 and 13.5: up to 12.9, below sm_100, the ABI version is 7 and the architecture
# the lowest byte of e_flags; otherwise the ABI version is 8 and it is the next byte.
EM_CUDA = 190


def architecture_of(cubin: bytes) -> int:
    import io

    header = ELFFile(io.BytesIO(cubin)).header
    assert header["e_machine"] in ("EM_CUDA", EM_CUDA)
    flags = header["e_flags"]
    return {7: flags & 0xFF, 8: flags >> 8 & 0xFF}[header["e_ident"]["EI_ABIVERSION"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution, a product and a softmax."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "m": rng.normal(size=(8, 10)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("GlobalAveragePool", ["b"], ["c"]),
            helper.make_node("Flatten", ["c"], ["d"]),
            helper.make_node("MatMul", ["d", "m"], ["e"]),
            helper.make_node("Softmax", ["e"], ["y"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), str(path))
    return path


@functools.cache
def images_of(path: Path, target: str) -> tuple[cuda.Image, ...]:
    """What `compile_model` puts into the library, without the linking."""
    profile = load_target(target)
    assert profile.gpu is not None
    with Target(profile.tvm):
        module = lower(import_model(path).take_module(), profile)
    kernels = {
        gv.name_hint: function
        for gv, function in module.functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    scheduled, _ = schedule_kernels(kernels, profile)
    return cuda.compile_images(
        device_code.generate(scheduled, Target(profile.tvm)).source, profile.gpu
    )


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_code_is_for_the_target(model: Path, target: str) -> None:
    gpu = load_target(target).gpu
    assert gpu is not None
    images = images_of(model, target)
    cubins = [image for image in images if image.format == "cubin"]
    assert tuple(architecture_of(image.data) for image in cubins) == gpu.architectures
    for image in cubins:
        assert image.resources
        for kernel in image.resources:
            # CUDA C++ Programming Guide, "Compute Capabilities": at most 255 registers a thread.
            assert 0 < kernel.registers <= 255
            assert kernel.shared_bytes <= 1024 * gpu.shared_kib
            assert kernel.function.encode() in image.data
    ptx = [image for image in images if image.format == "ptx"]
    assert [image.architecture for image in ptx] == ([] if gpu.ptx is None else [gpu.ptx])
    for image in ptx:
        text = image.data.decode()
        assert re.search(rf"^\.target sm_{gpu.ptx}\b", text, re.MULTILINE)
        assert text.endswith("\0")
        # NVIDIA's PTX documentation, "Release Notes": 8.8 came with CUDA 12.9.
        assert (re.search(r"^\.version ([\d.]+)", text, re.MULTILINE) or [""])[0] == ".version 8.8"
        assert image.driver == "12.9"


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_cpu_of_the_target(target: str) -> None:
    """LLVM knows the CPU beside the GPU, and the contract covers what its code may use."""
    profile = load_target(target)
    table = profile.host().tvm
    assert codegen.llvm_is_valid_cpu(table["mcpu"], table["mtriple"])
    names, matters = BY_MACHINE[profile.machine]
    promised = {names.get(f, f) for f in profile.contract.cpu_features}
    if profile.machine == "x86_64":
        promised |= {"sse", "sse2", "crc32"}
    used = {f for f in features(table) if matters.match(f)}
    assert used and used <= promised


class _Release:
    """A compiler of some release that knows some architectures.

    What it makes is for the stand-in driver; `parameters` are those of each function, by name.
    """

    def __init__(self, major: int, minor: int, architectures: Sequence[int]) -> None:
        self.parameters: dict[str, list[str]] = {}
        self.release = (major, minor)
        self.version = f"NVRTC {major}.{minor}"
        self.architectures = frozenset(architectures)

    def compile(self, source: str, options: Sequence[str], format: str) -> tuple[bytes, str]:
        """As the stand-in driver wants it: a first line, then the names of the functions."""
        for name, listed in re.findall(r"__global__ void .*?(k\d+_\w+)\((.*?)\)", source):
            self.parameters[name] = [part.split()[-1] for part in listed.split(",")]
        architecture = re.search(r"_(\d+)$", options[0])
        assert architecture is not None
        head = f"fake cubin sm_{architecture[1]}"
        if format == "ptx":
            head = f".version 8.4\n.target sm_{architecture[1]}"
        return "\n".join([head, *self.parameters, "\0"]).encode(), ""


CUDA_11 = _Release(11, 8, (53, 62, 72, 75, 86, 87))
CUDA_12 = _Release(12, 9, (53, 62, 72, 75, 86, 87, 120))
CUDA_13 = _Release(13, 5, (75, 86, 87, 110, 120))


def gpu_of(driver: str | None, architecture: int, ptx: int | None = None) -> GpuInfo:
    return GpuInfo(
        "cuda",
        multiprocessors=8,
        shared_kib=48,
        architectures=(architecture,),
        ptx=ptx,
        cuda=driver,
    )


@pytest.mark.parametrize(
    ("driver", "architecture", "compiler", "note"),
    [
        ("12.0", 86, CUDA_12, None),  # not the newest: its driver would refuse that code
        ("13.0", 86, CUDA_13, None),
        (None, 86, CUDA_13, None),
        ("11.4", 72, CUDA_11, None),
        ("13.0", 72, CUDA_12, None),  # CUDA 13 does not know it any more
        # Nothing fits: the oldest that there is, and that is told.
        (
            "10.2",
            53,
            CUDA_11,
            "11.8 makes code for drivers of CUDA 11 and later, and some of these",
        ),
        (
            "12.2",
            110,
            CUDA_13,
            "13.5 makes code for drivers of CUDA 13 and later, and some of these",
        ),
    ],
)
def test_the_compiler_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch,
    driver: str | None,
    architecture: int,
    compiler: _Release,
    note: str | None,
) -> None:
    monkeypatch.setattr(cuda, "_compilers", lambda: (CUDA_13, CUDA_12, CUDA_11))
    gpu = gpu_of(driver, architecture)
    assert cuda.require_compiler(gpu) == (compiler.version,)
    newer = cuda.too_new(gpu)
    assert (newer is None) == (note is None)
    if newer is not None and note is not None:
        assert newer[0].startswith(f"NVRTC {note}")


def test_ptx_is_made_by_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_compilers", lambda: (CUDA_13, CUDA_12, CUDA_11))
    assert cuda.require_compiler(gpu_of("13.0", 86, ptx=86)) == ("NVRTC 13.5", "NVRTC 11.8")


def test_what_installs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_compilers", lambda: ())
    with pytest.raises(
        ToolMissingError, match=r"no CUDA compiler for sm_87 is installed$"
    ) as caught:
        cuda.require_compiler(gpu_of("12.2", 87))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pip install 'edgesdk[cuda]'")
    monkeypatch.setattr(cuda, "_compilers", lambda: (CUDA_13,))
    with pytest.raises(ToolMissingError, match=r"sm_72 is installed \(installed: NVRTC 13\.5\)"):
        cuda.require_compiler(gpu_of("11.4", 72))
    newer = cuda.too_new(gpu_of("12.0", 86))
    assert newer is not None
    assert newer[1] == "pip install 'edgesdk[cuda]'"
    monkeypatch.setattr(cuda, "_compilers", lambda: (CUDA_12,))
    newer = cuda.too_new(gpu_of("11.4", 72))
    assert newer is not None
    assert newer[1] == "pip install 'edgesdk[cuda-legacy]'"


def test_the_compilers_error_is_told() -> None:
    compiler = next(c for c in cuda._compilers() if 87 in c.architectures)
    with pytest.raises(CompileError, match='identifier "nothing" is undefined'):
        compiler.compile("__global__ void k() { nothing(); }", ["-arch=sm_87"], "cubin")


@pytest.fixture(scope="module")
def orin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return edgesdk.compile(
        model, target="jetson-orin-nano", output=tmp_path_factory.mktemp("orin") / "b"
    )


def test_the_bundle_says_what_it_asks_of_the_gpu(orin: Bundle) -> None:
    gpu = open_bundle(orin.path).manifest.contract.gpu
    assert gpu is not None
    assert (gpu.api, gpu.architectures, gpu.ptx, gpu.cuda) == ("cuda", (87,), None, "12.0")
    (image,) = orin.manifest.build["device_code"]
    assert (image["format"], image["architecture"], image["compiler"]) == (
        "cubin",
        87,
        "NVRTC 12.9",
    )
    assert image["kernels"] and all(kernel["registers"] > 0 for kernel in image["kernels"])
    # The machine code in the library is the one that was reported.
    library = orin.library.read_bytes()
    assert orin.manifest.contract.machine == ("aarch64",)
    assert all(kernel["function"].encode() in library for kernel in image["kernels"])
    assert orin.manifest.verification.how == "not run"


def test_compile_prints_what_the_kernels_take(model: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli.succeeds(
        "compile", str(model), "--target", "cuda-sm_86", "-o", str(tmp_path / "b")
    ).out
    line = re.search(
        r"gpu code +sm_86, by NVRTC 12\.9, for drivers of CUDA 12\.0 and later;"
        r" (\d+) functions, at most (\d+) registers, (\d+) spill\n",
        said,
    )
    assert line is not None
    (image, _) = open_bundle(tmp_path / "b").manifest.build["device_code"]
    kernels = image["kernels"]
    assert int(line[1]) == len(kernels)
    assert int(line[2]) == max(k["registers"] for k in kernels)
    assert int(line[3]) == sum(k["spill_bytes"] > 0 for k in kernels)
    assert "PTX for GPUs after sm_86, by NVRTC 12.9, for drivers of CUDA 12.9 and later" in said


def test_a_bundle_for_a_gpu_is_not_brought_to_a_machine_without(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = edgesdk.compile(model, target="cuda-sm_86", output=tmp_path / "b")
    from edgesdk.deploy import push
    from edgesdk.deploy.facts import GpuFacts, read_facts

    real = read_facts

    def facts(gpu: GpuFacts) -> Callable[[Any], Any]:
        return lambda transport: dataclasses.replace(real(transport), gpu=gpu)

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(push, "read_facts", facts(GpuFacts(library=None)))
    with pytest.raises(DeviceMismatchError, match="no driver for an NVIDIA GPU"):
        edgesdk.push(bundle, device="local")
    monkeypatch.setattr(push, "read_facts", facts(GpuFacts("libcuda.so.1", architecture=75)))
    with pytest.raises(DeviceMismatchError, match="built for sm_86, this GPU is sm_75") as caught:
        edgesdk.push(bundle, device="local")
    assert caught.value.hint == "compile with --target cuda-sm_75"
    assert not list((tmp_path / "home").rglob("*.so"))


# The stand-in driver -----------------------------------------------------------------------------

KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_uint64)),
        ("num_arguments", ctypes.c_uint32),
    )


class _Function(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kernel", KERNEL),
        ("num_arguments", ctypes.c_uint32),
        ("duration_ns", ctypes.c_uint64),
        ("max_threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    toolchain = load_toolchain("native")
    built = toolchain.compile_object(
        ROOT / "tests/device_scripts/fake_cuda/fake_cuda.cc",
        folder / "fake_cuda.o",
        include=[ROOT / "device_scripts/edgert"],
        flags=["-fPIC", "-O0"],
    )
    return toolchain.link_shared([built], folder / "libcuda.so.1", soname="libcuda.so.1")


@pytest.fixture
def driver(driver_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setenv("EDGESDK_CUDA_LIBRARY", str(driver_library))
    library = ctypes.CDLL(str(driver_library))
    library.fake_cuda_host.restype = ctypes.c_void_p
    library.fake_cuda_host.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.fake_cuda_settings.restype = ctypes.POINTER(ctypes.c_int)
    library.fake_cuda_faults.restype = ctypes.c_char_p
    library.fake_cuda_reset()
    yield library
    library.fake_cuda_reset()


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """y = max(x, 0) + x for a GPU sm_86, its machine code replaced by the stand-in's."""
    folder = tmp_path_factory.mktemp("doubled")
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])],
        "doubled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 64])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(made, str(folder / "doubled.onnx"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_kept", cuda._compiled)  # not into the user's cache
        patch.setattr(cuda, "_compilers", lambda: (CUDA_12,))
        return edgesdk.compile(
            folder / "doubled.onnx", target="cuda-sm_86", output=folder / "b", verify=False
        )


def open_model(bundle: Bundle) -> tuple[ctypes.CDLL, ctypes.c_void_p, int]:
    library = ctypes.CDLL(str(bundle.library))
    for name in ("edgesdk_model_last_error",):
        getattr(library, name).restype = ctypes.c_char_p
        getattr(library, name).argtypes = [ctypes.c_void_p]
    handle = ctypes.c_void_p()
    status = getattr(library, f"edgesdk_open_{bundle.manifest.name}")(
        bundle.manifest.abi_version, None, ctypes.byref(handle)
    )
    return library, handle, status


def test_a_bundle_runs_on_the_stand_in(driver: ctypes.CDLL, doubled: Bundle) -> None:
    launches: list[int] = []

    def compute(address: int) -> int:
        launch = _Launch.from_address(address)
        threads = int(np.prod([*launch.grid, *launch.block]))
        launches.append(threads)
        x, y = (
            (ctypes.c_float * 256).from_address(driver.fake_cuda_host(launch.arguments[i], 1024))
            for i in (at["x_ptr"], 1 - at["x_ptr"])
        )
        values = np.frombuffer(x, dtype=np.float32)
        np.frombuffer(y, dtype=np.float32)[:] = np.maximum(values, 0) + values
        return 0

    (name,) = CUDA_12.parameters
    at = {p: i for i, p in enumerate(CUDA_12.parameters[name])}
    assert len(at) == 2
    function = _Function(name.encode(), KERNEL(compute), 2, 1000, 1024, 0)
    driver.fake_cuda_register(ctypes.byref(function))
    driver.fake_cuda_settings()[1] = 86
    library, handle, status = open_model(doubled)
    assert status == 0, library.edgesdk_model_last_error(None)
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    for _ in range(3):
        assert (
            library.edgesdk_model_set_input(
                handle, 0, x.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(x.nbytes)
            )
            == 0
        )
        assert library.edgesdk_model_run(handle) == 0, library.edgesdk_model_last_error(handle)
        data = ctypes.c_void_p()
        assert library.edgesdk_model_get_output(handle, 0, ctypes.byref(data), None) == 0
        assert data.value is not None
        y = np.frombuffer((ctypes.c_float * 256).from_address(data.value), dtype=np.float32)
        np.testing.assert_array_equal(y.reshape(4, 64), np.maximum(x, 0) + x)
        x = -x
    assert len(launches) == 3
    assert all(threads >= 256 / 4 for threads in launches)  # at most 4 elements a thread
    library.edgesdk_model_close(handle)
    assert driver.fake_cuda_faults() == b""
    assert driver.fake_cuda_live() == 0


def test_another_gpu_is_named_when_it_is_opened(driver: ctypes.CDLL, doubled: Bundle) -> None:
    driver.fake_cuda_settings()[1] = 75
    library, _, status = open_model(doubled)
    assert status != 0
    said = library.edgesdk_model_last_error(None).decode()
    assert "sm_86" in said and "sm_75" in said
