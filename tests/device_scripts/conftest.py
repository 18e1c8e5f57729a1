"""The builds of device_scripts/, each made once per run of the tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from device_build import Build, build_device_scripts


@pytest.fixture(scope="session")
def build() -> Callable[[str], Build]:
    """build(kind), see `build_device_scripts`."""
    return functools.cache(build_device_scripts)
