"""A program of the user's: two bundles found by CMake, linked in, and called from C and C++."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgesdk
from edgesdk.proc import run_command

# As the bundle's README has it, for two networks at once. CMake's rules for names in lower case
# differ from those for others.
SOURCE = """\
#include <first.h>
#include <Second_Net.h>
#include <stdio.h>

static int run(edgesdk_model* model, const float* data, size_t size_bytes) {
  if (edgesdk_model_set_input(model, 0, data, size_bytes) != EDGESDK_OK ||
      edgesdk_model_run(model) != EDGESDK_OK) {
    fprintf(stderr, "%s\\n", edgesdk_model_last_error(model));
    return 1;
  }
  const void* result = NULL;
  if (edgesdk_model_get_output(model, 0, &result, NULL) != EDGESDK_OK) return 1;
  printf("%s", edgesdk_model_name(model));
  for (int i = 0; i < 4; ++i) printf(" %g", (double)((const float*)result)[i]);
  printf("\\n");
  return 0;
}

int main(void) {
  const float data[4] = {-1, 2, -3, 4};
  edgesdk_model* first = NULL;
  edgesdk_model* second = NULL;
  if (edgesdk_open_first(EDGESDK_ABI_VERSION, NULL, &first) != EDGESDK_OK) return 1;
  if (edgesdk_open_Second_Net(EDGESDK_ABI_VERSION, NULL, &second) != EDGESDK_OK) return 1;
  int failed = run(first, data, sizeof(data)) || run(second, data, sizeof(data));
  edgesdk_model_close(first);
  edgesdk_model_close(second);
  return failed;
}
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project(app C CXX)
find_package(first CONFIG REQUIRED)
find_package(Second_Net CONFIG REQUIRED)
foreach(language c cpp)
  add_executable(app_${language} app.${language})
  target_compile_options(app_${language} PRIVATE -Wall -Wextra -pedantic -Werror)
  target_link_libraries(app_${language} PRIVATE first::first Second_Net::Second_Net)
endforeach()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of the program, in C and in C++."""
    folder = tmp_path_factory.mktemp("program")
    for name, operator in (("first", "Relu"), ("Second_Net", "Neg")):
        edgesdk.compile(_one_node(folder, name, operator), output=folder / f"{name}-bundle")
    for language in ("c", "cpp"):
        (folder / f"app.{language}").write_text(SOURCE)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    prefixes = f"{folder / 'first-bundle'};{folder / 'Second_Net-bundle'}"
    for argv in (
        ["cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefixes}"],
        ["cmake", "--build", folder / "build"],
    ):
        result = run_command(argv, timeout_s=300)
        assert result.ok, result.stdout_text + result.stderr_text
    return folder / "build"


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_runs_both_networks(program: Path, language: str) -> None:
    result = run_command([program / f"app_{language}"], timeout_s=60)
    assert result.ok, result.stderr_text
    lines = [line.split() for line in result.stdout_text.splitlines()]
    assert [line[0] for line in lines] == ["first", "Second_Net"]
    values = [np.array(line[1:], np.float32) for line in lines]
    np.testing.assert_array_equal(values[0], [0, 2, 0, 4])
    np.testing.assert_array_equal(values[1], [1, -2, 3, -4])


def _one_node(folder: Path, name: str, operator: str) -> Path:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], name, [x], [y])
    path = folder / f"{name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path
