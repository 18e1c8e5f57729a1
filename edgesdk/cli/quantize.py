"""quantize: from a model in floats to one of 8-bit integers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgesdk import console
from edgesdk.cli.options import AsJson
from edgesdk.errors import UsageError


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""
    app.command()(quantize)


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's file, in floats.")],
    calibration: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Samples of the inputs: .npz files, or .npy for a single input."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.onnx", help="Default: MODEL-int8.onnx."),
    ] = None,
    activations: Annotated[
        Literal["uint8", "int8"], typer.Option(help="What activations become; weights: int8.")
    ] = "uint8",
    method: Annotated[
        Literal["minmax", "entropy", "percentile"],
        typer.Option(help="How ranges are learned from the samples."),
    ] = "minmax",
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="One scale for all channels of a weight.")
    ] = False,
    reduce_range: Annotated[
        bool,
        typer.Option(
            "--reduce-range", help="Weights of 7 bits: faster on x86 without VNNI, less exact."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model of 8-bit integers, and say how far it is from the one in floats."""
    from edgesdk.deploy.transport.base import size_text
    from edgesdk.quantisation import quantize_model

    destination = output or Path(f"{model.stem}-int8.onnx")
    if destination.exists() and model.exists() and destination.samefile(model):
        raise UsageError(f"the output {destination} is the model itself", hint="give another -o")
    if destination.is_dir():
        raise UsageError(f"the output {destination} is a folder", hint="add a file's name")
    with console.stages(f"quantize {model.name}") as progress:
        done = quantize_model(
            model,
            calibration=calibration,
            output=destination,
            activations=activations,
            method=method,
            per_channel=not per_tensor,
            reduce_range=reduce_range,
            progress=progress,
        )
    if as_json:
        console.print_json(asdict(done))
        return
    sizes = f"{size_text(done.original_bytes)} -> {size_text(done.size_bytes)}"
    print(f"wrote {done.path}: {sizes}, {done.operators} operators in integers")
    rows = []
    for error in done.outputs:
        top1 = "" if error.top1_agreement is None else f"{100 * error.top1_agreement:.1f} %"
        rows.append((error.name, f"{error.max_relative_error:.2g}", f"{error.cosine:.5f}", top1))
    header = ("OUTPUT", "MAX ERROR", "COSINE", "SAME TOP CLASS")
    print(console.table(header, rows, right="lrrr"))
    console.note(f"against the model in floats, on {done.compared} of {done.samples} samples")
    console.note(f"next: edgesdk compile {done.path} --target T")
