"""Which rung serves a kernel, and what the coverage says of it."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te

from edgesdk import schedules
from edgesdk.profiles import load_target
from edgesdk.schedules import dense, schedule_kernels
from edgesdk.schedules.features import floor_cycles, kernel_facts

TARGET = load_target("linux-x86_64")  # 8 lanes


def product(rows: int, terms: int, columns: int) -> Any:
    """A matrix product with a template: packed into panels of 32 columns."""
    x = te.placeholder((rows, terms), name="x")
    w = te.placeholder((columns // 32, terms, 32), name="w")
    return te.create_prim_func([x, w, dense.dense_packed(x, w, columns)])


def doubled(size: int) -> Any:
    x = te.placeholder((size,), name="x")
    return te.create_prim_func([x, te.compute((size,), lambda i: x[i] * 2.0, name="y")])


def test_facts_are_the_kernel_s_sizes() -> None:
    facts = kernel_facts(product(6, 100, 64))
    assert facts.spatial == (2, 6, 32)  # panels, rows, columns of a panel
    assert facts.reduce == (100,)
    assert facts.iterations == 6 * 100 * 64 + 6 * 64  # products, and the copy into rows
    assert facts.arguments == ((6, 100), (2, 100, 32), (6, 64))
    assert facts.size_bytes == 4 * (6 * 100 + 100 * 64 + 6 * 64)


def test_a_kernel_is_bound_by_its_work_or_by_its_bytes() -> None:
    work = kernel_facts(product(64, 128, 128))
    assert floor_cycles(work, TARGET) == work.iterations / 8
    assert floor_cycles(work, TARGET, vectors=False) == work.iterations
    moved = kernel_facts(doubled(4096))
    assert floor_cycles(moved, TARGET) == 2 * 4 * 4096 / 8


def test_shares_count_every_call() -> None:
    kernels = {"product": product(64, 128, 128), "doubled": doubled(65536)}
    _, coverage = schedule_kernels(kernels, TARGET, calls={"doubled": 3})
    assert coverage.rungs == {"template": ("product",), "generic": ("doubled",)}
    once = {name: floor_cycles(kernel_facts(f), TARGET) for name, f in kernels.items()}
    total = once["product"] + 3 * once["doubled"]
    assert coverage.shares == pytest.approx(
        {"template": once["product"] / total, "generic": 3 * once["doubled"] / total}
    )
    assert sum(coverage.shares.values()) == pytest.approx(1)


def test_no_kernels_have_no_shares() -> None:
    scheduled, coverage = schedule_kernels({}, TARGET)
    assert (scheduled, coverage.rungs, coverage.shares) == ({}, {}, {})


def test_each_rung_that_fails_leaves_the_kernel_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record that no longer fits, a template and a generic rung that break: no abort, no
    silence."""
    function = product(6, 100, 64)

    def lookup(_: Any) -> tuple[dict[str, Any], str]:
        return {"template": dense.DENSE, "knobs": {"rows": 5}}, "tuned"

    _, coverage = schedule_kernels({"k": function}, TARGET, lookup=lookup)
    assert coverage.rungs == {"template": ("k",)}
    assert [p.split(": ")[:2] for p in coverage.problems] == [["k", "tuned"]]

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(schedules.generic, "schedule", broken)
    monkeypatch.setitem(
        schedules._CPU_TEMPLATES,
        dense.DENSE,
        schedules.Template(dense.DENSE, dense._space, dense._default, broken),
    )
    scheduled, coverage = schedule_kernels({"k": function}, TARGET, lookup=lookup)
    assert coverage.rungs == {"plain": ("k",)}
    assert [p.split(": ")[1] for p in coverage.problems] == ["tuned", "template", "generic"]
    assert scheduled["k"].same_as(function)
