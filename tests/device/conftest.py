"""Emulated boards: real ARM programs, a real SSH server, one of each kind for the whole session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesdk.deploy.emulated_board import Architecture, EmulatedBoard, Server, reason_unavailable
from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import Transport
from edgesdk.devices import Device

FOLDERS = {"small": "size=8m", "readonly": "ro", "noexec": "noexec"}


def a_board(arch: Architecture, server: Server = "openssh") -> Iterator[EmulatedBoard]:
    reason = reason_unavailable(arch)
    if reason is not None:
        pytest.skip(reason)
    with EmulatedBoard(arch, server=server, folders=FOLDERS) as board:
        yield board


@pytest.fixture(scope="session")
def aarch64_board() -> Iterator[EmulatedBoard]:
    yield from a_board("arm64")


@pytest.fixture(scope="session")
def armhf_board() -> Iterator[EmulatedBoard]:
    yield from a_board("armhf")


@pytest.fixture(scope="session")
def board_without_sftp() -> Iterator[EmulatedBoard]:
    yield from a_board("arm64", "openssh-without-sftp")


@pytest.fixture(scope="session")
def dropbear_board() -> Iterator[EmulatedBoard]:
    yield from a_board("arm64", "dropbear")


@pytest.fixture
def mortal_board() -> Iterator[EmulatedBoard]:
    """A board of its own for a test that pulls its plug."""
    yield from a_board("arm64")


@pytest.fixture(params=["aarch64_board", "dropbear_board"])
def any_board(request: pytest.FixtureRequest) -> EmulatedBoard:
    """With SFTP, and without."""
    board = request.getfixturevalue(request.param)
    assert isinstance(board, EmulatedBoard)
    return board


@pytest.fixture(scope="session")
def transport(aarch64_board: EmulatedBoard) -> Iterator[Transport]:
    """One connection for all tests that leave it as it was: logging in takes long, emulated."""
    with open_transport(aarch64_board.device()) as opened:
        yield opened


@pytest.fixture(scope="session")
def dropbear_transport(dropbear_board: EmulatedBoard) -> Iterator[Transport]:
    with open_transport(dropbear_board.device()) as opened:
        yield opened


@pytest.fixture(params=["transport", "dropbear_transport"])
def any_transport(request: pytest.FixtureRequest) -> Transport:
    """With SFTP, and without."""
    opened: Transport = request.getfixturevalue(request.param)
    return opened


def in_folder(board: EmulatedBoard, folder: str) -> Device:
    """The board's entry with another work folder below the home folder."""
    return dataclasses.replace(board.device(), work_dir=folder)


@pytest.fixture
def six_megabytes(tmp_path: Path) -> Path:
    path = tmp_path / "six.bin"
    # Not compressible and not periodic in 32 KB, so that a block in the wrong place shows.
    blocks = (index.to_bytes(4, "little") * 16 for index in range(6_000_000 // 64))
    path.write_bytes(b"".join(blocks))
    return path
