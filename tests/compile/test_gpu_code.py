"""GPU kernels become launches of fixed size, and the plan has a side for each tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, topi

from edgesdk.compiler import cuda, device_code, gate
from edgesdk.compiler.device_code import DeviceKernel, Launch
from edgesdk.compiler.plan import make_plan
from edgesdk.errors import CompileError, ToolMissingError
from edgesdk.profiles import GpuInfo, load_target
from edgesdk.schedules import apply_candidate, schedule_kernels
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu import gemm
from edgesdk.toolchain import load_toolchain

TARGET = "cuda-sm_90"


def convolution(size: int = 14) -> Any:
    """3x3 from 64 to 128 channels of `size` x `size` pixels, with bias and ReLU."""
    config = Conv2d(
        in_shape=(1, 64, size, size),
        out_shape=(1, 128, size, size),
        window=(3, 3),
        stride=(1, 1),
        padding=(1, 1, 1, 1),
        dilation=(1, 1),
        groups=1,
        block=gemm.VECTOR,
    )
    x = te.placeholder((1, 16, size * size, 4), name="x")
    w = te.placeholder((1, 144, 4, 128), name="w")
    b = te.placeholder((1, 32, 1, 4), name="b")
    y = gemm.conv2d(x, w, config)
    z = te.compute(y.shape, lambda n, o, p, c: te.max(y[n, o, p, c] + b[n, o, 0, c], 0.0), name="z")
    return te.create_prim_func([x, w, b, z])


def launches_of(knobs: dict[str, int]) -> DeviceKernel:
    profile = load_target(TARGET)
    function = convolution()
    candidate = {"template": gemm.GEMM, "knobs": knobs}
    scheduled = apply_candidate(function, profile, candidate)
    target = tvm.target.Target(profile.tvm)
    return device_code.generate({"k": scheduled}, target).kernels["k"]


KNOBS = {
    "pixels": 7,
    "blocks": 2,
    "threads_p": 14,
    "threads_o": 8,
    "step": 4,
    "stages": 2,
    "split": 1,
}


def test_a_tile_is_a_block_of_threads() -> None:
    kernel = launches_of(KNOBS)
    # 196 pixels / (7 * 14) times 32 blocks of 4 channels / (2 * 8).
    (launch,) = kernel.launches
    assert launch.grid == (2 * 2, 1, 1)
    assert launch.block == (14 * 8, 1, 1)
    assert sorted(launch.args) == [0, 1, 2, 3]
    assert kernel.workspaces == ()


def test_split_sums_are_added_up_in_a_second_launch() -> None:
    kernel = launches_of({**KNOBS, "split": 4})
    first, second = kernel.launches
    assert first.grid == (4 * 2 * 2, 1, 1)
    # Four parts of the output: 128 channels of 196 pixels of 4 bytes.
    assert kernel.workspaces == (4 * 128 * 196 * 4,)
    assert 4 in first.args and 4 in second.args  # the workspace follows four parameters
    assert 3 in second.args and 3 not in first.args  # the output


@pytest.mark.parametrize(
    ("knob", "value", "reason"),
    [
        ("pixels", 5, "divide"),
        ("threads_o", 3, "divide"),
        ("split", 5, "divide"),
        ("step", 48, "shared memory"),
        ("threads_p", 196, "threads"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(knob: str, value: int, reason: str) -> None:
    gpu = load_target(TARGET).gpu
    assert gpu is not None
    problem = gemm.Problem(groups=1, blocks=32, pixels=196, steps=144)
    gemm.check(KNOBS, problem, gpu)
    knobs = {**KNOBS, knob: value}
    if knob == "threads_p":
        knobs |= {"pixels": 1}
    with pytest.raises(ValueError, match=reason):
        gemm.check(knobs, problem, gpu)


@pytest.mark.parametrize("size", [7, 13, 14, 56])
@pytest.mark.parametrize(
    "target",
    [
        TARGET,
        "jetson-nano",
        "linux-x86_64-opencl",
        "linux-aarch64-mali",
        "macos-arm64-metal",
        "ios-arm64-metal",
    ],
)
def test_convolutions_get_their_template(target: str, size: int) -> None:
    """The rung below would give right results, too, at a fraction of the speed."""
    profile = load_target(target)
    scheduled, coverage = schedule_kernels({"k": convolution(size)}, profile)
    assert (coverage.rungs, coverage.problems) == ({"template": ("k",)}, ())
    code = device_code.generate(scheduled, tvm.target.Target(profile.tvm))
    threads = [math.prod(n.grid) * math.prod(n.block) for n in code.kernels["k"].launches]
    # At least as many as one for every 8 x 8 results.
    assert threads[0] >= 128 * size * size / 64


def test_an_index_of_the_largest_takes_a_register() -> None:
    """And so does the largest, which nobody reads: an array of all would be each thread's."""
    x = te.placeholder((1, 21, 128, 128), name="x")
    function = te.create_prim_func([x, topi.argmax(x, axis=1)])
    profile = load_target("linux-x86_64-opencl")
    scheduled, coverage = schedule_kernels({"k": function}, profile)
    assert (coverage.rungs, coverage.problems) == ({"generic": ("k",)}, ())
    source = device_code.generate(scheduled, tvm.target.Target(profile.tvm)).source
    assert set(re.findall(r"^ +\w+ \w+\[(\d+)\];$", source, re.MULTILINE)) == {"1"}


def test_a_kernel_of_too_many_tensors_is_refused() -> None:
    """Metal has places for 31; such a kernel then runs on the CPU."""
    profile = load_target("macos-arm64-metal")
    for count, fits in ((30, True), (31, False)):
        parts = [te.placeholder((4,), name=f"x{i}") for i in range(count)]
        function = te.create_prim_func([*parts, topi.concatenate(parts)])
        scheduled, _ = schedule_kernels({"k": function}, profile)
        if fits:
            device_code.generate(scheduled, tvm.target.Target(profile.tvm))
            continue
        with pytest.raises(CompileError, match="kernel k takes 32 tensors, the GPU's kernels 31"):
            device_code.generate(scheduled, tvm.target.Target(profile.tvm))


def test_a_prime_number_of_columns_gets_the_template() -> None:
    weight = np.ones((120, 6625), np.float32)
    packed = gemm.pack_dense(weight)
    assert packed.shape == (1, 30, 4, 6656) and packed.sum() == 120 * 6625
    x, w = te.placeholder((20, 120), name="x"), te.placeholder(packed.shape, name="w")
    function = te.create_prim_func([x, w, gemm.dense(x, w, 6625)])
    _, coverage = schedule_kernels({"k": function}, load_target(TARGET))
    assert (coverage.rungs, coverage.problems) == ({"template": ("k",)}, ())


@pytest.mark.parametrize(
    ("pixels", "blocks", "steps"), [(196, 32, 144), (49, 80, 40), (12544, 4, 8)]
)
@pytest.mark.parametrize("target", ["jetson-nano", TARGET])
def test_defaults_fit(target: str, pixels: int, blocks: int, steps: int) -> None:
    gpu = load_target(target).gpu
    assert gpu is not None
    problem = gemm.Problem(1, blocks, pixels, steps)
    knobs = gemm.default_of(problem, gpu)
    gemm.check(knobs, problem, gpu)
    values = gemm.space_of(problem, gpu)
    assert all(knobs[name] in values[name] for name in values)
    # A Maxwell has no asynchronous copies.
    assert (knobs["stages"] > 0) == (target == TARGET)


@pytest.mark.skipif(
    cuda._nvcc() is None, reason="no CUDA toolkit is installed: its nvcc is optional"
)
def test_nvcc_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = cuda._nvcc()
    assert nvcc is not None
    monkeypatch.setattr(cuda, "_compilers", lambda: (cuda._Nvcc(nvcc),))
    profile = load_target(TARGET)
    assert profile.gpu is not None
    candidate = {"template": gemm.GEMM, "knobs": KNOBS}
    scheduled = apply_candidate(convolution(), profile, candidate)
    code = device_code.generate({"k": scheduled}, tvm.target.Target(profile.tvm))
    code = cuda.start_early(code, profile.gpu)
    machine, text = cuda.compile_images(code.source, profile.gpu, keep=False)
    assert machine.compiler.startswith("nvcc") and machine.data[:4] == b"\x7fELF"
    (used,) = machine.resources
    assert used.function == "k_kernel" and used.registers > 56  # the sums alone
    # Both tiles of a step of 4, three times: 98 pixels and 64 channels, 4 terms of 4 bytes.
    assert used.shared_bytes == 3 * 4 * (98 + 64) * 4 * 4
    assert text.data.endswith(b"\0") and b".target sm_90" in text.data


def test_only_new_gpus_start_launches_early() -> None:
    code = device_code.DeviceCode(
        'extern "C" __global__ void f(float* a);\n'
        'extern "C" __global__ void __launch_bounds__(32) f(float* a) {\n  a[0] = 1;\n}\n',
        {"k": DeviceKernel((Launch("f", (1, 1, 1), (32, 1, 1), 0, (0,)),), ())},
    )

    def gpu(*architectures: int, ptx: int | None = None) -> GpuInfo:
        return GpuInfo("cuda", 1, 48, architectures=architectures, ptx=ptx)

    for old in (gpu(80, 90), gpu(90, ptx=80)):
        assert cuda.start_early(code, old) is code
    early = cuda.start_early(code, gpu(90, 100, ptx=90))
    head, wait, body = early.source.splitlines()[1:4]
    assert head.endswith("f(float* a) {") and body == "  a[0] = 1;"
    assert "griddepcontrol.wait" in wait
    assert early.source.count("griddepcontrol") == 1
    assert early.kernels["k"].launches[0].starts_early


def increment(shape: tuple[int, ...]) -> Any:
    a = te.placeholder(shape, name="a")
    return te.create_prim_func([a, te.compute(shape, lambda i: a[i] + 1.0, name="b")])


def chain(*names: str) -> Any:
    """A module whose main calls the kernels `names` one after the other, each x -> x."""
    shape = (64,)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        value: Any = x
        for name in names:
            gv = builder.add_func(increment(shape).with_attr("global_symbol", name), name)
            value = builder.emit(
                relax.call_tir(gv, [value], out_ty=relax.TensorType(shape, "float32"))
            )
        builder.emit_func_output(value)
    return builder.get()


def on_device(*names: str) -> dict[str, DeviceKernel]:
    def kernel(name: str) -> DeviceKernel:
        first = Launch(f"{name}_0", (1, 1, 1), (64, 1, 1), 0, (0, 2))
        return DeviceKernel((first, Launch(f"{name}_1", (1, 1, 1), (64, 1, 1), 0, (2, 1))), (256,))

    return {name: kernel(name) for name in names}


def test_a_tensor_is_copied_where_the_next_kernel_needs_it() -> None:
    plan = make_plan(chain("gpu_a", "cpu_b", "gpu_c"), on_device=on_device("gpu_a", "gpu_c"))
    steps = [
        (
            step.launch.function if step.launch else step.kernel or "copy",
            tuple(plan.tensors[a].storage for a in step.args),
        )
        for step in plan.steps
    ]
    assert steps == [
        ("gpu_a_0", ("device_input", "device_arena")),
        ("gpu_a_1", ("device_arena", "device_arena")),
        ("copy", ("device_arena", "arena")),
        ("cpu_b", ("arena", "arena")),
        ("copy", ("arena", "device_arena")),
        ("gpu_c_0", ("device_arena", "device_arena")),
        ("gpu_c_1", ("device_arena", "device_output")),
    ]
    assert plan.arena_bytes == 2 * 256  # what the CPU reads and what it writes
    # The scratch of both kernels is one place behind the tensors.
    scratch = {plan.tensors[plan.steps[i].args[1]].offset for i in (0, 5)}
    assert scratch == {plan.device_arena_bytes - 256}


def test_all_on_one_side_needs_no_copies() -> None:
    everything = make_plan(chain("a", "b"), on_device=on_device("a", "b"))
    assert all(step.launch is not None for step in everything.steps)
    assert everything.arena_bytes == 0
    nothing = make_plan(chain("a", "b"))
    assert [step.kernel for step in nothing.steps] == ["a", "b"]
    assert nothing.device_arena_bytes == 0


def test_tvm_does_not_compile_for_the_gpu_that_is_here() -> None:
    # TVM calls this where it finds a driver, and takes what comes back as machine code.
    name = "tvm_callback_cuda_compile"
    tvm_ffi.register_global_func(name, lambda code: b"compiled", override=True)
    with device_code._no_compiler():
        assert tvm_ffi.get_global_func(name)("code") == b"-"
    assert tvm_ffi.get_global_func(name)("code") == b"compiled"
    tvm_ffi.remove_global_func(name)
    with device_code._no_compiler():
        pass
    assert tvm_ffi.get_global_func(name, allow_missing=True) is None


def test_loops_on_the_cpu_are_no_launches() -> None:
    target = tvm.target.Target(load_target(TARGET).tvm)
    with pytest.raises(CompileError):
        device_code.generate({"k": convolution()}, target)


@pytest.mark.parametrize("target", ["jetson-orin-nano", "cuda-windows"])
def test_a_gpu_is_not_looked_for_behind_an_emulator(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgesdk.host.require_gpu", lambda gpu: None)  # as if there were one here
    profile = load_target(target)
    toolchain = load_toolchain(profile.toolchain)
    with pytest.raises(ToolMissingError, match="emulator"):
        gate._runner(profile, toolchain)


def test_architectures_are_needed() -> None:
    with pytest.raises(ValueError, match="architectures"):
        GpuInfo("cuda", 1, 48)
    gpu = load_target(TARGET).gpu
    assert gpu is not None
    with pytest.raises(ValueError, match="warp"):
        dataclasses.replace(gpu, warp=0)


def test_bools_are_bytes_in_memory() -> None:
    """TVM takes a vector of bools for one of 16-bit integers, in CUDA: right between a comparison
    and what it selects, wrong where bools are loaded, stored or repeated."""
    from tvm import tirx

    x = te.placeholder((64, 256, 4), name="x")
    y = te.placeholder((64, 256, 4), name="y")
    mask = te.placeholder((64, 256, 4), "bool", name="mask")
    functions = {
        name: te.create_prim_func([*given, te.compute((64, 256, 4), element, name="z")])
        for name, given, element in (
            ("compared", [x, y], lambda *i: tirx.Select(x[i] > y[i], x[i], y[i] * 2.0)),
            ("loaded", [x, mask], lambda *i: tirx.Select(mask[i], x[i], 0.0)),
            ("stored", [x, y], lambda *i: x[i] > y[i]),
            ("inverted", [mask], lambda *i: tirx.Not(mask[i])),
            ("repeated", [x], lambda i, j, k: tirx.Select(j % 2 == 0, x[i, j, k], 1.0)),
        )
    }
    profile = load_target(TARGET)
    assert profile.gpu is not None
    scheduled, _ = schedule_kernels(functions, profile)
    for name, function in scheduled.items():
        code = device_code.generate({name: function}, tvm.target.Target(profile.tvm))
        own = code.source[code.source.index(f"{name}_kernel") :]
        assert ("ushort4" in own) is (name == "compared")
        assert ("float4" in own) is (name == "compared")
        assert cuda.compile_images(code.source, profile.gpu)[0].data


@pytest.mark.parametrize("target", [TARGET, "local"])
def test_inlining_does_not_double_without_end(target: str) -> None:
    """Each value is read twice by the next, as in unrolled recurrent cells: inlined whole, 40 of
    them would be 2^40 expressions. Cut in pieces they compute what they should."""
    x = te.placeholder((4, 8), name="x")

    def step(value: Any, number: int) -> Any:
        return te.compute(
            (4, 8),
            lambda i, j: value[i, j] * 0.5 + value[i, 7 - j] * 0.25,
            name=f"s{number}",
        )

    y = functools.reduce(step, range(40), x)
    function = te.create_prim_func([x, y])
    scheduled, coverage = schedule_kernels({"k": function}, load_target(target))
    assert coverage.rungs == {"generic": ("k",)}
    assert len(scheduled["k"].script()) < 400_000
    if target == TARGET:
        profile = load_target(target)
        code = device_code.generate(scheduled, tvm.target.Target(profile.tvm))
        assert 1 < len(code.kernels["k"].launches) < 20
        return
    module = tvm.IRModule({"main": scheduled["k"].with_attr("global_symbol", "main")})
    given = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    tensors = [tvm.runtime.tensor(given), tvm.runtime.tensor(np.zeros((4, 8), np.float32))]
    tvm.compile(module, "llvm")["main"](*tensors)
    want = given.astype(np.float64)
    for _ in range(40):
        want = want * 0.5 + want[:, ::-1] * 0.25
    np.testing.assert_allclose(tensors[1].numpy(), want, rtol=1e-4)
