"""Bundles for Windows: what is in them, and programs that use them, run under Wine."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk.bundle import Bundle
from edgesdk.bundle.audit import audit_library, check_contract
from edgesdk.compiler import gate
from edgesdk.errors import ContractError, DeviceMismatchError, ToolMissingError
from edgesdk.frontend import Reference, import_model
from edgesdk.proc import CommandResult, run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import emulator_command, load_toolchain

TARGET = "windows-x86_64"
# A user's folder, with what the old code pages of Windows cannot write.
FOLDER = "Größe 模型"
RUN_LIMIT_S = 300.0

# As the bundle's README has it: linked with the import library.
LINKED = """\
#include <net.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  (void)argv;
  static float data[3 * 16 * 16];
  for (int i = 0; i < 3 * 16 * 16; ++i) data[i] = (float)(i % 7) - 3.0f;
  edgesdk_model* model = NULL;
  if (edgesdk_open_net(EDGESDK_ABI_VERSION, NULL, &model) != EDGESDK_OK) return 1;
  if (edgesdk_model_set_input(model, 0, data, sizeof(data) + (argc > 1 ? 1 : 0)) != EDGESDK_OK) {
    printf("%s\\n", edgesdk_model_last_error(model));
    return 3;
  }
  if (edgesdk_model_run(model) != EDGESDK_OK) return 4;
  const void* result = NULL;
  if (edgesdk_model_get_output(model, 0, &result, NULL) != EDGESDK_OK) return 5;
  for (int i = 0; i < 5; ++i) printf("%.9g ", (double)((const float*)result)[i]);
  edgesdk_model_close(model);
  return 0;
}
"""

# As Windows programs load what may be absent, and let go of it again.
LOADED = """\
#include <edgesdk_model.h>
#include <stdio.h>
#include <windows.h>

int wmain(int argc, wchar_t** argv) {
  for (int round = 0; round < 2; ++round) {
    HMODULE library = LoadLibraryW(argv[1]);
    if (library == NULL) return 1;
    const edgesdk_api* (*get)(uint32_t) = (void*)GetProcAddress(library, "edgesdk_get_api");
    const edgesdk_api* api = get(EDGESDK_ABI_VERSION);
    static float data[3 * 16 * 16];
    for (int i = 0; i < 3 * 16 * 16; ++i) data[i] = (float)(i % 7) - 3.0f;
    edgesdk_model* model = NULL;
    if (api->open(EDGESDK_ABI_VERSION, NULL, &model) != EDGESDK_OK) return 2;
    if (api->set_input(model, 0, data, sizeof(data)) != EDGESDK_OK) return 3;
    if (api->run(model) != EDGESDK_OK) return 4;
    const void* result = NULL;
    api->get_output(model, 0, &result, NULL);
    for (int i = 0; i < 5; ++i) printf("%.9g ", (double)((const float*)result)[i]);
    api->close(model);
    FreeLibrary(library);
  }
  Sleep(50); /* the pool's threads go to sleep in the library's code */
  return argc == 2 ? 0 : 6;
}
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project(app C)
find_package(net CONFIG REQUIRED)
add_executable(linked linked.c)
target_compile_options(linked PRIVATE -Wall -Wextra -Werror)
target_link_libraries(linked PRIVATE net::net)
add_custom_command(TARGET linked POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:net::net> $<TARGET_FILE_DIR:linked>)
add_executable(gnu linked.c)
target_include_directories(gnu PRIVATE ${BUNDLE}/include)
target_link_directories(gnu PRIVATE ${BUNDLE}/lib)
target_link_libraries(gnu PRIVATE -lnet)
add_executable(loaded loaded.c)
target_include_directories(loaded PRIVATE ${BUNDLE}/include)
target_link_options(loaded PRIVATE -municode)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 3, 3, 3), np.float32)
    dense = rng.standard_normal((8, 5), np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5])
    nodes = [
        helper.make_node("Conv", ["x", "weight"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["c"], ["t"]),
        helper.make_node("GlobalAveragePool", ["t"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "dense"], ["m"]),
        helper.make_node("Softmax", ["m"], ["y"]),
    ]
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(dense, "dense")]
    graph = helper.make_graph(nodes, "net", [x], [y], constants)
    path = tmp_path_factory.mktemp("windows") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    return edgesdk.compile(model, target=TARGET, output=model.parent / FOLDER)


@pytest.fixture(scope="module")
def programs(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs above, cross-compiled as docs/windows.md has it."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "linked.c").write_text(LINKED)
    (folder / "loaded.c").write_text(LOADED)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    compiler = load_toolchain("mingw-x86_64").require().cc[0]
    configure = ["cmake", "-S", folder, "-B", folder / "build", "-DCMAKE_SYSTEM_NAME=Windows"]
    configure += [f"-DCMAKE_C_COMPILER={compiler}", f"-DBUNDLE={bundle.path}"]
    configure += [f"-DCMAKE_PREFIX_PATH={bundle.path}", "-DCMAKE_FIND_ROOT_PATH_MODE_PACKAGE=BOTH"]
    for argv in (configure, ["cmake", "--build", folder / "build"]):
        result = run_command(argv, timeout_s=RUN_LIMIT_S)
        assert result.ok, result.stdout_text + result.stderr_text
    return folder / "build"


def wine(*argv: str | Path, cwd: Path | None = None) -> CommandResult:
    profile = load_target(TARGET)
    command = emulator_command(profile, load_toolchain(profile.toolchain))
    return run_command([*command, *argv], timeout_s=RUN_LIMIT_S, cwd=cwd)


def expected(model: Path, x: np.ndarray) -> np.ndarray:
    imported = import_model(model)
    return Reference(imported.source, imported.shapes).run({"x": x})["y"]


def test_the_gate_ran_it(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.verification.how == "emulated"
    assert manifest.contract.os == "windows"
    assert (manifest.library, manifest.launcher) == ("lib/net.dll", "bin/edgesdk-run.exe")
    files = set(manifest.files)
    assert {"lib/net.lib", "lib/libnet.dll.a", "lib/net.def", "include/net.h"} <= files
    assert "bin\\edgesdk-run.exe lib\\net.dll --selftest" in (bundle.path / "README.md").read_text()


def test_it_needs_windows_only_and_shows_the_c_api_only(bundle: Bundle) -> None:
    report = audit_library(bundle.library)
    assert (report.machine, report.bits, report.os) == ("x86_64", 64, "windows")
    assert report.soname == "net.dll"
    assert {library.lower() for library in report.needed} == {"kernel32.dll", "msvcrt.dll"}
    assert not report.fixed_address and not report.executable_stack
    header = (bundle.path / "include" / "edgesdk_model.h").read_text()
    declared = set(re.findall(r"\b(edgesdk_(?:model_\w+|get_api))\(", header))
    assert set(report.exports) == declared | {"edgesdk_open_net"}
    definition = (bundle.path / "lib" / "net.def").read_text().split()
    assert definition == ["LIBRARY", "net.dll", "EXPORTS", *report.exports]
    launcher = audit_library(bundle.launcher)
    assert {library.lower() for library in launcher.needed} == {"kernel32.dll", "msvcrt.dll"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needed": ("KERNEL32.dll", "libwinpthread-1.dll")}, "needs libwinpthread-1.dll"),
        ({"fixed_address": True}, "can be loaded at one address only"),
        ({"executable_stack": True}, "asks for an executable stack"),
        ({"exports": ("edgesdk_get_api", "__tvm_ffi_k0")}, "shows the symbol __tvm_ffi_k0"),
        ({"machine": "i386"}, "is built for i386"),
    ],
)
def test_the_audit_finds_what_breaks_the_contract(
    bundle: Bundle, changes: dict[str, object], message: str
) -> None:
    report = audit_library(bundle.library)
    check_contract(report, load_target(TARGET))
    with pytest.raises(ContractError, match=message):
        check_contract(dataclasses.replace(report, **changes), load_target(TARGET))  # type: ignore[arg-type]


def test_a_library_of_the_wrong_system_is_found(bundle: Bundle) -> None:
    with pytest.raises(ContractError, match="is built for windows, the target linux-x86_64"):
        check_contract(audit_library(bundle.library), load_target("linux-x86_64"))


def test_a_damaged_library_is_no_crash(bundle: Bundle, tmp_path: Path) -> None:
    whole = bundle.library.read_bytes()
    path = tmp_path / "net.dll"
    for size in (2, 63, 64, 200, 500, 1500):
        path.write_bytes(whole[:size])
        with pytest.raises(ContractError, match=r"net\.dll is not a whole PE file"):
            audit_library(path)


def test_launcher_in_a_folder_with_any_name(bundle: Bundle, model: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(7).standard_normal((1, 3, 16, 16)).astype(np.float32)
    folder = tmp_path / "Ausgäbe 出力"
    folder.mkdir()
    np.save(folder / "eingäbe.npy", x)
    options = ["--input", f"x={folder / 'eingäbe.npy'}", "--output", folder, "--json"]
    result = wine(bundle.launcher, bundle.library, *options)
    assert result.ok, result.stderr_text
    report = json.loads(result.stdout)
    assert (report["model"], report["target"]) == ("net", TARGET)
    assert report["memory"]["peak_rss_bytes"] > 1_000_000
    np.testing.assert_allclose(np.load(folder / "output_0.npy"), expected(model, x), atol=1e-5)


def test_selftest(bundle: Bundle, tmp_path: Path) -> None:
    # Paths as Windows writes them, from the bundle's folder.
    result = wine("bin\\edgesdk-run.exe", "lib\\net.dll", "--selftest", "golden", cwd=bundle.path)
    assert result.ok and "self-test: ok" in result.stdout_text, result.stderr_text
    golden = tmp_path / "golden"
    shutil.copytree(bundle.golden, golden)
    wrong = np.load(golden / "output_0.npy") * np.float32(1.001)
    np.save(golden / "output_0.npy", wrong)
    assert wine(bundle.launcher, bundle.library, "--selftest", golden).returncode == 8


def test_wrong_input_is_one_line_and_its_exit_code(bundle: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.zeros((1, 3, 8, 8), np.float32))
    for code, said, options in (
        (2, "unknown option '--bogus'", [bundle.library, "--bogus"]),
        (7, "does not fit input 'x', which is float32 1x3x16x16",
         [bundle.library, "--input", f"x={tmp_path / 'small.npy'}"]),
        (7, "nöt.npy: No such file or directory", [bundle.library, "--input", "x=nöt.npy"]),
        (7, "cannot load: nö.dll: ", ["nö.dll"]),
        (7, "(Windows error 193)", [tmp_path / "small.npy"]),
    ):  # fmt: skip
        result = wine(bundle.launcher, *options)
        assert result.returncode == code, result.stderr_text
        (line,) = result.stderr_text.splitlines()
        assert line.startswith("edgesdk-run: ") and said in line


@pytest.mark.parametrize("program", ["linked", "gnu"])
def test_program_linked_with_the_import_library(programs: Path, model: Path, program: str) -> None:
    """By CMake's package (net.lib), and by `-lnet` (libnet.dll.a)."""
    x = (np.arange(3 * 16 * 16) % 7 - 3).astype(np.float32).reshape(1, 3, 16, 16)
    result = wine(programs / f"{program}.exe")
    assert result.ok, result.stderr_text
    outputs = np.array(result.stdout_text.split(), np.float32)
    np.testing.assert_allclose(outputs, expected(model, x)[0], atol=1e-5)
    refused = wine(programs / f"{program}.exe", "more")
    assert refused.returncode == 3
    assert "input 'x' needs 3072 bytes, got 3073" in refused.stdout_text


def test_program_that_loads_and_frees_it(programs: Path, bundle: Bundle, model: Path) -> None:
    x = (np.arange(3 * 16 * 16) % 7 - 3).astype(np.float32).reshape(1, 3, 16, 16)
    result = wine(programs / "loaded.exe", bundle.library)
    assert result.ok, result.stderr_text
    outputs = np.array(result.stdout_text.split(), np.float32).reshape(2, 5)
    np.testing.assert_allclose(outputs, np.repeat(expected(model, x), 2, 0), atol=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the optional extra 'zig' is not installed"
)
def test_microsofts_way_of_linking(bundle: Bundle, tmp_path: Path) -> None:
    """An object for MSVC's ABI, linked by LLVM's linker in the place of link.exe."""
    zig = [sys.executable, "-m", "ziglang"]
    source = tmp_path / "program.c"
    source.write_text(
        "#define NULL 0\n#include <net.h>\n"
        "int start(void) { edgesdk_model* m; return edgesdk_open_net(1, NULL, &m) == EDGESDK_OK"
        " ? 40 + edgesdk_model_num_inputs(m) : 1; }\n"
    )
    compile_it = [*zig, "cc", "-target", "x86_64-windows-msvc", "-ffreestanding", "-c", source]
    # Nothing of Microsoft's C library is here.
    compile_it += ["-fno-stack-protector", "-fno-sanitize=all"]
    compile_it += ["-I", bundle.path / "include", "-o", tmp_path / "program.obj"]
    link_it = [*zig, "lld-link", "/entry:start", "/subsystem:console", "/nodefaultlib"]
    link_it += [tmp_path / "program.obj", bundle.path / "lib" / "net.lib"]
    link_it += [f"/out:{tmp_path / 'program.exe'}"]
    for argv in (compile_it, link_it):
        result = run_command(argv, timeout_s=RUN_LIMIT_S)
        assert result.ok, result.stderr_text
    shutil.copy(bundle.library, tmp_path)
    assert wine(tmp_path / "program.exe").returncode == 41


def test_it_is_not_run_on_this_machine_as_if_it_were_its_own(bundle: Bundle) -> None:
    x = np.zeros((1, 3, 16, 16), np.float32)
    with pytest.raises(DeviceMismatchError, match="it runs linux, and the bundle is for windows"):
        edgesdk.run(bundle, {"x": x})


def test_without_wine_the_gate_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`compile` puts it into the manifest as the reason for "not run"."""
    profile = load_target(TARGET)
    toolchain = load_toolchain(profile.toolchain)
    gate.executor(profile, toolchain)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edgesdk.toolchain._DEBIAN_WINE", str(tmp_path / "wine64"))
    with pytest.raises(ToolMissingError) as caught:
        gate.executor(profile, toolchain)
    assert caught.value.message == "wine is not installed"
    assert (caught.value.hint or "").endswith("apt-get install wine64")


def test_wine_runs_on_this_cpu_so_it_must_have_what_the_target_has() -> None:
    profile = load_target(TARGET)
    features = (*profile.contract.cpu_features, "avx1024")
    contract = dataclasses.replace(profile.contract, cpu_features=features)
    other = dataclasses.replace(profile, contract=contract)
    with pytest.raises(ToolMissingError, match="no emulator for windows-x86_64 here"):
        gate.executor(other, load_toolchain(profile.toolchain))
