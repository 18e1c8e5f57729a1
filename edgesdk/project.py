"""edgesdk.toml: the project file that lets MODEL, --shape and --device be left out.

It is found from the current folder upwards, checked like a profile, and its relative paths are
relative to itself. What is given on the command line wins over it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgesdk.errors import ConfigError, UsageError
from edgesdk.settings import check_table, load_toml, suggestion

PROJECT_FILE_NAME = "edgesdk.toml"


@dataclass(frozen=True)
class TargetOptions:
    """A table [targets.NAME]: the device that serves the target, and how to compile for it.

    `output` is the bundle's folder; None is `<model>-<target>` in the project's output folder.
    """

    device: str | None = None
    precision: str = "fp32"
    output: str | None = None


@dataclass(frozen=True)
class Project:
    """An edgesdk.toml as it was written, and the paths in it made absolute by its methods.

    `shapes` maps an input's name to its sizes, and `batch` has the batches to compile, if there
    are to be several. `targets` keeps the order of the file.
    """

    path: Path
    model: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batch: tuple[int, ...] = ()
    output: str = "bundles"
    targets: dict[str, TargetOptions] = field(default_factory=dict)

    @property
    def model_path(self) -> Path:
        """The model's file."""
        return self._absolute(self.model)

    def profile(self, target: str) -> str:
        """Returns what `profiles.load_target` takes for `target`: its name, or its file's path."""
        return str(self._absolute(target)) if _is_file_name(target) else target

    def bundle_path(self, target: str) -> Path:
        """Returns the folder of the bundle for `target`, which need not be one of `targets`."""
        chosen = self.targets.get(target, TargetOptions()).output
        if chosen is not None:
            return self._absolute(chosen)
        from edgesdk.frontend.importer import model_name

        name = Path(target).stem if _is_file_name(target) else target
        return self._absolute(self.output) / f"{model_name(self.model_path)}-{name}"

    def options(self, target: str) -> TargetOptions:
        """Returns the table of `target`. Raises UsageError when the file has none."""
        if target not in self.targets:
            raise UsageError(
                f"{self.path} has no target {target!r}",
                hint=suggestion(
                    target,
                    self.targets,
                    otherwise=f"add a table [targets.{toml_key(target)}] to it",
                ),
            )
        return self.targets[target]

    def _absolute(self, path: str) -> Path:
        # normpath, not resolve: error messages show the path as the user knows it.
        return Path(os.path.normpath(self.path.parent / Path(path).expanduser()))


def find_project(start: Path | None = None) -> Project | None:
    """Returns the project of the folder `start` (the current one by default) or of its parents.

    Raises ConfigError when the nearest edgesdk.toml is wrong.
    """
    folder = (start or Path.cwd()).absolute()
    for candidate in (folder, *folder.parents):
        path = candidate / PROJECT_FILE_NAME
        if path.is_file():
            return load_project(path)
    return None


def load_project(path: Path) -> Project:
    """Reads a project file. Raises ConfigError for whatever is wrong in it."""
    path = path.absolute()
    project = check_table(load_toml(path), Project, where=str(path), given={"path": path})
    _check_targets(project)
    for name, shape in project.shapes.items():
        if any(size < 1 for size in shape):
            raise ConfigError(
                f"{path}: 'shapes.{name}' is {list(shape)}", hint="dimensions are at least 1"
            )
    return project


def _check_targets(project: Project) -> None:
    from edgesdk.precision import PRECISIONS
    from edgesdk.profiles import target_families, target_names

    known = [*target_names(), *target_families()]
    for name, options in project.targets.items():
        if not _is_file_name(name) and name not in known:
            raise ConfigError(
                f"{project.path}: unknown target 'targets.{name}'",
                hint=suggestion(name, known, otherwise="see `edgesdk targets` for the known ones"),
            )
        if options.precision not in PRECISIONS:
            raise ConfigError(
                f"{project.path}: 'targets.{name}.precision' is {options.precision!r}",
                hint=f"use one of: {', '.join(PRECISIONS)}",
            )


def write_project(
    folder: Path,
    *,
    model: Path,
    shapes: Mapping[str, Sequence[int]],
    targets: Mapping[str, str | None],
    notes: Sequence[str] = (),
) -> Project:
    """Writes a commented edgesdk.toml into `folder` and returns it.

    `targets` maps each target to the name of its device or None; `notes` become comments above
    [shapes]. Raises UsageError when there is one already, ConfigError when it cannot be written.
    """
    path = folder.absolute() / PROJECT_FILE_NAME
    text = _text(_relative(model, path.parent), shapes, targets, notes)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already", hint="edit it, or remove it and run init again"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return load_project(path)


def _text(
    model: str,
    shapes: Mapping[str, Sequence[int]],
    targets: Mapping[str, str | None],
    notes: Sequence[str],
) -> str:
    lines = [
        "# What edgesdk builds here. Paths are relative to this file; arguments of a command win.",
        "",
        f"model = {_string(model)}",
        "",
        "# Bundles go here, each into <model>-<target>.",
        'output = "bundles"',
        "",
        "# The sizes of the model's inputs. Needed where the model leaves them open.",
        *(f"# {note}" for note in notes),
        "[shapes]",
        *(f"{toml_key(name)} = {list(shape)}" for name, shape in shapes.items()),
        "",
        "# One table per target (`edgesdk targets` lists them). Its keys, all optional:",
        '#   device = "pi"            the device that push, run, bench and verify use,',
        "#                            see `edgesdk devices`",
        '#   precision = "fp32"',
        '#   output = "out/for-pi"    another folder for its bundle',
    ]
    for target, device in targets.items():
        lines.append(f"[targets.{toml_key(target)}]")
        if device is not None:
            lines.append(f"device = {_string(device)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _relative(path: Path, folder: Path) -> str:
    """`path` seen from `folder`, where that does not climb out of it; else absolute."""
    absolute = Path(os.path.normpath(path.absolute()))
    if absolute.is_relative_to(folder):
        return absolute.relative_to(folder).as_posix()
    return absolute.as_posix()


def _is_file_name(target: str) -> bool:
    return target.endswith(".toml") or "/" in target


def toml_key(name: str) -> str:
    """Returns `name` as a key of a TOML table, in quotes where it needs them."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _string(name)


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, except that TOML wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
