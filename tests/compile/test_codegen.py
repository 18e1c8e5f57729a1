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


@pytest.mark.parametrize("lanes, cpu", [(16, "x86-64-v4"), (8, "x86-64-v3"), (4, "x86-64-v2")])
def test_register_tiles_need_no_memory_of_the_runtime(lanes: int, cpu: str, tmp_path: Path) -> None:
    """28 vectors of 16 floats are more than the 1 KiB that TVM itself leaves on the stack."""
    from tvm.s_tir import Schedule

    k = te.reduce_axis((0, 64), "k")
    a, b = te.placeholder((280, 64), name="a"), te.placeholder((64, lanes), name="b")
    c = te.compute((280, lanes), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    sch = Schedule(tvm.IRModule({"main": te.create_prim_func([a, b, c])}))
    block = sch.get_sblock("c")
    out = sch.cache_write(block, 0, "local")
    i, j = sch.get_loops(out)
    task, row = sch.split(i, [None, 28])
    sch.compute_at(block, task)
    _, x, y, term = sch.get_loops(block)
    sch.reorder(term, x, y)
    for loop in (x, row):
        sch.unroll(loop)
    for loop in (y, j):
        sch.vectorize(loop)
    sch.decompose_reduction(block, term)
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    path = tmp_path / "kernels.o"
    codegen.write_object({"k": sch.mod["main"]}, target, path)
    with path.open("rb") as stream:
        names = {s.name for s in ELFFile(stream).get_section_by_name(".symtab").iter_symbols()}
    assert "__tvm_ffi_k" in names
    assert not any("Workspace" in name for name in names)
