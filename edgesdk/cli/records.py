"""records: the database of tuning records, listed, exported, brought in, thinned out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from edgesdk import console
from edgesdk.cli.options import AsJson, goes_on
from edgesdk.errors import UsageError

if TYPE_CHECKING:
    from edgesdk.tuning.exchange import Imported
    from edgesdk.tuning.records import Summary, Where

_DAY_S = 86_400.0

records_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)

Database = Annotated[
    Path | None,
    typer.Option("--records", metavar="PATH", help="Another database than the user's own."),
]
Target = Annotated[
    str | None, typer.Option("--target", metavar="T", help="Only records for this target.")
]
DeviceText = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="TEXT",
        help="Only records of devices with this in the name of board, CPU or GPU.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    app.add_typer(records_app, name="records")


@records_app.callback()
def records(context: typer.Context, as_json: AsJson = False) -> None:
    """List the kernels that were tuned so far; export, import or delete records."""
    if not goes_on(context, as_json):
        records_list(as_json=as_json)


@records_app.command("list")
def records_list(
    target: Target = None,
    device: DeviceText = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="At most so many lines.")
    ] = 40,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the kernels that were tuned, the newest first."""
    from edgesdk.tuning.records import Records, records_path

    if database is None and not records_path().exists():
        summaries: list[Summary] = []
    else:
        with Records.open(database, read_only=True) as records:
            summaries = records.summaries(_where(target, device))
    names = _target_names()
    if as_json:
        listed = [{**asdict(s), "target": names.get(s.target), "tvm": s.target} for s in summaries]
        console.print_json({"path": str(records_path(database)), "records": listed})
        return
    rows = [
        (
            s.kernel or s.workload[:12],
            names.get(s.target, "(no profile)"),
            s.device.title,
            str(s.trials),
            str(s.failed),
            "" if s.best_s is None else console.time_text(s.best_s * 1e3),
            _age_text(time.time() - s.newest),
        )
        for s in summaries[:limit]
    ]
    header = ("KERNEL", "TARGET", "DEVICE", "TRIALS", "FAILED", "BEST", "AGE")
    if rows:
        print(console.table(header, rows, right="lllrrrr"))
    if len(summaries) > limit:
        console.note(f"and {len(summaries) - limit} older ones: --limit {len(summaries)}")
    if not rows:
        console.note(f"no records in {records_path(database)}; edgesdk tune makes some")


@records_app.command("export")
def records_export(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write there, not to stdout."),
    ] = None,
    target: Target = None,
    device: DeviceText = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write records as JSON lines, with all that is needed to replay them."""
    from edgesdk.tuning.exchange import export_records
    from edgesdk.tuning.files import replacing
    from edgesdk.tuning.records import Records

    if as_json and output is None:
        raise UsageError(
            "--json needs --output: without it, the records are on stdout",
            hint="edgesdk records export -o records.jsonl --json",
        )
    where = _where(target, device)
    with Records.open(database, read_only=True) as records:
        if output is None:
            number = export_records(records, sys.stdout, where)
        else:
            with replacing(output) as stream:
                number = export_records(records, stream, where)
    if as_json:
        console.print_json({"file": str(output), "records": number})
    else:
        console.note(f"{number} records" + (f" in {output}" if output is not None else ""))


@records_app.command("import")
def records_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines; - is stdin.")],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Add exported records; those that are there already are not doubled."""
    from edgesdk.tuning.exchange import import_records
    from edgesdk.tuning.records import Records

    with _opened(file) as stream, Records.open(database) as records:
        done = import_records(records, stream)
    _say(done, as_json)
    if done.skipped and not done.added and not done.duplicates:
        raise UsageError(
            f"{file} has no records", hint="it must come from edgesdk records export -o FILE"
        )


@records_app.command("merge")
def records_merge(
    other: Annotated[Path, typer.Argument(metavar="OTHER.db", help="Another records.db.")],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of another database; those that are there already are not doubled."""
    from edgesdk.tuning.exchange import merge_records
    from edgesdk.tuning.records import Records, records_path

    into = records_path(database)
    if not other.is_file():
        raise UsageError(f"there is no file {other}", hint="give the path of a records.db")
    if into.exists() and into.samefile(other):
        raise UsageError(f"{other} is the database to merge into", hint="give another database")
    with Records.open(other, read_only=True) as source, Records.open(database) as records:
        done = merge_records(records, source)
    _say(done, as_json)


@records_app.command("prune")
def records_prune(
    older_than_days: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0, help="Records that are older."),
    ] = None,
    target: Target = None,
    device: DeviceText = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only trials that failed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many, and delete nothing.")
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Delete the records that fit all options given."""
    from dataclasses import replace

    from edgesdk.tuning.records import Records, Where

    where = _where(target, device)
    if older_than_days is not None:
        where = replace(where, before=time.time() - older_than_days * _DAY_S)
    if failed:
        where = replace(where, failed=True)
    if where == Where():
        raise UsageError(
            "prune needs to know which records",
            hint="edgesdk records prune --older-than 90 --dry-run",
        )
    with Records.open(database, create=False, read_only=dry_run) as records:
        number = records.count(where) if dry_run else records.prune(where)
        left = records.count() - (number if dry_run else 0)
    if as_json:
        console.print_json({"deleted": number, "left": left, "dry_run": dry_run})
    else:
        print(f"{number} records {'would go' if dry_run else 'deleted'}, {left} stay")


def _where(target: str | None, device: str | None) -> Where:
    from edgesdk.profiles import load_target
    from edgesdk.tuning.records import Where, target_key

    return Where(
        target=None if target is None else target_key(load_target(target).tvm),
        device_text=device,
    )


def _target_names() -> dict[str, str]:
    """The names of all profiles, by what records call their targets."""
    from edgesdk.errors import ConfigError
    from edgesdk.profiles import load_target, target_names
    from edgesdk.tuning.records import target_key

    names = {}
    for name in target_names():
        try:
            names[target_key(load_target(name).tvm)] = name
        except ConfigError as error:
            # Other records can be listed all the same.
            console.warn(error.message)
    return names


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    if str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror or error}", hint="edgesdk records import --help"
        ) from error
    with stream:
        yield stream


def _say(done: Imported, as_json: bool) -> None:
    if as_json:
        console.print_json(asdict(done))
    else:
        print(f"{done.added} records added, {done.duplicates} were there already")
    for reason, number in sorted(done.skipped.items(), key=lambda item: -item[1]):
        first = done.examples[reason]
        lines = f"line {first}" if number == 1 else f"{number} lines, the first is line {first}"
        console.warn(f"skipped {lines}: {reason}")


def _age_text(seconds: float) -> str:
    for unit, name in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return "now"
