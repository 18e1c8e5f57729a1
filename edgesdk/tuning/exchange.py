"""Records in and out of a database: JSON lines that anyone can read, and other databases.

Each line stands for itself, so exports can be cut, joined and filtered with text tools. Sessions
stay where they were run.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, TextIO

from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.records import Records, Where
from edgesdk.tuning.trial import TrialRecord, canonical

# Of the line format; a line of another one is skipped.
FORMAT = 1

_LONGEST_LINE_BYTES = 1 << 20
_BATCH = 500
_MOST_CORES = 4096
_WORKLOAD = re.compile(r"[0-9a-f]{8,128}")
_ERROR_KIND = re.compile(r"[a-z_]{0,32}")


@dataclass(frozen=True)
class Imported:
    """What came in. `skipped` counts the lines that were not taken, by reason; `examples` has the
    number of the first line for each reason."""

    added: int
    duplicates: int
    skipped: dict[str, int]
    examples: dict[str, int]


def export_records(records: Records, stream: TextIO, where: Where | None = None) -> int:
    """Writes the trials that are meant as JSON lines and returns how many they are."""
    number = 0
    for trial in records.trials(where):
        stream.write(canonical(to_json(trial)) + "\n")
        number += 1
    return number


def import_records(records: Records, stream: BinaryIO) -> Imported:
    """Adds the trials of JSON lines, skipping lines that are no valid trial.

    Trials that are there already are not added again, so an import that was interrupted can be
    repeated.
    """
    added = duplicates = 0
    skipped: Counter[str] = Counter()
    examples: dict[str, int] = {}

    def valid() -> Iterator[TrialRecord]:
        for number, line in enumerate(_lines(stream), start=1):
            if not line.strip():
                continue
            try:
                yield from_json(_parse(line))
            except ValueError as error:
                skipped[str(error)] += 1
                examples.setdefault(str(error), number)

    for was_added in _add_all(records, valid()):
        added += was_added
        duplicates += not was_added
    return Imported(added, duplicates, dict(skipped), examples)


def merge_records(records: Records, other: Records) -> Imported:
    """Adds the trials of another database, those that are there already not again."""
    results = Counter(_add_all(records, other.trials()))
    return Imported(results[True], results[False], {}, {})


def to_json(trial: TrialRecord) -> dict[str, Any]:
    """Returns a trial as plain JSON data, with all that is needed to replay it elsewhere."""
    data = {f.name: getattr(trial, f.name) for f in fields(TrialRecord)}
    data["device"] = asdict(trial.device)
    data["samples_s"] = [s if math.isfinite(s) else None for s in trial.samples_s]
    return {"format": FORMAT, **data}


def from_json(data: Any) -> TrialRecord:
    """Undoes to_json(). Raises ValueError, which says why, if `data` is no trial."""
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if data.get("format") != FORMAT:
        raise ValueError("made by another version of edgesdk" if "format" in data else "no record")
    values = {key: value for key, value in data.items() if key != "format"}
    _check(values, TrialRecord, "")
    device, samples, candidate = values["device"], values["samples_s"], values["candidate"]
    _check(device, DeviceKey, "device.")
    try:
        canonical(data).encode()
        possible = all(s is None or (_is(s, float) and math.isfinite(s)) for s in samples)
        possible = possible and math.isfinite(values["created"])
    except (ValueError, OverflowError):
        # 1e999, or a text with half a character.
        raise ValueError("a value is out of range") from None
    if not _WORKLOAD.fullmatch(values["workload"]):
        raise ValueError("workload is no hash")
    if not _ERROR_KIND.fullmatch(values["error_kind"]):
        raise ValueError("error_kind is no word")
    if not possible or not 0 <= device["cores"] <= _MOST_CORES:
        raise ValueError("a number is none or out of range")
    if not isinstance(candidate.get("template"), str) or not _is(candidate.get("knobs"), dict):
        raise ValueError("candidate has no template and knobs")
    values["device"] = DeviceKey(**device)
    values["samples_s"] = tuple(math.nan if s is None else float(s) for s in samples)
    return TrialRecord(**values)


# What each field of TrialRecord and DeviceKey is in JSON, where it is no text.
_TYPES: dict[str, type] = {
    "device": dict,
    "candidate": dict,
    "extra": dict,
    "samples_s": list,
    "created": float,
    "cores": int,
}
_NAMES = {dict: "a table", list: "a list", float: "a number", int: "a whole number", str: "a text"}


def _check(values: dict[str, Any], kind: type, prefix: str) -> None:
    names = [f.name for f in fields(kind)]
    for name in names:
        if name not in values:
            raise ValueError(f"{prefix}{name} is missing")
        expected = _TYPES.get(name, str)
        if not _is(values[name], expected):
            raise ValueError(f"{prefix}{name} is not {_NAMES[expected]}")
    if set(values) - set(names):
        raise ValueError(f"unknown key in {prefix.rstrip('.') or 'the record'}")


def _is(value: Any, expected: type) -> bool:
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, expected) and not isinstance(value, bool)


def _parse(line: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError

    if len(line) > _LONGEST_LINE_BYTES:
        raise ValueError(f"longer than {_LONGEST_LINE_BYTES >> 20} MiB")
    try:
        return json.loads(line.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of `stream`, of which a longer one than allowed is only begun."""
    while line := stream.readline(_LONGEST_LINE_BYTES + 1):
        rest = line
        while len(rest) > _LONGEST_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_LONGEST_LINE_BYTES + 1)
        yield line


def _add_all(records: Records, trials: Iterable[TrialRecord]) -> Iterator[bool]:
    # In batches: one commit for each would take long, a single one would keep others from writing.
    rest = iter(trials)
    while batch := list(itertools.islice(rest, _BATCH)):
        with records.transaction():
            results = [records.add(trial) for trial in batch]
        yield from results
