"""The one strict way from a TOML file (profile, toolchain, device, project) to a frozen dataclass.

A dataclass is its own schema: the field `l1d_kib` is the key `l1d-kib`, a field without a default
is required, and anything else in the file is an error that names the file, the key and the nearest
known one. Supported types: str, int, float, bool, Literal[...], `X | None`, tuple[X, ...],
dict[str, X], Any, and nested dataclasses. A ValueError from a dataclass's `__post_init__` becomes a
ConfigError too.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from edgesdk.errors import ConfigError

T = TypeVar("T")

_TYPE_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def load_toml(path: Path) -> dict[str, Any]:
    """Reads `path`. Raises ConfigError when it is missing, unreadable or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist", hint=f"create {path}, or check its name"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint=f"ls -l {path}"
        ) from error
    except ValueError as error:  # TOMLDecodeError, and UnicodeDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}", hint=f"edit {path}") from error


def check_table(
    data: Mapping[str, Any], schema: type[T], *, where: str, given: Mapping[str, Any] | None = None
) -> T:
    """Turns the table `data` into `schema`, a dataclass; `where` names the file in errors.

    `given` holds fields that do not come from the file (a name, a path): their keys are not allowed
    in it. Raises ConfigError for an unknown key, a missing one, or a value of the wrong type.
    """
    return _check_dataclass(data, schema, where=where, prefix="", given=given or {})


def suggestion(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Returns the hint for an unknown `word`: the nearest of `known`, or else `otherwise`."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else otherwise


def _check_dataclass(
    data: Any, schema: type[T], *, where: str, prefix: str, given: Mapping[str, Any]
) -> T:
    if not isinstance(data, Mapping):
        raise _wrong(where, prefix.rstrip("."), data, "a table")
    hints = typing.get_type_hints(schema)
    fields = {
        f.name.replace("_", "-"): f
        for f in dataclasses.fields(schema)  # type: ignore[arg-type]
        if f.init and f.name not in given
    }
    values = dict(given)
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key '{prefix}{key}'",
                hint=suggestion(key, fields, otherwise=f"known keys: {', '.join(sorted(fields))}"),
            )
        name = fields[key].name
        values[name] = _check_value(value, hints[name], where=where, key=f"{prefix}{key}")
    for key, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and field.name not in values:
            raise ConfigError(
                f"{where}: the key '{prefix}{key}' is missing", hint=f"add '{prefix}{key}' to it"
            )
    try:
        return schema(**values)
    except ValueError as error:  # from __post_init__, which knows what types cannot say
        raise ConfigError(f"{where}: {prefix}{error}", hint="correct that value") from error


def _check_value(value: Any, kind: Any, *, where: str, key: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        # TOML has no null, so `X | None` is X that may be left out.
        (kind,) = (a for a in args if a is not type(None))
        return _check_value(value, kind, where=where, key=key)
    if origin is typing.Literal:
        if value not in args:
            choices = ", ".join(repr(a) for a in args)
            raise ConfigError(
                f"{where}: '{key}' is {value!r}",
                hint=suggestion(str(value), map(str, args), otherwise=f"use one of {choices}"),
            )
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, key, value, "a list")
        return tuple(
            _check_value(item, args[0], where=where, key=f"{key}[{i}]")
            for i, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, key, value, "a table")
        return {
            k: _check_value(v, args[1], where=where, key=f"{key}.{k}") for k, v in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return _check_dataclass(value, kind, where=where, prefix=f"{key}.", given={})  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(where, key, value, _TYPE_NAMES[kind])
    return value


def _wrong(where: str, key: str, value: Any, expected: str) -> ConfigError:
    subject = f"'{key}'" if key else "the content"
    return ConfigError(
        f"{where}: {subject} is {value!r}, not {expected}", hint=f"make {subject} {expected}"
    )
