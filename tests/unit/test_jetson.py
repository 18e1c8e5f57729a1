"""Jetsons and desktop GPUs: which board it is, and whether code for a GPU runs on it.

The answers in golden/facts are written after public documentation: `compatible` after the device
trees of Linux (arch/arm64/boot/dts/nvidia) and of Jetson Linux as users posted them, the release
after /etc/nv_tegra_release, modes after the developer guides, the rest after the formats of the
kernel and of nvidia-smi.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesdk.bundle.manifest import ContractInfo
from edgesdk.deploy import connected
from edgesdk.deploy.connected import connected_target
from edgesdk.deploy.doctor import power_finding
from edgesdk.deploy.facts import (
    DeviceFacts,
    GpuFacts,
    check_device,
    contract_of,
    parse_facts,
    power_mode_note,
    target_of,
)
from edgesdk.devices import Device, add_device
from edgesdk.errors import DeviceMismatchError, UsageError
from edgesdk.profiles import GpuInfo, load_target, load_targets, target_families, target_names

GOLDEN = Path(__file__).parent.parent / "golden" / "facts"

# Recording -> target, compute capability, release of Jetson Linux, its CUDA.
BOARDS = {
    "jetson-nano-jetpack-4.6": ("jetson-nano", 53, "32.6.1", "10.2"),
    "jetson-tx2-jetpack-4.6": ("jetson-tx2", 62, "32.6.1", "10.2"),
    "jetson-xavier-nx-jetpack-5.1": ("jetson-xavier-nx", 72, "35.2.1", "11.4"),
    "jetson-agx-xavier-jetpack-5.1": ("jetson-agx-xavier", 72, "35.2.1", "11.4"),
    "jetson-orin-nano-jetpack-6.2": ("jetson-orin-nano", 87, "36.4.3", "12.6"),
    "jetson-orin-nx-jetpack-6.0": ("jetson-orin-nx", 87, "36.3.0", "12.2"),
    "jetson-agx-orin-jetpack-5.1": ("jetson-agx-orin", 87, "35.2.1", "11.4"),
    "jetson-thor-jetpack-7.0": ("jetson-thor", 110, "38.2.0", "13.0"),
}


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def golden(name: str) -> DeviceFacts:
    return parse_facts((GOLDEN / f"{name}.txt").read_text(encoding="utf-8"))


def asks(target: str, **gpu: object) -> ContractInfo:
    """What a bundle for `target` asks; `gpu` changes what it says of its code."""
    contract = contract_of(load_target(target))
    assert contract.gpu is not None
    return dataclasses.replace(contract, gpu=dataclasses.replace(contract.gpu, **gpu))  # type: ignore[arg-type]


def refusal(contract: ContractInfo, facts: DeviceFacts) -> tuple[str, str | None]:
    with pytest.raises(DeviceMismatchError) as caught:
        check_device(contract, facts, name="board")
    return caught.value.message.removeprefix("the bundle cannot run on board: "), caught.value.hint


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_recognised(name: str) -> None:
    target, architecture, release, cuda = BOARDS[name]
    facts = golden(name)
    found = target_of(facts)
    assert found is not None
    assert found.name == target
    assert facts.gpu is not None
    assert facts.gpu.library in (
        "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
        "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1",
    )
    assert (facts.gpu.architecture, facts.gpu.driver) == (architecture, release)
    assert (facts.gpu.cuda, facts.gpu.integrated) == (cuda, True)
    assert found.gpu is not None
    assert found.gpu.architectures == (architecture,)


@pytest.mark.parametrize("name", [n for n in BOARDS if n != "jetson-agx-orin-jetpack-5.1"])
def test_a_bundle_for_the_board_fits(name: str) -> None:
    check_device(asks(BOARDS[name][0]), golden(name), name="board")


def test_an_older_system_than_the_target_promises_is_refused() -> None:
    message, _ = refusal(asks("jetson-agx-orin"), golden("jetson-agx-orin-jetpack-5.1"))
    assert message == "it has glibc 2.31, and the bundle needs 2.35 or newer"


@pytest.mark.parametrize(
    ("built", "name", "hint"),
    [
        ("jetson-orin-nano", "jetson-xavier-nx-jetpack-5.1", "jetson-xavier-nx"),
        ("jetson-nano", "jetson-tx2-jetpack-4.6", "jetson-tx2"),
        ("jetson-tx2", "jetson-thor-jetpack-7.0", "jetson-thor"),
        # Binary compatibility within a major version holds for desktops only.
        ("cuda-sm_80", "jetson-orin-nx-jetpack-6.0", "jetson-orin-nx"),
    ],
)
def test_a_bundle_for_another_gpu_is_refused(built: str, name: str, hint: str) -> None:
    facts = golden(name)
    assert facts.gpu is not None
    contract = dataclasses.replace(asks(built, ptx=None), machine=("aarch64",))
    sm = load_target(built).tvm["arch"]
    assert refusal(contract, facts) == (
        f"built for {sm}, this GPU is sm_{facts.gpu.architecture}",
        f"compile with --target {hint}",
    )


def test_a_desktop_gpu() -> None:
    facts = golden("ubuntu-22.04-rtx-3060")
    assert facts.gpu == GpuFacts(
        library="/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        name="NVIDIA GeForce RTX 3060",
        driver="550.144.03",
        cuda="12.4",
        architecture=86,
    )
    for target in ("cuda-sm_86", "cuda-sm_80"):  # machine code of an older minor version runs
        check_device(asks(target, ptx=None), facts, name="board")
    check_device(asks("cuda-sm_75", ptx_cuda="12.4"), facts, name="board")  # as PTX
    assert refusal(asks("cuda-sm_75", ptx_cuda="12.9"), facts) == (
        "only its PTX serves this GPU (sm_86), and needs a driver of CUDA 12.9; the one there has"
        " 12.4",
        "compile with --target cuda-sm_86",
    )
    assert refusal(asks("cuda-sm_89"), facts) == (
        "built for sm_89, this GPU is sm_86",
        "compile with --target cuda-sm_86",
    )


def test_code_of_cuda_13_is_refused_where_the_driver_cannot_read_it() -> None:
    facts = golden("ubuntu-22.04-rtx-3060")
    message, hint = refusal(asks("cuda-sm_86", cuda="13.0"), facts)
    assert message.startswith("its driver supports CUDA 12.4, and the code was made by CUDA 13")
    assert hint is not None
    assert "edgesdk[cuda]" in hint
    check_device(asks("cuda-sm_86", cuda="12.0"), facts, name="board")


def test_a_driver_that_does_not_tell_the_architecture_is_believed() -> None:
    facts = golden("ubuntu-22.04-tesla-t4-old-driver")
    assert facts.gpu is not None
    assert (facts.gpu.architecture, facts.gpu.cuda) == (None, "11.4")
    check_device(asks("cuda-sm_86"), facts, name="board")


def test_a_machine_without_a_driver_is_refused() -> None:
    message, hint = refusal(asks("cuda-sm_86"), golden("ubuntu-22.04-without-gpu"))
    assert message == "it has no driver for an NVIDIA GPU (libcuda.so.1)"
    assert hint is not None
    # A bundle for the CPU runs there.
    check_device(
        contract_of(load_target("linux-x86_64").host()), golden("debian-12-x86_64"), name="pc"
    )


def test_power_modes_that_hold_the_clocks_down_are_told() -> None:
    nano = load_target("jetson-nano")
    assert power_mode_note(nano, golden("jetson-nano-jetpack-4.6")) is None
    xavier, facts = load_target("jetson-xavier-nx"), golden("jetson-xavier-nx-jetpack-5.1")
    note = power_mode_note(xavier, facts)
    assert note is not None
    assert note.startswith(
        "its power mode is MODE_10W_2CORE; measure in MODE_20W_6CORE or MODE_15W"
    )
    finding = power_finding(xavier, facts, name="nx")
    assert finding is not None
    assert (finding.ok, finding.required) == (False, False)
    assert finding.fix is not None
    assert power_mode_note(load_target("rpi4"), golden("raspberry-pi-os-12-aarch64")) is None


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, DeviceFacts]]:
    """Devices by name, and what each says of itself."""
    answers: dict[str, DeviceFacts] = {}

    @contextlib.contextmanager
    def transport(device: Device) -> Iterator[str]:
        yield device.name

    monkeypatch.setattr(connected, "open_transport", transport)
    monkeypatch.setattr(connected, "read_facts", lambda name: answers[name])
    yield answers


def add(name: str, target: str | None = None) -> None:
    add_device(Device(name, transport="ssh", host=name, target=target))


@pytest.mark.parametrize("name", BOARDS)
def test_the_connected_board_is_asked(name: str, connect: dict[str, DeviceFacts]) -> None:
    add("board")
    connect["board"] = golden(name)
    assert connected_target("jetson", "board") == BOARDS[name][0]
    assert connected_target("jetson", None) == BOARDS[name][0]  # the only device there is


def test_other_targets_ask_nobody() -> None:
    assert connected_target("rpi4", "no-such-device") == "rpi4"


def test_the_device_that_serves_the_family_is_asked(connect: dict[str, DeviceFacts]) -> None:
    with pytest.raises(UsageError, match="there is no device") as caught:
        connected_target("jetson", None)
    assert caught.value.hint == "edgesdk devices add board --ssh user@host --target jetson"
    add("pi")
    add("nano", target="jetson")
    connect["nano"] = golden("jetson-nano-jetpack-4.6")
    assert connected_target("jetson", None) == "jetson-nano"
    add("orin", target="jetson")
    with pytest.raises(UsageError, match="which of nano, orin") as caught:
        connected_target("jetson", None)
    assert caught.value.hint == "add --device nano"


def test_a_board_that_is_none_of_the_family(connect: dict[str, DeviceFacts]) -> None:
    add("tx1")
    connect["tx1"] = dataclasses.replace(
        golden("jetson-nano-jetpack-4.6"),
        board="jetson_tx1",
        compatible=("nvidia,p2371-2180", "nvidia,tegra210"),
    )
    with pytest.raises(DeviceMismatchError) as caught:
        connected_target("jetson", "tx1")
    assert caught.value.message == (
        "tx1 is none of the boards that 'jetson' stands for: it is jetson_tx1"
        " (nvidia,p2371-2180 nvidia,tegra210)"
    )
    assert caught.value.hint is not None
    for board in target_families()["jetson"]:
        assert board.name in caught.value.hint


def test_the_family_is_no_profile() -> None:
    assert "jetson" not in target_names()
    assert len(target_families()["jetson"]) == 8
    with pytest.raises(UsageError, match="whichever board is connected") as caught:
        load_target("jetson")
    assert caught.value.hint is not None
    assert "jetson-orin-nano" in caught.value.hint
    assert load_targets("jetson") == target_families()["jetson"]
    assert load_targets("rpi4") == (load_target("rpi4"),)
    with pytest.raises(UsageError) as caught:
        load_target("jetsn")
    assert caught.value.hint == "did you mean 'jetson'?"


@pytest.mark.parametrize("name", [n for n in target_names() if n.startswith(("jetson", "cuda-"))])
def test_profiles_of_gpus_are_complete(name: str) -> None:
    profile = load_target(name)
    gpu, host = profile.gpu, profile.host()
    assert gpu is not None
    assert gpu.cuda is not None
    assert profile.tvm["kind"] == gpu.api == "cuda"
    assert profile.tvm["arch"] == f"sm_{min(gpu.architectures)}"
    assert profile.tvm["max_shared_memory_per_block"] == 1024 * gpu.shared_kib
    assert profile.tvm["max_num_threads"] == gpu.max_threads
    assert host.tvm["num-cores"] == profile.cpu.cores
    system = "w64-windows" if profile.contract.os == "windows" else "linux"
    assert host.tvm["mtriple"] == f"{profile.machine}-{system}-gnu"
    board = name.startswith("jetson")
    assert (gpu.integrated, gpu.ptx is None, profile.board is not None) == (board, board, board)
    if profile.board is not None:
        assert profile.board.family == "jetson"
        assert profile.board.measuring_modes


@pytest.mark.parametrize("text", ["13", "new", "12.x"])
def test_a_cuda_version_has_two_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"not like '12\.0'"):
        GpuInfo("cuda", multiprocessors=1, shared_kib=48, architectures=(87,), cuda=text)
