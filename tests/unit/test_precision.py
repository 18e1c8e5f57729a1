"""What a target may compute with."""

from __future__ import annotations

import pytest

from edgesdk.errors import UsageError
from edgesdk.precision import find_precision, in_precision
from edgesdk.profiles import load_target


def test_tf32_needs_tensor_cores_that_have_it() -> None:
    tf32 = find_precision("tf32")
    profile = in_precision(load_target("cuda-sm_80"), tf32)
    assert profile.precision == "tf32"
    for name in ("cuda-sm_75", "jetson-agx-xavier", "rpi4", "linux-aarch64-mali"):
        with pytest.raises(UsageError, match=f"{name} has no TF32") as caught:
            in_precision(load_target(name), tf32)
        assert caught.value.hint == "leave out --allow-tf32"


def test_fp32_changes_nothing() -> None:
    """No profile allows TF32 by itself."""
    profile = load_target("cuda-sm_90")
    assert in_precision(profile, find_precision("fp32")) == profile
    assert profile.precision == "fp32"


def test_unknown() -> None:
    with pytest.raises(UsageError, match="unknown precision 'int4'"):
        find_precision("int4")
