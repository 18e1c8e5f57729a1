"""Programs and files over SSH, with OpenSSH and with Dropbear, which has no SFTP here."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import in_folder

from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import DeviceTimeoutError, Transport
from edgesdk.errors import DeviceError, DeviceUnreachableError, UsageError


def files_in(transport: Transport, folder: str) -> list[str]:
    result = transport.run(["find", folder, "-type", "f"], timeout_s=20)
    assert result.ok, result.stderr_text
    return sorted(result.stdout_text.split())


def processes(transport: Transport) -> str:
    return transport.run(["ps", "-eo", "args"], timeout_s=20).stdout_text


def test_a_program_gets_its_arguments_and_input_unchanged(any_transport: Transport) -> None:
    awkward = ["a b", "$HOME", "it's", '"', "*", "\\n", "", "ä"]
    result = any_transport.run(["printf", "%s|", *awkward], timeout_s=20)
    assert result.stdout_text == "".join(f"{word}|" for word in awkward)
    data = bytes(range(256)) * 4000
    result = any_transport.run(["cat"], timeout_s=60, input_bytes=data)
    assert result.ok
    assert result.stdout == data


def test_output_and_exit_code_come_back_apart(any_transport: Transport) -> None:
    result = any_transport.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)
    assert (result.returncode, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert any_transport.run(["no-such-program"], timeout_s=20).returncode == 127


def test_a_signal_is_a_negative_exit_code(any_transport: Transport) -> None:
    assert any_transport.run(["sh", "-c", "kill -ILL $$"], timeout_s=20).returncode == -4


def test_much_output_on_both_streams_does_not_block(transport: Transport) -> None:
    script = "head -c 5000000 /dev/zero & head -c 5000000 /dev/zero >&2; wait"
    result = transport.run(["sh", "-c", script], timeout_s=60)
    assert (len(result.stdout), len(result.stderr)) == (5_000_000, 5_000_000)


def test_what_the_shell_prints_at_login_is_not_output(aarch64_board: EmulatedBoard) -> None:
    # Debian's bash reads .bashrc for commands over SSH too; root has bash as its shell.
    device = dataclasses.replace(aarch64_board.device(), user="root")
    with open_transport(device) as transport:
        write = 'printf "echo welcome\\necho hello >&2\\n" >"$HOME/.bashrc"'
        assert transport.run(["sh", "-c", write], timeout_s=20).ok
        try:
            argv = ["ssh", "-F", str(aarch64_board.ssh_config), "-l", "root", "board", "true"]
            noisy = subprocess.run(argv, capture_output=True, timeout=30)
            assert (noisy.stdout, noisy.stderr) == (b"welcome\n", b"hello\n")
            with open_transport(device) as other:
                result = other.run(["echo", "x"], timeout_s=20)
                assert (result.stdout, result.stderr) == (b"x\n", b"")
        finally:
            transport.run(["rm", ".bashrc"], timeout_s=20)


def test_the_time_limit_ends_the_program_and_its_children(any_transport: Transport) -> None:
    with pytest.raises(DeviceTimeoutError) as caught:
        any_transport.run(["sh", "-c", "sleep 4711 & sleep 4712"], timeout_s=1)
    assert caught.value.exit_code == 7
    for _ in range(50):
        if "sleep 471" not in processes(any_transport):
            return
        time.sleep(0.1)
    pytest.fail(f"still running:\n{processes(any_transport)}")


def test_a_file_of_six_megabytes_arrives_and_comes_back(
    any_transport: Transport, six_megabytes: Path, tmp_path: Path
) -> None:
    seen: list[int] = []
    any_transport.upload(six_megabytes, "up/load/six.bin", progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == six_megabytes.stat().st_size
    folder = f"{any_transport.work_dir}/up/load"
    assert files_in(any_transport, folder) == [f"{folder}/six.bin"]
    back = tmp_path / "back.bin"
    any_transport.download("up/load/six.bin", back)
    assert back.read_bytes() == six_megabytes.read_bytes()


def test_openssh_without_sftp_takes_files_too(
    board_without_sftp: EmulatedBoard, six_megabytes: Path
) -> None:
    with open_transport(board_without_sftp.device()) as transport:
        transport.upload(six_megabytes, "six.bin")
        size = transport.run(["wc", "-c", f"{transport.work_dir}/six.bin"], timeout_s=20)
    assert size.stdout_text.split()[0] == str(six_megabytes.stat().st_size)


def test_an_uploaded_program_runs_and_is_replaced_while_it_runs(
    any_transport: Transport, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    # A copy of a real ARM program: writing into it while it runs is what "text file busy" refuses.
    any_transport.download("/usr/bin/sleep", program)
    any_transport.upload(program, "bin/program", executable=True)
    path = f"{any_transport.work_dir}/bin/program"
    with any_transport.open_stream([path, "60"]):
        any_transport.upload(program, "bin/program", executable=True)
        assert any_transport.run([path, "0"], timeout_s=20).ok
    plain = tmp_path / "plain"
    plain.write_text("x")
    any_transport.upload(plain, "bin/plain")
    assert not any_transport.run(
        ["test", "-x", f"{any_transport.work_dir}/bin/plain"], timeout_s=9
    ).ok


def test_without_a_hash_program_the_file_is_read_back(
    any_board: EmulatedBoard, tmp_path: Path
) -> None:
    """The board's shell finds the tools of one folder only, and none of them can hash."""
    content = tmp_path / "file"
    content.write_bytes(b"content\n" * 1000)
    with open_transport(any_board.device()) as transport:
        tools = "cat chmod df dirname find head mkdir mv rm sh sync tail"
        script = f"mkdir -p few; for t in {tools}; do ln -sf /bin/$t few/; done"
        assert transport.run(["sh", "-c", script], timeout_s=20).ok
        real_run = transport.run

        def without_tools(script: str) -> str:
            return f"PATH={tools_folder}; {script}"

        tools_folder = real_run(["sh", "-c", "echo $PWD/few"], timeout_s=20).stdout_text.strip()
        session = transport._session  # type: ignore[attr-defined]
        original = session.run

        def run(argv, **options):  # type: ignore[no-untyped-def]
            if argv[:2] == ["sh", "-c"]:
                argv = ["sh", "-c", without_tools(argv[2]), *argv[3:]]
            return original(argv, **options)

        session.run = run
        assert transport.run(["sh", "-c", "sha256sum /dev/null"], timeout_s=20).returncode == 127
        reads: list[str] = []
        fetch = transport._fetch  # type: ignore[attr-defined]

        def noted_fetch(source, file):  # type: ignore[no-untyped-def]
            reads.append(source)
            if len(reads) == 2:
                file.write(b"damage")
            fetch(source, file)

        transport._fetch = noted_fetch  # type: ignore[attr-defined]
        transport.upload(content, "unhashed/file")
        assert len(reads) == 1
        with pytest.raises(DeviceError, match="arrived damaged"):
            transport.upload(content, "unhashed/other")
        session.run = original
        assert files_in(transport, f"{transport.work_dir}/unhashed") == [
            f"{transport.work_dir}/unhashed/file"
        ]


def test_a_full_disk_is_called_that_and_left_clean(
    any_board: EmulatedBoard, six_megabytes: Path
) -> None:
    with open_transport(in_folder(any_board, "small")) as transport:
        transport.run(["sh", "-c", f"rm -rf {transport.work_dir}/*"], timeout_s=20)
        transport.upload(six_megabytes, "one.bin")
        with pytest.raises(
            DeviceError, match=r"disk is full: six.bin needs 6.0 MB.* free"
        ) as caught:
            transport.upload(six_megabytes, "two.bin")
        assert caught.value.hint
        assert files_in(transport, transport.work_dir) == [f"{transport.work_dir}/one.bin"]


def test_a_read_only_folder_is_called_that(any_board: EmulatedBoard, six_megabytes: Path) -> None:
    with (
        open_transport(in_folder(any_board, "readonly")) as transport,
        pytest.raises(DeviceError, match="Read-only file system"),
    ):
        transport.upload(six_megabytes, "file")


def test_a_folder_of_somebody_else_is_called_that(
    any_board: EmulatedBoard, six_megabytes: Path
) -> None:
    with (
        open_transport(in_folder(any_board, "/root/folder")) as transport,
        pytest.raises(DeviceError, match="Permission denied"),
    ):
        transport.upload(six_megabytes, "file")


def test_a_program_on_a_noexec_mount_is_refused(
    any_board: EmulatedBoard, six_megabytes: Path
) -> None:
    with open_transport(in_folder(any_board, "noexec")) as transport:
        transport.upload(six_megabytes, "data")
        with pytest.raises(DeviceError, match="mounted noexec"):
            transport.upload(six_megabytes, "program", executable=True)


def test_a_folder_in_the_way_is_not_filled(transport: Transport, six_megabytes: Path) -> None:
    assert transport.run(["mkdir", "-p", f"{transport.work_dir}/way/taken"], timeout_s=20).ok
    with pytest.raises(DeviceError, match="is a folder there"):
        transport.upload(six_megabytes, "way/taken")
    assert files_in(transport, f"{transport.work_dir}/way") == []


def test_files_that_are_not_there(any_transport: Transport, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file"):
        any_transport.download("absent", tmp_path / "absent")
    with pytest.raises(UsageError, match="is not a file"):
        any_transport.upload(tmp_path / "absent", "absent")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_talks_both_ways_and_ends_its_program(any_transport: Transport) -> None:
    with any_transport.open_stream(["sh", "-c", "echo ready >&2; cat; sleep 4713"]) as stream:
        for _ in range(3):
            stream.write(b"ping")
            got = b""
            while len(got) < 4:
                got += stream.read(4 - len(got), timeout_s=10)
            assert got == b"ping"
        assert stream.stderr_text() == "ready\n"
        with pytest.raises(DeviceTimeoutError):
            stream.read(1, timeout_s=0.2)
        stream.close_input()
    for _ in range(50):
        if "sleep 4713" not in processes(any_transport):
            return
        time.sleep(0.1)
    pytest.fail("the program of the stream still runs")


def test_the_end_of_a_stream_is_an_empty_read(any_transport: Transport) -> None:
    with any_transport.open_stream(["echo", "x"]) as stream:
        assert stream.read(100, timeout_s=10) == b"x\n"
        assert stream.read(100, timeout_s=10) == b""


def test_a_board_that_dies_in_mid_transfer(
    mortal_board: EmulatedBoard, six_megabytes: Path
) -> None:
    with open_transport(mortal_board.device()) as transport:

        def pull_the_plug(done: int) -> None:
            if done > 2_000_000:
                mortal_board.kill()

        with pytest.raises(DeviceUnreachableError, match="was lost"):
            transport.upload(six_megabytes, "file", progress=pull_the_plug)
        with pytest.raises(DeviceUnreachableError):
            transport.run(["true"], timeout_s=10)


def test_a_board_that_dies_while_a_program_runs(mortal_board: EmulatedBoard) -> None:
    with open_transport(mortal_board.device()) as transport:
        timer = threading.Timer(1.0, mortal_board.kill)
        timer.start()
        try:
            with pytest.raises(DeviceUnreachableError, match="lost while sleep ran"):
                transport.run(["sleep", "60"], timeout_s=30)
        finally:
            timer.join()


def test_several_programs_at_once_on_one_connection(transport: Transport) -> None:
    results: dict[int, bytes] = {}

    def work(index: int) -> None:
        results[index] = transport.run(["echo", str(index)], timeout_s=30).stdout

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: f"{index}\n".encode() for index in range(4)}
