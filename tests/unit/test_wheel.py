"""What the wheel carries: the checkout's data folders as they are, and nothing that lies about."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from edgesdk.proc import run_command

ROOT = Path(__file__).resolve().parents[2]
DATA = ("targets", "toolchains", "device_scripts")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    result = run_command(argv, timeout_s=300)
    assert result.ok, result.stdout_text + result.stderr_text
    (path,) = folder.glob("*.whl")
    return path


def test_data_is_the_checkouts(wheel: Path) -> None:
    """Byte for byte, and exactly the files that git has or would take."""
    listed = run_command(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *DATA],
        timeout_s=60,
    )
    assert listed.ok, listed.stderr_text
    names = {name for name in listed.stdout_text.split("\0") if name and (ROOT / name).exists()}
    assert {name.partition("/")[0] for name in names} == set(DATA)
    with zipfile.ZipFile(wheel) as archive:
        start = "edgesdk/_data/"
        packed = {n.removeprefix(start) for n in archive.namelist() if n.startswith(start)}
        assert packed == names
        for name in names:
            assert archive.read(start + name) == (ROOT / name).read_bytes(), name


def test_code_is_the_packages(wheel: Path) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "edgesdk").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name
            for name in archive.namelist()
            if ".dist-info/" not in name and not name.startswith("edgesdk/_data/")
        }
    assert packed == wanted


def test_installed_it_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout, `resources.py` finds the folders inside the package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, 'site')\n"
        "from edgesdk.resources import data_folder\n"
        f"for name in {DATA}: print(data_folder(name))\n"
        "from edgesdk.profiles import target_names, load_target\n"
        "assert 'rpi4' in target_names(); load_target('rpi4')\n"
    )
    result = run_command([sys.executable, "-c", code], timeout_s=60, cwd=tmp_path)
    assert result.ok, result.stderr_text
    assert result.stdout_text.split() == [
        str(tmp_path / "site" / "edgesdk" / "_data" / name) for name in DATA
    ]
