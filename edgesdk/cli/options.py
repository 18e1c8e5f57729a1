"""What several commands share: options, and what to work on when an argument is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgesdk.errors import BundleError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.bundle import Bundle
    from edgesdk.bundle.manifest import Manifest
    from edgesdk.project import Project

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="T", help="A target; `edgesdk targets` lists them."),
]
BundleTarget = Annotated[
    str | None,
    typer.Option("--target", metavar="T", help="The project's bundle for this target."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="D", help="A device; `edgesdk devices` lists them."),
]
AskedDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="D", help="The board that `--target jetson` asks."),
]
BundleArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="BUNDLE", show_default=False, help="A bundle; else that of the project."
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="An ONNX, TFLite or .pt2 file; else the project's.",
    ),
]
OriginalModel = Annotated[
    Path | None,
    typer.Option("--model", metavar="MODEL", help="The file that the bundle was compiled from."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME=1x3x224x224", help="Sizes of an input; once for each input."
    ),
]
SeveralShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=1x3x224x224",
        help="Sizes of an input; once for each input, or several times for several shapes.",
    ),
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="1,4,8", help="Batches to compile; runs may then have any number."
    ),
]
VariantNumber = Annotated[
    int | None,
    typer.Option(
        "--variant", metavar="N", min=0, help="Of several shapes, only this one; the first is 0."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="At most N threads; default: all CPUs."),
]


@dataclass(frozen=True)
class Chosen:
    """The bundle to work on, the device, and the model's file where the project knows it.

    `device` is None when neither an argument nor the project names one.
    """

    bundle: Bundle
    device: str | None
    model: Path | None


Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="P", help="Of the kernels: fp32, tf32 or fp16."),
]
AllowTf32 = Annotated[
    bool,
    typer.Option(
        "--allow-tf32", help="The same as --precision tf32: NVIDIA's tensor cores multiply."
    ),
]


def goes_on(context: typer.Context, as_json: bool) -> bool:
    """Whether a command of the group follows, which then is what was meant.

    Raises UsageError when --json stands before it.
    """
    if context.invoked_subcommand is None:
        return False
    if as_json:
        raise UsageError(
            "--json stands before the command",
            hint=f"{context.command_path} {context.invoked_subcommand} ... --json",
        )
    return True


def choose_bundle(bundle: Path | None, target: str | None, device: str | None) -> Chosen:
    """Finds what a command means, from its arguments and then from the project file.

    Raises UsageError when that is not clear, BundleError when there is no such bundle.
    """
    from edgesdk.project import PROJECT_FILE_NAME, find_project

    project = find_project()
    if bundle is not None and target is not None:
        raise UsageError("both a bundle and --target are given", hint="leave one of them out")
    if bundle is not None:
        opened = _open(bundle, hint="give the folder that `edgesdk compile` wrote")
        served = _project_target(project, bundle)
        if project is not None and device is None:
            name = served or opened.manifest.target
            device = project.targets[name].device if name in project.targets else None
        model = project.model_path if project is not None and served is not None else None
        return Chosen(opened, device, model)
    if project is None:
        raise UsageError(
            "no bundle is given, and there is no project file here",
            hint=f"give a bundle, or make {PROJECT_FILE_NAME} with: edgesdk init MODEL",
        )
    name = target or only_target(project)
    options = project.options(name)
    opened = _open(project.bundle_path(name), hint=f"edgesdk compile --target {name}")
    return Chosen(opened, options.device if device is None else device, project.model_path)


def only_target(project: Project) -> str:
    """Returns the project's target if it has one only. Raises UsageError otherwise."""
    if len(project.targets) == 1:
        return next(iter(project.targets))
    if not project.targets:
        raise UsageError(f"{project.path} has no target", hint="add a table [targets.local] to it")
    raise UsageError(
        f"which target? {project.path} has {', '.join(project.targets)}",
        hint=f"add --target {next(iter(project.targets))}",
    )


def project_of(model: Path | None) -> Project | None:
    """Returns the project whose model is meant: when MODEL is left out, or is the project's."""
    from edgesdk.project import find_project

    project = find_project()
    if model is None or project is None:
        return project
    same = model.exists() and project.model_path.exists() and model.samefile(project.model_path)
    return project if same else None


def parse_shapes(texts: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """Reads NAME=1x3x224x224; "," may stand for "x". Raises UsageError for anything else."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in map(_parse_shape, texts or ()):
        if name in shapes:
            raise UsageError(
                f"--shape {name} is given twice",
                hint="leave one of them out; only compile takes several",
            )
        shapes[name] = shape
    return shapes


def parse_variants(texts: Sequence[str] | None) -> list[dict[str, tuple[int, ...]]]:
    """Reads shapes of which some are given several times: the first of each input belong together,
    then the second, and so on; those given once are the same in all. At least one table.

    Raises UsageError for what is no shape, and where the numbers of them contradict each other.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in map(_parse_shape, texts or ()):
        shapes.setdefault(name, []).append(shape)
    counts = {name: len(found) for name, found in shapes.items() if len(found) > 1}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count} times" for name, count in counts.items())
        raise UsageError(
            f"--shape is given for {told}: which belong together?",
            hint="give as many for each of these inputs, in the same order",
        )
    number = max(counts.values(), default=1)
    return [
        {name: found[i] if len(found) > 1 else found[0] for name, found in shapes.items()}
        for i in range(number)
    ]


def parse_batches(text: str | None) -> tuple[int, ...]:
    """Reads 1,4,8. Raises UsageError for anything else."""
    if text is None:
        return ()
    parts = text.split(",")
    if not all(p.isascii() and p.isdigit() for p in parts):
        raise UsageError(
            f"--batch {text!r} is no list of numbers", hint="for example --batch 1,4,8"
        )
    return tuple(int(p) for p in parts)


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.rpartition("=")  # names may hold '=' themselves
    parts = sizes.replace(",", "x").split("x")
    if not equals or not name or not all(p.isascii() and p.isdigit() for p in parts):
        raise UsageError(
            f"--shape {text!r} is not NAME=SIZES", hint="for example --shape x=1x3x224x224"
        )
    return name, tuple(int(p) for p in parts)


def parse_inputs(texts: Sequence[str], manifest: Manifest | None = None) -> dict[str, np.ndarray]:
    """Reads NAME=FILE.npy for the inputs of a bundle, or of a model not known yet, and the files.

    Raises UsageError when a name is unknown or given twice, or a file is no .npy file.
    """
    from edgesdk.deploy.run import load_array

    arrays: dict[str, np.ndarray] = {}
    for text in texts:
        if manifest is not None:
            name, file = _split_input(text, [t.name for t in manifest.inputs])
        else:
            name, equals, file = text.rpartition("=")  # names may hold '=' themselves
            if not equals or not name:
                raise UsageError(f"--input {text!r} is not NAME=FILE.npy")
        if name in arrays:
            raise UsageError(f"--input {name} is given twice", hint="leave one of them out")
        arrays[name] = load_array(file)
    return arrays


def _split_input(text: str, names: Sequence[str]) -> tuple[str, str]:
    from edgesdk.settings import suggestion

    # Names may hold '=' themselves: the longest that fits wins.
    fitting = [name for name in names if text.startswith(f"{name}=")]
    if fitting:
        name = max(fitting, key=len)
        return name, text[len(name) + 1 :]
    given, equals, _ = text.partition("=")
    known = ", ".join(names) or "none"
    if not equals:
        raise UsageError(
            f"--input {text!r} is not NAME=FILE.npy", hint=f"the bundle's inputs: {known}"
        )
    raise UsageError(
        f"the bundle has no input {given!r}",
        hint=suggestion(given, names, otherwise=f"its inputs: {known}"),
    )


def _project_target(project: Project | None, bundle: Path) -> str | None:
    """The target whose bundle the project would write to `bundle`, if there is one."""
    for target in project.targets if project is not None else ():
        assert project is not None
        expected = project.bundle_path(target)
        if expected.exists() and bundle.exists() and expected.samefile(bundle):
            return target
    return None


def _open(folder: Path, *, hint: str) -> Bundle:
    from edgesdk.bundle import open_bundle

    if not folder.exists():
        raise BundleError(f"there is no bundle {folder}", hint=hint)
    if not folder.is_dir():
        if folder.suffix in (".onnx", ".tflite", ".pt2"):
            hint = f"compile it first: edgesdk compile {folder} --target T"
        raise BundleError(f"{folder} is a file, not a bundle", hint=hint)
    return open_bundle(folder)


def chosen_precision(precision: str | None, allow_tf32: bool) -> str | None:
    """What --precision and --allow-tf32 say together; None if nothing. Raises UsageError if they
    contradict each other."""
    if not allow_tf32:
        return precision
    if precision not in (None, "tf32"):
        raise UsageError(
            f"--allow-tf32 contradicts --precision {precision}", hint="give one of them"
        )
    return "tf32"
