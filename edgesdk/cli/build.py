"""init, inspect and compile: from a model to a bundle."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgesdk import console
from edgesdk.cli.options import (
    AllowTf32,
    AsJson,
    AskedDevice,
    Batches,
    ModelArgument,
    Precision,
    SeveralShapes,
    Shapes,
    Target,
    chosen_precision,
    parse_batches,
    parse_inputs,
    parse_shapes,
    parse_variants,
    project_of,
)
from edgesdk.errors import UsageError
from edgesdk.numerics import FP16_TOLERANCE, QUANTISED_TOLERANCE
from edgesdk.precision import find_precision

if TYPE_CHECKING:
    from edgesdk.bundle import Bundle
    from edgesdk.bundle.manifest import Manifest, Variant
    from edgesdk.project import Project


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    app.command()(init)
    app.command()(inspect)
    app.command("compile")(compile_)


def init(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX, TFLite or .pt2 file.")],
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="T", help="A target; may be repeated. Default: local."),
    ] = None,
    shape: Shapes = None,
    as_json: AsJson = False,
) -> None:
    """Write edgesdk.toml, the project file, for a model.

    With it MODEL, --shape and --device may be left out in this folder and below.
    """
    from edgesdk.cli.inspection import inspect_model
    from edgesdk.devices import load_devices
    from edgesdk.profiles import load_targets
    from edgesdk.project import PROJECT_FILE_NAME, toml_key, write_project

    if Path(PROJECT_FILE_NAME).exists():
        raise UsageError(
            f"{PROJECT_FILE_NAME} exists already", hint="edit it, or remove it and run init again"
        )
    shapes = parse_shapes(shape)
    chosen = list(dict.fromkeys(target or ["local"]))
    for name in chosen:
        load_targets(name)  # for its errors
    report = inspect_model(model, shapes)
    devices = load_devices().values()
    served = {name: next((d.name for d in devices if d.target == name), None) for name in chosen}
    notes: list[str] = []
    if report.needs or report.refused:
        # Nothing static is known of the inputs but what was given: the rest is for the user.
        notes = [
            f"{toml_key(t.name)} = [{', '.join(map(str, t.shape))}]"
            for t in report.inputs
            if t.name not in shapes
        ]
    else:
        shapes = {t.name: tuple(int(d) for d in t.shape) for t in report.inputs}
    project = write_project(Path.cwd(), model=model, shapes=shapes, targets=served, notes=notes)
    if as_json:
        console.print_json(
            {
                "project": project.path,
                "model": project.model_path,
                "shapes": project.shapes,
                "targets": {name: asdict(t) for name, t in project.targets.items()},
                "needs": report.needs,
                "refused": [asdict(r) for r in report.refused],
            }
        )
        return
    print(f"wrote {PROJECT_FILE_NAME}: {', '.join(project.targets)}")
    if report.needs:
        console.note(f"next: fill in [shapes] there, because {report.needs}")
    elif report.refused:
        console.warn("this model is refused as it is: see `edgesdk inspect`")
    else:
        console.note("next: edgesdk compile")


def inspect(
    model: ModelArgument = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="T", help="Say what memory it takes there, too; may be repeated."
        ),
    ] = None,
    shape: Shapes = None,
    as_json: AsJson = False,
) -> None:
    """Say what a model is, what is repaired in it and what is refused.

    In a project, MODEL may be left out, and without --target every target of it is meant. The
    name of a family, such as jetson, means all its boards.
    """
    from edgesdk.cli.inspection import inspect_model, report_text

    project = project_of(model)
    path = _model_path(model, project)
    shapes = {**(project.shapes if project else {}), **parse_shapes(shape)}
    targets = dict.fromkeys(target or (project.targets if project else ()))
    profiles = [project.profile(t) if project and t in project.targets else t for t in targets]
    report = inspect_model(path, shapes, profiles)
    if as_json:
        console.print_json(asdict(report))
    else:
        print(report_text(report))


def compile_(
    model: ModelArgument = None,
    target: Target = None,
    device: AskedDevice = None,
    shape: SeveralShapes = None,
    batch: Batches = None,
    precision: Precision = None,
    allow_tf32: AllowTf32 = False,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=FILE.npy", help="Check the results on these inputs, too."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="The bundle; default: bundles/<model>-<target>."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model for a target into a bundle.

    In a project, MODEL may be left out, and without --target every target of it is compiled. With
    several shapes, or batches, the bundle serves each of them with one set of weights.
    """
    from edgesdk import api
    from edgesdk.profiles import target_families

    precision = chosen_precision(precision, allow_tf32)
    several = parse_variants(shape)
    works = plan_works(model, target, several[0], precision, output, device=device)
    batches = parse_batches(batch)
    if device is not None and not any(work.profile in target_families() for work in works):
        raise UsageError(
            f"--device {device}: {', '.join(work.name for work in works)} needs no device to ask",
            hint=f"leave it out, or add --target with one of: {', '.join(target_families())}",
        )
    inputs = parse_inputs(given) if given else None
    results = []
    for work in works:
        started = time.monotonic()
        with console.stages(work.title) as progress:
            bundle = api.compile(
                work.model,
                target=work.profile,
                device=work.device,
                shapes=[{**work.shapes, **shapes} for shapes in several],
                batches=batches or (work.batches if len(several) == 1 else ()),
                output=work.output,
                precision=work.precision,
                inputs=inputs,
                progress=progress,
            )
        duration_s = time.monotonic() - started
        results.append(_result(bundle, duration_s))
        if not as_json:
            print(_bundle_text(bundle, duration_s), flush=True)
        _warn(bundle)
    if as_json:
        console.print_json({"bundles": results})


@dataclass(frozen=True)
class _Work:
    """One bundle to compile. `name` is the target as the user or the project calls it, `device` the
    one that is asked which board it is, where the target leaves that open."""

    name: str
    title: str
    model: Path
    profile: str
    shapes: dict[str, tuple[int, ...]]
    precision: str
    output: Path | None
    device: str | None
    batches: tuple[int, ...] = ()


def plan_works(
    model: Path | None,
    target: str | None,
    shapes: dict[str, tuple[int, ...]],
    precision: str | None,
    output: Path | None,
    *,
    device: str | None = None,
) -> list[_Work]:
    """What to compile: the arguments win, the project fills in what they leave out."""
    project = project_of(model)
    path = _model_path(model, project)
    if project is None:
        if target is None:
            raise UsageError(
                "no target is given", hint="add --target local, or one of `edgesdk targets`"
            )
        chosen = precision or "fp32"
        return [_Work(target, Path(target).stem, path, target, shapes, chosen, output, device)]
    # A target that the project does not name is fine as an argument: it has no options then.
    targets = [target] if target is not None else list(project.targets)
    if not targets:
        raise UsageError(
            f"no target is given, and {project.path} has none",
            hint="add --target local, or a table [targets.local] to the file",
        )
    if output is not None and len(targets) > 1:
        raise UsageError(
            f"-o names one bundle, and the project has {len(targets)} targets",
            hint=f"add --target {targets[0]}",
        )
    works = []
    for name in targets:
        options = project.targets.get(name)
        works.append(
            _Work(
                name=name,
                title=Path(name).stem,
                model=path,
                profile=project.profile(name) if options else name,
                shapes={**project.shapes, **shapes},
                precision=precision or (options.precision if options else "fp32"),
                output=output or project.bundle_path(name),
                device=device or (options.device if options else None),
                batches=project.batch,
            )
        )
    return works


def _model_path(model: Path | None, project: Project | None) -> Path:
    if model is not None:
        return model
    if project is not None:
        return project.model_path
    from edgesdk.project import PROJECT_FILE_NAME

    raise UsageError(
        "no model is given, and there is no project file here",
        hint=f"give a model's file, or make {PROJECT_FILE_NAME} with: edgesdk init MODEL",
    )


def _result(bundle: Bundle, duration_s: float) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "bundle": bundle.path.absolute(),
        "name": manifest.name,
        "target": manifest.target,
        "precision": manifest.precision,
        "library_bytes": bundle.library.stat().st_size,
        "weights_bytes": manifest.weights_bytes,
        "activations_bytes": manifest.arena_bytes,
        "inputs": [asdict(t) for t in manifest.inputs],
        "outputs": [asdict(t) for t in manifest.outputs],
        "other_variants": [asdict(v) for v in manifest.other_variants],
        "batch": asdict(manifest.batch) if manifest.batch is not None else None,
        "coverage": manifest.build.get("coverage"),
        "repairs": manifest.build.get("repairs"),
        "device_code": manifest.build.get("device_code"),
        "verification": asdict(manifest.verification),
        "duration_s": round(duration_s, 3),
    }


def _bundle_text(bundle: Bundle, duration_s: float) -> str:
    from edgesdk.deploy.transport.base import size_text

    manifest, build = bundle.manifest, bundle.manifest.build
    checked = manifest.verification
    verified = "not run"
    if checked.max_relative_error is not None:
        verified = (
            f"{checked.how}, largest error {checked.max_relative_error:.2g} relative"
            f" (allowed {checked.tolerance:g}), cosine {checked.min_cosine:.9g}, to"
            f" {checked.reference}, {len(checked.seeds) + checked.given_inputs} sets of inputs"
        )
    shares = build["coverage"]["shares"]
    served = ", ".join(
        f"{len(kernels)} {rung}"
        + (f" ({shares[rung]:.0%} of the estimated time)" if rung in shares else "")
        for rung, kernels in build["coverage"]["rungs"].items()
    )
    return console.facts(
        [
            ("bundle", _shown(bundle.path)),
            ("target", f"{manifest.target}: {manifest.description}"),
            *([("precision", manifest.precision)] if manifest.precision != "fp32" else []),
            *_port_rows(manifest),
            ("library", size_text(bundle.library.stat().st_size)),
            ("weights", size_text(manifest.weights_bytes)),
            ("activations", size_text(manifest.arena_bytes)),
            ("kernels", served or "none"),
            *(("gpu code", _image_text(image)) for image in build.get("device_code", ())),
            ("verified", verified),
            ("took", f"{duration_s:.1f} s"),
        ]
    )


def _port_rows(manifest: Manifest) -> list[tuple[str, str]]:
    rows = []
    for number, variant in enumerate(manifest.variants):
        if manifest.other_variants:
            rows.append((f"variant {number}", variant.text))
            checked = variant.verification
            if number > 0 and checked.max_relative_error is not None:
                rows.append(("", f"largest error {checked.max_relative_error:.2g} relative"))
            continue
        for kind, tensors in (("input", variant.inputs), ("output", variant.outputs)):
            rows += [(kind, f"{t.name} {_tensor(t.dtype, t.shape)}") for t in tensors]
    if manifest.batch is not None:
        sizes = ", ".join(map(str, manifest.batch.sizes))
        rows.append(("batch", f"any, in runs of {sizes}"))
    return rows


# What is said of a piece of code for the GPU, by its format.
_IMAGE_TEXTS = {
    "cubin": "sm_{architecture}, by {compiler}, for drivers of CUDA {driver} and later",
    "ptx": "PTX for GPUs after sm_{architecture}, by {compiler}, for drivers of CUDA {driver} and"
    " later",
    "opencl": "OpenCL {driver}, compiled by {compiler}",
    "metal": "Metal {driver}, compiled by {compiler}",
}


def _image_text(image: dict[str, Any]) -> str:
    """One piece of code for the GPU: who takes it, and what its kernels need."""
    text = _IMAGE_TEXTS[image["format"]].format(**image)
    kernels = image["kernels"]
    if not kernels:
        return text
    registers = max(kernel["registers"] for kernel in kernels)
    spilling = sum(kernel["spill_bytes"] > 0 for kernel in kernels)
    return f"{text}; {len(kernels)} functions, at most {registers} registers, {spilling} spill"


def _shown(path: Path) -> str:
    """`path` as the user would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _tensor(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'scalar'}"


def _warn(bundle: Bundle) -> None:
    manifest = bundle.manifest
    if manifest.verification.how == "not run":
        console.warn(
            f"{manifest.target}: the results were not compared with the reference's:"
            f" {manifest.verification.detail}; `edgesdk verify` does it on the device"
        )
    for variant in manifest.variants:
        _warn_of_results(manifest, variant)
    if manifest.build.get("device_code_remark"):
        console.warn(f"{manifest.target}: {manifest.build['device_code_remark']}")
    for reason, count in manifest.build.get("records_skipped", {}).items():
        console.warn(f"{manifest.target}: {count} tuning records are not used: {reason}")
    for problem in manifest.build["coverage"].get("problems", ()):
        console.warn(f"{manifest.target}: a kernel gets a slower schedule: {problem}")
    plain = manifest.build["coverage"]["rungs"].get("plain", ())
    if plain:
        console.warn(
            f"{manifest.target}: {len(plain)} kernels keep slow plain loops: {', '.join(plain)}"
        )


def _warn_of_results(manifest: Manifest, variant: Variant) -> None:
    checked = variant.verification
    where = f"{manifest.target}, {variant.text}" if manifest.other_variants else manifest.target
    if checked.how != "not run" and checked.detail:
        console.warn(f"{where}: {checked.detail}")
    # Beyond it, "verified" alone would promise too much; a quantised network's says another thing.
    usual = max(FP16_TOLERANCE, find_precision(manifest.precision).tolerance)
    if usual < checked.tolerance < QUANTISED_TOLERANCE:
        console.warn(
            f"{where}: the reference differs from itself when it computes in another"
            f" order, so results were compared within {checked.tolerance:.2g} only"
        )
