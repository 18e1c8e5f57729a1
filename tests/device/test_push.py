"""Bundles on boards: what is copied, what is refused before, switching and going back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import in_folder

from edgesdk.bundle.manifest import (
    ContractInfo,
    FileInfo,
    Manifest,
    TensorInfo,
    VerificationInfo,
)
from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.facts import read_facts
from edgesdk.deploy.push import RemoteBundle, list_remote, push_bundle, rollback
from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import Transport
from edgesdk.errors import BundleError, DeviceError, DeviceMismatchError, DeviceUnreachableError

AARCH64 = ContractInfo("linux", ("aarch64",), "glibc", "2.31", ("asimd",))
ARMHF = ContractInfo("linux", ("armv7l", "armv8l", "aarch64"), "glibc", "2.31", ("neon",))

MakeBundle = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    def make(
        library: bytes = b"library",
        *,
        name: str = "net",
        contract: ContractInfo = AARCH64,
        more: Sequence[str] = (),
        **changes: object,
    ) -> Path:
        """A bundle of a library, a launcher that prints it, and the files `more`."""
        folder = tmp_path / f"{name}-{hashlib.sha256(library).hexdigest()[:6]}"
        contents = {
            "lib/libnet.so": library,
            "bin/edgesdk-run": b'#!/bin/sh\ncat "$(dirname "$0")/../lib/libnet.so"\n',
        } | {path: path.encode() for path in more}
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        manifest = Manifest(
            name=name,
            target="rpi4",
            description="for tests",
            library="lib/libnet.so",
            launcher="bin/edgesdk-run",
            contract=contract,
            inputs=(TensorInfo("x", (1,), "float32"),),
            outputs=(TensorInfo("y", (1,), "float32"),),
            golden_inputs=tuple(path for path in more if "input" in path),
            golden_outputs=tuple(path for path in more if "output" in path),
            verification=VerificationInfo("not run", "none", None, None, 1e-4),
            model_sha256="",
            abi_version=1,
            precision="fp32",
            weights_bytes=0,
            arena_bytes=0,
            files={
                path: FileInfo(hashlib.sha256(content).hexdigest(), len(content))
                for path, content in contents.items()
            },
            tools={},
        )
        manifest = dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]
        (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        return folder

    return make


@pytest.fixture
def fresh(transport: Transport) -> Iterator[Transport]:
    """A connection to a board without bundles."""
    yield transport
    remove_bundles(transport)


@pytest.fixture
def any_fresh(any_transport: Transport) -> Iterator[Transport]:
    """Like `fresh`, with SFTP and without."""
    yield any_transport
    remove_bundles(any_transport)


def remove_bundles(transport: Transport) -> None:
    transport.run(["rm", "-rf", f"{transport.work_dir}/bundles"], timeout_s=20)


def use(transport: Transport, bundle: RemoteBundle) -> str:
    """What the program in the current folder prints: the content of its library."""
    program = f"{bundle.current_folder}/bin/edgesdk-run"
    result = transport.run([program], timeout_s=20)
    assert result.ok, result.stderr_text
    return result.stdout_text


def test_push_switch_push_again_and_rollback(any_fresh: Transport, make_bundle: MakeBundle) -> None:
    first = push_bundle(make_bundle(b"one"), any_fresh)
    assert first.copied == ("lib/libnet.so", "bin/edgesdk-run", "manifest.json")
    assert first.folder == f"{any_fresh.work_dir}/bundles/net/{first.version}"
    assert use(any_fresh, first) == "one"

    again = push_bundle(make_bundle(b"one"), any_fresh)
    assert (again.copied, again.copied_bytes, again.version) == ((), 0, first.version)

    second = push_bundle(make_bundle(b"two"), any_fresh)
    assert set(second.copied) == {"lib/libnet.so", "manifest.json"}
    assert use(any_fresh, second) == "two"
    # A program of the first version that still runs has its files.
    assert any_fresh.run([first.launcher], timeout_s=20).stdout == b"one"
    assert [(v.version, v.current) for v in list_remote(any_fresh)] == [
        (first.version, False),
        (second.version, True),
    ]

    back = rollback("net", any_fresh)
    assert (back.version, back.folder, back.current) == (first.version, first.folder, True)
    assert use(any_fresh, first) == "one"
    with pytest.raises(DeviceError, match="no version of 'net' older"):
        rollback("net", any_fresh)
    assert use(any_fresh, first) == "one"


def test_only_the_last_versions_are_kept(
    fresh: Transport, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgesdk.deploy.push.KEPT_VERSIONS", 2)
    pushed = [push_bundle(make_bundle(bytes([65 + i])), fresh) for i in range(3)]
    kept = [v.version for v in list_remote(fresh)]
    assert kept == [bundle.version for bundle in pushed[1:]]
    found = fresh.run(["ls", f"{fresh.work_dir}/bundles/net"], timeout_s=20)
    assert sorted(found.stdout_text.split()) == sorted([*kept, "current", "history"])


def test_going_back_and_on_does_not_lead_to_the_bad_version(
    fresh: Transport, make_bundle: MakeBundle
) -> None:
    good, bad, fixed = (make_bundle(content) for content in (b"good", b"bad", b"fixed"))
    wanted = push_bundle(good, fresh).version
    push_bundle(bad, fresh)
    rollback("net", fresh)
    push_bundle(fixed, fresh)
    assert rollback("net", fresh).version == wanted


def test_everything_takes_the_header_along(fresh: Transport, make_bundle: MakeBundle) -> None:
    golden = ["golden/input_0.npy", "golden/output_0.npy"]
    folder = make_bundle(more=[*golden, "include/net.h", "README.md"])
    plain = push_bundle(folder, fresh)
    assert set(plain.copied) == {"lib/libnet.so", "bin/edgesdk-run", *golden, "manifest.json"}
    whole = push_bundle(folder, fresh, everything=True)
    assert plain.version == whole.version
    assert set(whole.copied) == {"include/net.h", "README.md"}


def test_a_file_damaged_on_the_board_is_sent_again(
    fresh: Transport, make_bundle: MakeBundle
) -> None:
    pushed = push_bundle(make_bundle(b"intact"), fresh)
    fresh.run(["sh", "-c", f"echo x >{pushed.library}"], timeout_s=20)
    assert push_bundle(make_bundle(b"intact"), fresh).copied == ("lib/libnet.so",)
    assert use(fresh, pushed) == "intact"


def test_progress_counts_all_files(fresh: Transport, make_bundle: MakeBundle) -> None:
    seen: list[tuple[str, int, int]] = []
    pushed = push_bundle(make_bundle(), fresh, progress=lambda *state: seen.append(state))
    assert [state[1] for state in seen] == sorted(state[1] for state in seen)
    assert seen[-1] == ("manifest.json", pushed.copied_bytes, pushed.copied_bytes)


def test_two_bundles_stand_side_by_side(fresh: Transport, make_bundle: MakeBundle) -> None:
    push_bundle(make_bundle(name="one"), fresh)
    push_bundle(make_bundle(name="two"), fresh)
    assert [(v.name, v.current) for v in list_remote(fresh)] == [
        ("one", True),
        ("two", True),
    ]
    with pytest.raises(DeviceError, match=r"no bundle 'three'; it has one, two"):
        rollback("three", fresh)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": ("x86_64",)}, "it is aarch64, and the bundle is for x86_64"),
        (
            {"machine": ("armv7l", "armv8l", "aarch64")},
            "its system runs 64-bit ARM programs, and the bundle is 32-bit ARM",
        ),
        ({"libc": "musl"}, "its C library is glibc, and the bundle needs musl"),
        ({"libc_version": "2.99"}, "it has glibc 2.36, and the bundle needs 2.99 or newer"),
        ({"os": "android"}, "it runs linux, and the bundle is for android"),
    ],
)
def test_a_bundle_for_something_else_is_refused_before_copying(
    fresh: Transport, make_bundle: MakeBundle, changes: dict[str, object], reason: str
) -> None:
    contract = dataclasses.replace(AARCH64, **changes)  # type: ignore[arg-type]
    with pytest.raises(DeviceMismatchError, match=reason) as caught:
        push_bundle(make_bundle(contract=contract), fresh)
    assert caught.value.exit_code == 7
    assert caught.value.hint
    assert not fresh.run(["ls", f"{fresh.work_dir}/bundles"], timeout_s=20).ok


def test_a_32_bit_board_takes_its_bundle_and_no_other(
    armhf_board: EmulatedBoard, make_bundle: MakeBundle
) -> None:
    with open_transport(armhf_board.device()) as transport:
        with pytest.raises(DeviceMismatchError, match="it is armv7l"):
            push_bundle(make_bundle(contract=AARCH64), transport)
        pushed = push_bundle(make_bundle(b"32", contract=ARMHF), transport)
        assert use(transport, pushed) == "32"


def test_the_facts_of_emulated_boards(
    aarch64_board: EmulatedBoard, armhf_board: EmulatedBoard
) -> None:
    for board, machine, programs in (
        (aarch64_board, "aarch64", "aarch64"),
        (armhf_board, "armv7l", "arm"),
    ):
        with open_transport(board.device()) as transport:
            facts = read_facts(transport)
            again = transport.run(
                ["busybox", "sh", "-s", "--", transport.work_dir],
                timeout_s=30,
                input_bytes=Path("device_scripts/device_facts.sh").read_bytes(),
            )
        assert (facts.os, facts.machine, facts.programs) == ("linux", machine, programs)
        assert (facts.libc, facts.libc_version) == ("glibc", "2.36")
        assert facts.os_release == "debian 12"
        assert facts.disk_available_kib is not None
        assert facts.disk_available_kib <= 1 << 20  # the board's home, not this machine's disk
        assert facts.memory_total_kib
        assert not facts.soft_float
        assert again.ok
        assert again.stdout_text.endswith("end=yes\n")
        assert again.stderr == b""


def test_a_damaged_bundle_is_not_sent(fresh: Transport, make_bundle: MakeBundle) -> None:
    folder = make_bundle(b"whole")
    (folder / "lib/libnet.so").write_bytes(b"other")
    with pytest.raises(BundleError, match="not what was written"):
        push_bundle(folder, fresh)


def test_a_manifest_cannot_lead_out_of_the_folder(
    fresh: Transport, make_bundle: MakeBundle
) -> None:
    outside = make_bundle(b"1", more=["../golden_input"])
    absent = make_bundle(b"2", golden_inputs=("README.md",))
    for bad in (outside, absent):
        with pytest.raises(BundleError, match="is not among its files"):
            push_bundle(bad, fresh)
    named = make_bundle(b"3")
    text = (named / "manifest.json").read_text(encoding="utf-8")
    (named / "manifest.json").write_text(text.replace('"name": "net"', '"name": "../net"'))
    with pytest.raises(BundleError, match="no name of a bundle"):
        push_bundle(named, fresh)


def test_a_bundle_too_large_for_the_board_is_refused_before_copying(
    aarch64_board: EmulatedBoard, make_bundle: MakeBundle
) -> None:
    with open_transport(in_folder(aarch64_board, "small/work")) as transport:
        first = push_bundle(make_bundle(b"small"), transport)
        with pytest.raises(DeviceError, match=r"disk is full: the bundle needs 9\.0 MB"):
            push_bundle(make_bundle(b"x" * 9_000_000), transport)
        assert use(transport, first) == "small"
        assert [v.version for v in list_remote(transport)] == [first.version]
        transport.run(["rm", "-rf", transport.work_dir], timeout_s=20)


def test_a_board_that_dies_while_a_bundle_is_pushed(
    mortal_board: EmulatedBoard, make_bundle: MakeBundle
) -> None:
    bundle = make_bundle(bytes(3_000_000))

    def pull_the_plug(name: str, done: int, total: int) -> None:
        if done > 1_000_000:
            mortal_board.kill()

    with (
        open_transport(mortal_board.device()) as transport,
        pytest.raises(DeviceUnreachableError, match="was lost"),
    ):
        push_bundle(bundle, transport, progress=pull_the_plug)


def test_an_interrupted_push_goes_on_where_it_was(
    fresh: Transport, make_bundle: MakeBundle
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(name: str, done: int, total: int) -> None:
        if name == "golden/input_0.npy":
            raise Interrupted

    before = push_bundle(make_bundle(b"old"), fresh)
    bundle = make_bundle(b"new", more=["golden/input_0.npy"])
    with pytest.raises(Interrupted):
        push_bundle(bundle, fresh, progress=interrupt)
    assert use(fresh, before) == "old"
    assert [v.version for v in list_remote(fresh)] == [before.version]
    after = push_bundle(bundle, fresh)
    assert set(after.kept) == {"lib/libnet.so", "bin/edgesdk-run"}
    assert use(fresh, after) == "new"
