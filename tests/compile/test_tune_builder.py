"""The builder: fast, in order, and an end for what hangs or eats memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tuning_place import save_network

from edgesdk.errors import EdgeSdkError
from edgesdk.frontend import import_model
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.builder import Builder, BuildRequest, BuildResult, BuildTask
from edgesdk.tuning.search import CostModel, TaskSearch
from edgesdk.tuning.tasks import Task, collect_tasks, is_tunable

PROFILE = load_target("local")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    network = save_network(tmp_path_factory.mktemp("net") / "net.onnx")
    tasks = collect_tasks(import_model(network, shapes=None), PROFILE)
    return max((t for t in tasks if is_tunable(t)), key=lambda t: t.space.size)


def requests(task: Task, folder: Path, count: int) -> list[BuildRequest]:
    candidates = TaskSearch(task, "random").propose(count, CostModel(0))
    return [
        BuildRequest(n, task.workload, c, folder / f"c{n}.so") for n, c in enumerate(candidates)
    ]


def a_builder(task: Task, **limits: float) -> Builder:
    return Builder(PROFILE, load_toolchain(PROFILE.toolchain), **limits)  # type: ignore[arg-type]


def as_build_task(task: Task) -> BuildTask:
    import tvm

    return BuildTask(task.workload, str(tvm.ir.save_json(task.function)))


def build(task: Task, asked: list[BuildRequest], **limits: float) -> list[BuildResult]:
    with a_builder(task, **limits) as builder:
        builder.add_task(as_build_task(task))
        return list(builder.build(asked))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_results_come_in_order(task: Task, tmp_path: Path) -> None:
    asked = requests(task, tmp_path, 12)
    # Two that end at once stand between those that take their time.
    for number in (2, 7):
        asked[number] = BuildRequest(
            number,
            task.workload,
            {"template": task.space.template, "knobs": {"none": 1}},
            tmp_path / f"c{number}.so",
        )
    results = build(task, asked)
    assert [r.number for r in results] == list(range(12))
    for result, request in zip(results, asked, strict=True):
        if result.number in (2, 7):
            assert result.error_kind == "schedule" and "knobs" in result.error
        else:
            assert result.error_kind in ("", "schedule"), result.error
            assert request.output.exists() == (not result.error_kind)
    assert sum(not r.error_kind for r in results) >= 5


def test_a_build_that_takes_too_long_is_ended(task: Task, tmp_path: Path) -> None:
    asked = requests(task, tmp_path, 3)
    with a_builder(task, timeout_s=0.01) as builder:
        builder.add_task(as_build_task(task))
        results = list(builder.build(asked))
        assert [r.error_kind for r in results] == ["timeout"] * 3
        # Not only reported: none of them works on.
        nursery = psutil.Process().children()
        assert [c for p in nursery for c in p.children(recursive=True)] == []
    assert not any(request.output.exists() for request in asked)


def test_a_build_that_wants_too_much_memory(task: Task, tmp_path: Path) -> None:
    (result,) = build(task, requests(task, tmp_path, 1), memory_limit_bytes=1 << 20)
    assert result.error_kind == "memory", result


def test_a_foreign_template_costs_itself_only(task: Task, tmp_path: Path) -> None:
    (good,) = requests(task, tmp_path, 1)
    strange = BuildRequest(7, task.workload, {"template": "x", "knobs": {}}, tmp_path / "x.so")
    bad, fine = build(task, [strange, good])
    assert (bad.error_kind, fine.error_kind) == ("schedule", "")


def test_a_killed_nursery_is_an_error(task: Task, tmp_path: Path) -> None:
    with a_builder(task) as builder:
        builder.add_task(as_build_task(task))
        list(builder.build(requests(task, tmp_path, 1)))
        for process in psutil.Process().children():
            process.kill()
        with pytest.raises(EdgeSdkError, match="parent process ended"):
            list(builder.build(requests(task, tmp_path, 1)))


def test_the_users_folder_does_not_stand_for_modules(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tvm.py").write_text("raise SystemExit('this is the folder of the user')")
    monkeypatch.chdir(tmp_path)
    (result,) = build(task, requests(task, tmp_path, 1))
    assert result.error_kind == ""


def test_an_end_while_builds_run_is_quick(task: Task, tmp_path: Path) -> None:
    with a_builder(task) as builder:
        builder.add_task(as_build_task(task))
        next(builder.build(requests(task, tmp_path, 8)))
        started = time.monotonic()
    assert time.monotonic() - started < 5
