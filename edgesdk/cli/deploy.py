"""push, rollback, run, bench and verify: a bundle goes to a device and shows what it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgesdk import console
from edgesdk.cli.options import (
    AsJson,
    BundleArgument,
    BundleTarget,
    Chosen,
    Device,
    OriginalModel,
    Threads,
    VariantNumber,
    choose_bundle,
    parse_inputs,
)
from edgesdk.errors import DeviceMismatchError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.deploy.bench import BenchReport, Latencies
    from edgesdk.deploy.run import PlacedBundle
    from edgesdk.deploy.verify import LayerCheck


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    for command in (push, rollback, run, bench, verify):
        app.command()(command)


def push(
    bundle: BundleArgument = None,
    device: Device = None,
    target: BundleTarget = None,
    as_json: AsJson = False,
) -> None:
    """Copy a bundle to a device and make it the version in use there."""
    from edgesdk.deploy.push import push_bundle
    from edgesdk.deploy.transport import open_transport
    from edgesdk.deploy.transport.base import size_text
    from edgesdk.devices import get_device

    chosen = choose_bundle(bundle, target, device)
    entry = get_device(_required_device(chosen))
    with console.stages(f"push to {entry.name}") as progress:
        progress("connecting")
        with open_transport(entry) as transport:
            pushed = push_bundle(
                chosen.bundle.path,
                transport,
                progress=_percent(progress),
            )
    if as_json:
        console.print_json(
            {"device": entry.name, **asdict(pushed), "current_folder": pushed.current_folder}
        )
        return
    files = f"{len(pushed.copied)} files, {size_text(pushed.copied_bytes)}"
    kept = f" ({len(pushed.kept)} were there already)" if pushed.kept else ""
    print(
        console.facts(
            [
                ("bundle", f"{pushed.name}, version {pushed.version}"),
                ("device", entry.name),
                ("copied", files + kept if pushed.copied else "nothing: it is there already"),
                ("folder", pushed.folder),
                ("in use", pushed.current_folder),
            ]
        )
    )


def rollback(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", show_default=False, help="The bundle's name; else the project's."
        ),
    ] = None,
    device: Device = None,
    target: BundleTarget = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the version of a bundle that was in use before."""
    from edgesdk.deploy.push import rollback as roll_back
    from edgesdk.deploy.transport import open_transport
    from edgesdk.devices import get_device

    if name is None or device is None:
        chosen = choose_bundle(None, target, device)
        name, device = name or chosen.bundle.manifest.name, _required_device(chosen)
    with open_transport(get_device(device)) as transport:
        version = roll_back(name, transport)
    if as_json:
        console.print_json({"device": device, **asdict(version)})
    else:
        print(f"{device} uses {version.name} {version.version} again: {version.folder}")


def run(
    bundle: BundleArgument = None,
    device: Device = None,
    target: BundleTarget = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=FILE.npy",
            help="An input; once for each. Without any, the bundle's golden inputs are run.",
        ),
    ] = None,
    input_dir: Annotated[
        Path | None,
        typer.Option(
            "--input-dir",
            metavar="DIR",
            help="Run every .npy and .npz file of this folder instead; needs --output.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Write each output to DIR/<name>.npy; with --input-dir DIR/<input>.npz, or lines"
            " of JSON to a FILE.jsonl.",
        ),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run a bundle on a device, once or on a folder of inputs, and show its outputs."""
    from edgesdk.deploy.run import check_inputs, golden_inputs, run_placed

    chosen = choose_bundle(bundle, target, device)
    if input_dir is not None:
        if inputs:
            raise UsageError("--input and --input-dir exclude each other", hint="leave one out")
        _run_folder(chosen, input_dir, output, threads=threads, as_json=as_json)
        return
    manifest = chosen.bundle.manifest
    arrays = parse_inputs(inputs, manifest) if inputs else golden_inputs(chosen.bundle)
    check_inputs(manifest, arrays)
    if output is not None:
        _make_folder(output)
    with _placed(chosen) as placed:
        result = run_placed(placed, arrays, threads=threads)
        used = placed.transport.name
    files = _save(result.outputs, output) if output is not None else {}
    latency_ms = float(result.report["latency_ms"][0])
    if as_json:
        console.print_json(
            {
                "bundle": manifest.name,
                "device": used,
                "threads": result.report["threads"],
                "latency_ms": latency_ms,
                "outputs": [
                    _output_json(name, array, files.get(name))
                    for name, array in result.outputs.items()
                ],
            }
        )
        return
    rows = [_output_row(name, array) for name, array in result.outputs.items()]
    print(console.table(("OUTPUT", "TYPE", "MIN", "MAX", "FIRST VALUES"), rows))
    for file in files.values():
        print(f"wrote {file}")
    if not inputs and manifest.inputs:
        console.note("no --input was given: these are the bundle's golden inputs")
    console.note(
        f"took {console.time_text(latency_ms)} on {used}; `edgesdk bench` measures properly"
    )


def _run_folder(
    chosen: Chosen, folder: Path, output: Path | None, *, threads: int | None, as_json: bool
) -> None:
    from statistics import median

    from edgesdk.deploy.batch import failure_error, input_files, prepare_output, run_batch

    files = input_files(folder)
    if output is None:
        raise UsageError(
            "--input-dir needs a place for the results",
            hint="add --output DIR, or --output FILE.jsonl",
        )
    prepare_output(output)
    with _placed(chosen) as placed, console.counting("run", len(files)) as progress:
        report = run_batch(
            placed,
            files,
            output,
            threads=threads,
            progress=progress,
            failed=lambda failure: console.warn(f"{failure.file}: {failure.message}"),
        )
    error = failure_error(report, len(files))
    if as_json and error is None:
        console.print_json(asdict(report))
    elif not as_json:
        print(f"{report.done} of {len(files)} inputs done on {report.device}: {output}")
        if report.latencies_ms:
            console.note(f"median {console.time_text(median(report.latencies_ms))} each")
    if error is not None:
        raise error


def bench(
    bundle: BundleArgument = None,
    device: Device = None,
    target: BundleTarget = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="RUNTIME",
            help="Take turns with onnxruntime; on this machine, needs the model.",
        ),
    ] = None,
    model: OriginalModel = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Time every layer, too.")] = False,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat", metavar="N", min=1, help="Timed runs; default: what fits in 3 seconds."
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", min=0, help="Runs before them.")
    ] = 5,
    variant: VariantNumber = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure a bundle's latency on a device."""
    from edgesdk.deploy.bench import bench_placed

    chosen = choose_bundle(bundle, target, device)
    with console.stages("bench") as progress, _placed(chosen) as placed:
        report = bench_placed(
            placed,
            repeat=repeat,
            warmup=warmup,
            threads=threads,
            per_layer=per_layer,
            against=against or (),
            model=model or chosen.model,
            variant=variant or 0,
            progress=progress,
        )
    if as_json:
        console.print_json(asdict(report))
    else:
        print(_bench_text(report))
    for text in report.warnings:
        console.warn(text)


def verify(
    bundle: BundleArgument = None,
    device: Device = None,
    target: BundleTarget = None,
    model: OriginalModel = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", metavar="N", min=0, help="With the model: this many drawn inputs, too."
        ),
    ] = 3,
    layers: Annotated[
        bool, typer.Option("--layers", help="With the model: compare each layer's result, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check on a device that a bundle gives the right results.

    Compared are the golden outputs in the bundle and, where the model is given or the project has
    it, the reference's results for drawn inputs. Exit code 8 means that something differs.
    """
    from edgesdk.deploy.verify import layers_error, verify_layers, verify_placed

    chosen = choose_bundle(bundle, target, device)
    original = model or (chosen.model if chosen.model and chosen.model.exists() else None)
    if layers and original is None:
        raise UsageError(
            "--layers needs the model that the bundle was compiled from",
            hint="add --model MODEL",
        )
    with console.stages("verify") as progress, _placed(chosen) as placed:
        if layers and original is not None:
            compared = verify_layers(placed, original, progress=progress)
            if not as_json:
                print(_layers_text(compared), flush=True)
            error = layers_error(placed.transport.name, compared)
            if error is not None:
                raise error
        report = verify_placed(placed, model=original, seeds=seeds, progress=progress)
    if layers:
        report = replace(report, layers=compared)
    if as_json:
        console.print_json(asdict(report))
        return
    rows = [
        (
            "ok",
            c.name,
            f"{c.max_abs_error:.2g}",
            f"{c.max_relative_error:.2g}",
            "" if c.cosine is None else f"{c.cosine:.9g}",
        )
        for c in report.checks
    ]
    header = ("", "COMPARED", "ABS ERROR", "RELATIVE", "COSINE")
    print(console.table(header, rows, right="llrrr"))
    print(
        f"{report.bundle} for {report.target} is right on {report.device}: within"
        f" {report.tolerance:g} of {report.reference}"
    )
    if original is None:
        console.note("only the golden inputs were compared; --model MODEL compares more")


def _layers_text(layers: Sequence[LayerCheck]) -> str:
    rows = [
        (
            "ok" if c.ok else "no",
            c.layer,
            c.operator,
            f"{c.max_abs_error:.2g}",
            f"{c.max_relative_error:.2g}",
            f"{c.cosine:.9g}",
            c.mismatch,
        )
        for c in layers
    ]
    header = ("", "LAYER", "OPERATOR", "ABS ERROR", "RELATIVE", "COSINE", "")
    return console.table(header, rows, right="lllrrr")


@contextmanager
def _placed(chosen: Chosen) -> Iterator[PlacedBundle]:
    from edgesdk.deploy.run import placed_bundle

    try:
        with placed_bundle(
            chosen.bundle, "local" if chosen.device is None else chosen.device
        ) as placed:
            yield placed
    except DeviceMismatchError as error:
        if chosen.device is not None:
            raise
        raise DeviceMismatchError(
            error.message, hint="name the device that it is for with --device D"
        ) from error


def _required_device(chosen: Chosen) -> str:
    if chosen.device is not None:
        return chosen.device
    raise UsageError("no device is given", hint="add --device D; `edgesdk devices` lists them")


def _percent(progress: console.Progress) -> Any:
    """A push's progress in whole steps, so that a log does not fill with them."""
    last = -1

    def report(name: str, done: int, total: int) -> None:
        nonlocal last
        step = 10 * (10 * done // max(total, 1))
        if step != last:
            last = step
            progress(f"{step} % ({name})")

    return report


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", hint="give another --output DIR"
        ) from error


# A file's name has 255 bytes at most.
_MAX_STEM = 200


def _save(outputs: dict[str, np.ndarray], folder: Path) -> dict[str, Path]:
    """Writes each output; the model's names become names that a file can have."""
    import numpy as np

    from edgesdk.frontend.importer import identifier

    files: dict[str, Path] = {}
    for index, (name, array) in enumerate(outputs.items()):
        stem = identifier(name)[:_MAX_STEM]
        path = folder / f"{stem}.npy"
        if path in files.values():
            path = folder / f"{stem}_{index}.npy"
        try:
            np.save(path, array)
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", hint="give another --output DIR"
            ) from error
        files[name] = path
    return files


def _output_json(name: str, array: np.ndarray, file: Path | None) -> dict[str, Any]:
    described = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    if file is not None:
        return {**described, "file": file.absolute()}
    return {**described, "values": array.tolist()}


def _output_row(name: str, array: np.ndarray) -> tuple[str, ...]:
    shape = "x".join(map(str, array.shape)) or "scalar"
    kind = f"{array.dtype.name} {shape}"
    if array.size == 0:
        return (name, kind, "", "", "")
    first = " ".join(f"{value:.4g}" for value in array.ravel()[:5].tolist())
    more = " ..." if array.size > 5 else ""
    low, high = array.min().item(), array.max().item()
    return (name, kind, f"{low:.4g}", f"{high:.4g}", first + more)


def _bench_text(report: BenchReport) -> str:
    from edgesdk.deploy.transport.base import size_text

    temperatures = ""
    if report.temperature_before_c is not None and report.temperature_after_c is not None:
        temperatures = f"{report.temperature_before_c:.0f} to {report.temperature_after_c:.0f} °C"
    parts = [
        console.facts(
            [
                ("bundle", f"{report.bundle} for {report.target}"),
                ("shapes", report.shapes),
                ("device", report.device + (f", {report.cpu}" if report.cpu else "")),
                ("threads", str(report.threads)),
                ("latency", _latency_text(report.latency)),
                ("opening", console.time_text(report.open_ms)),
                ("memory", f"{size_text(report.peak_rss_bytes)} at most"),
                ("governor", report.governor or ""),
                ("temperature", temperatures),
            ]
        )
    ]
    for other in report.against:
        low, high = min(other.turn_speedups), max(other.turn_speedups)
        parts.append(
            console.facts(
                [
                    ("against", f"{other.opponent} {other.version}, {report.threads} threads"),
                    ("latency", _latency_text(other.latency)),
                    (
                        "speedup",
                        f"{other.speedup:.2f} ({low:.2f} to {high:.2f} in"
                        f" {len(other.turn_speedups)} turns; above 1 the bundle is faster)",
                    ),
                ]
            )
        )
    if report.layers:
        total = sum(layer.mean_ms for layer in report.layers) or 1.0
        slowest = sorted(report.layers, key=lambda layer: -layer.mean_ms)
        rows = [(f"{c.mean_ms:.4f}", f"{100 * c.mean_ms / total:.1f} %", c.name) for c in slowest]
        parts.append(console.table(("MS", "SHARE", "LAYER"), rows, right="rrl"))
    return "\n\n".join(parts)


def _latency_text(latency: Latencies) -> str:
    text = console.time_text
    return (
        f"median {text(latency.median_ms)}, p90 {text(latency.p90_ms)},"
        f" min {text(latency.min_ms)}, spread {100 * latency.spread:.0f} %"
        f" ({latency.runs} runs)"
    )
