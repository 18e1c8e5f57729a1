"""The strict reader that profiles, toolchains, devices and the project file share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from edgesdk.errors import ConfigError
from edgesdk.settings import check_table, load_toml, suggestion


@dataclass(frozen=True)
class Inner:
    size_kib: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float
    mode: Literal["fast", "exact"] = "fast"
    on: bool = False
    note: str | None = None
    inner: Inner | None = None
    by_name: dict[str, Inner] | None = None
    rows: tuple[Inner, ...] = ()
    anything: Any = None


def check(data: dict[str, Any]) -> Outer:
    return check_table(data, Outer, where="f.toml", given={"name": "n"})


def test_everything_at_once() -> None:
    data = {
        "ratio": 2,
        "mode": "exact",
        "on": True,
        "note": "x",
        "inner": {"size-kib": 1, "tags": ["a", "b"]},
        "by-name": {"my key": {"size-kib": 2}},
        "rows": [{"size-kib": 3}],
        "anything": {"free": [1]},
    }
    assert check(data) == Outer(
        name="n",
        ratio=2.0,
        mode="exact",
        on=True,
        note="x",
        inner=Inner(1, ("a", "b")),
        by_name={"my key": Inner(2)},
        rows=(Inner(3),),
        anything={"free": [1]},
    )
    assert isinstance(check({"ratio": 2}).ratio, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "f.toml: the key 'ratio' is missing"),
        ({"ratio": 1, "name": "x"}, "f.toml: unknown key 'name'"),
        ({"ratio": True}, "f.toml: 'ratio' is True, not a number"),
        ({"ratio": 1, "on": 1}, "f.toml: 'on' is 1, not true or false"),
        ({"ratio": 1, "note": 1}, "f.toml: 'note' is 1, not a string"),
        ({"ratio": 1, "mode": ["fast"]}, "f.toml: 'mode' is ['fast']"),
        ({"ratio": 1, "inner": 1}, "f.toml: 'inner' is 1, not a table"),
        ({"ratio": 1, "inner": {}}, "f.toml: the key 'inner.size-kib' is missing"),
        ({"ratio": 1, "by-name": []}, "f.toml: 'by-name' is [], not a table"),
        ({"ratio": 1, "by-name": {"a": {"b": 1}}}, "f.toml: unknown key 'by-name.a.b'"),
        ({"ratio": 1, "rows": [{"size-kib": "1"}]}, "f.toml: 'rows[0].size-kib' is '1', not an "),
    ],
)
def test_what_is_wrong(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(data)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_unknown_key_without_a_near_one_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        check_table({"qqq": 1}, Inner, where="f.toml")
    assert caught.value.hint == "known keys: size-kib, tags"


def test_suggestion_ignores_case() -> None:
    assert suggestion("RPI4", ["rpi4", "local"], otherwise="-") == "did you mean 'rpi4'?"
    assert suggestion("qqq", ["rpi4", "local"], otherwise="-") == "-"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path)
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_toml(tmp_path / "bad.toml")
