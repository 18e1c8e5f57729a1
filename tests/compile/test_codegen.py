"""Objects: what is generated, and what happens when it cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from elftools.elf.elffile import ELFFile
from tvm import te

from edgesdk.compiler import codegen
from edgesdk.profiles import load_target


@pytest.fixture
def doubled() -> tvm.tirx.PrimFunc:
    x = te.placeholder((4,), "float32", name="x")
    return te.create_prim_func([x, te.compute((4,), lambda i: x[i] + x[i], name="y")])


@pytest.mark.parametrize(
    ("name", "machine"),
    [("rpi4", "EM_AARCH64"), ("rpi4-32", "EM_ARM"), ("linux-x86_64", "EM_X86_64")],
)
def test_writes_an_object_for_the_target(
    tmp_path: Path, doubled: tvm.tirx.PrimFunc, name: str, machine: str
) -> None:
    path = tmp_path / "kernels.o"
    codegen.write_object({"doubled": doubled}, tvm.target.Target(load_target(name).tvm), path)
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        assert elf["e_machine"] == machine
        assert elf.get_section_by_name(".symtab").get_symbol_by_name("__tvm_ffi_doubled")
    codegen.check_symbols(path)


def test_full_disk_is_an_error_and_not_the_end_of_the_process(doubled: tvm.tirx.PrimFunc) -> None:
    target = tvm.target.Target(load_target("local").tvm)
    with pytest.raises(OSError, match="No space left on device"):
        codegen.write_object({"doubled": doubled}, target, Path("/dev/full"))
