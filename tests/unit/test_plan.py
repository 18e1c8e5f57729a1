"""Memory planning: no two buffers that live at the same time share bytes, and space is reused."""

from __future__ import annotations

import random

import pytest

from edgesdk.compiler.plan import ALIGNMENT, _Buffer, assign_offsets, size_of


def buffer(size: int, first: int, last: int) -> _Buffer:
    return _Buffer("arena", size, first_step=first, last_step=last)


def test_a_chain_needs_its_two_largest_neighbours() -> None:
    chain = [buffer(1024, 0, 1), buffer(512, 1, 2), buffer(1024, 2, 3), buffer(64, 3, 4)]
    assert assign_offsets(chain) == 1024 + 512


def test_buffers_of_one_step_do_not_overlap() -> None:
    first, second = buffer(100, 0, 0), buffer(100, 0, 0)
    assert assign_offsets([first, second]) == 256
    assert {first.offset, second.offset} == {0, 128}


def test_an_empty_plan_needs_nothing() -> None:
    assert assign_offsets([]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_lifetimes_never_overlap_in_space_and_time(seed: int) -> None:
    draw = random.Random(seed)
    buffers = []
    for _ in range(60):
        first = draw.randrange(50)
        buffers.append(buffer(draw.randrange(1, 5000), first, first + draw.randrange(10)))
    total = assign_offsets(buffers)
    for i, a in enumerate(buffers):
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.size_bytes <= total
        for b in buffers[:i]:
            if a.first_step <= b.last_step and b.first_step <= a.last_step:
                apart = a.offset + a.size_bytes <= b.offset or b.offset + b.size_bytes <= a.offset
                assert apart, (a, b)
    busiest = max(
        sum(b.size_bytes for b in buffers if b.first_step <= step <= b.last_step)
        for step in range(60)
    )
    assert busiest <= total < sum(b.size_bytes for b in buffers)


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [((), "float32", 4), ((2, 3), "int64", 48), ((5,), "bool", 5), ((0, 4), "float64", 0)],
)
def test_size_in_bytes(shape: tuple[int, ...], dtype: str, size: int) -> None:
    assert size_of(shape, dtype) == size
