"""What a linked library needs of a board: the C library, and nothing of C++."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from device_build import ROOT, Build

from edgesdk.compiler import link
from edgesdk.profiles import load_target
from edgesdk.toolchain import Toolchain, load_toolchain

ALLOWED = re.compile(r"(libc|libm|libdl|libpthread|ld-linux[a-z0-9_-]*)\.so\.\d+")


@pytest.fixture(params=["linux-x86_64", "rpi4", "rpi4-32"])
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    return load_toolchain(load_target(request.param).toolchain)


@pytest.fixture
def library(toolchain: Toolchain, tmp_path: Path) -> Path:
    """The test model, linked as the compiler links real ones."""
    source = tmp_path / "model.cc"
    source.write_text(
        "#define MODEL model_a\n#define FACTOR 2\n"
        + (ROOT / "tests" / "device_scripts" / "test_model.cc").read_text()
    )
    link.link_library(
        objects=[],
        model_source=source,
        toolchain=toolchain,
        output=tmp_path / "libmodel_a.so",
        exported=["edgesdk_open_model_a"],
        build=tmp_path,
    )
    return tmp_path / "libmodel_a.so"


def test_needs_only_the_c_library(library: Path) -> None:
    needed, undefined, _ = _dynamic(library)
    assert needed
    assert not [name for name in needed if not ALLOWED.fullmatch(name)]
    assert "pthread_create" in undefined  # the list is no empty one
    cxx = [name for name in undefined if name.startswith(("_Z", "__cxa_throw", "__gxx"))]
    assert not cxx
    assert b"GLIBCXX" not in library.read_bytes()


def test_exports_the_header_and_nothing_else(library: Path) -> None:
    _, _, defined = _dynamic(library)
    header = (ROOT / "device_scripts" / "include" / "edgesdk_model.h").read_text()
    declared = set(re.findall(r"\b(edgesdk_(?:model_\w+|get_api))\(", header))
    assert defined == declared | {"edgesdk_open_model_a"}


def test_the_launcher_needs_only_the_c_library(toolchain: Toolchain) -> None:
    path = link.launcher(toolchain)
    needed, undefined, _ = _dynamic(path)
    assert not [name for name in needed if not ALLOWED.fullmatch(name)]
    assert "dlopen" in undefined
    assert b"GLIBCXX" not in path.read_bytes()


@pytest.mark.parametrize("kind", ["plain", "rpi4", "rpi4-32"])
def test_cmake_builds_it_alike(build: Callable[[str], Build], kind: str) -> None:
    """What the C++ tests test is what is shipped."""
    needed, undefined, defined = _dynamic(build(kind).library("model_a"))
    assert not [name for name in needed if not ALLOWED.fullmatch(name)]
    assert not [name for name in undefined if name.startswith("_Z")]
    assert "edgesdk_open_model_a" in defined and "edgert_open" not in defined


def test_every_feature_of_the_profiles_is_known_to_the_device() -> None:
    """edgert lets a name pass that it cannot test: a profile that has one would protect nobody."""
    from edgesdk.profiles import target_names

    source = (ROOT / "device_scripts" / "edgert" / "cpu_features.cc").read_text()
    known = set(re.findall(r'\{"(\w+)", ', source))
    for name in target_names():
        if name != "local":
            unknown = set(load_target(name).contract.cpu_features) - known
            assert not unknown, f"{name}: {unknown}"


def _dynamic(path: Path) -> tuple[set[str], set[str], set[str]]:
    """The libraries it needs, and the names of its undefined and its defined dynamic symbols."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        needed = {
            tag.needed
            for tag in elf.get_section_by_name(".dynamic").iter_tags()
            if tag.entry.d_tag == "DT_NEEDED"
        }
        undefined, defined = set(), set()
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
            place = undefined if symbol.entry.st_shndx == "SHN_UNDEF" else defined
            if symbol.name and symbol.entry.st_info.bind != "STB_LOCAL":
                place.add(symbol.name)
    return needed, undefined, defined
