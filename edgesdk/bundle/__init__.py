"""A bundle: the folder that holds a compiled network and all that is needed to use it.

manifest.json      what it is, for which device, with hashes of all files
SHA256SUMS         the same hashes, for `sha256sum -c`
lib/libNAME.so     the network with its weights and runtime
bin/edgesdk-run    the launcher
include/           edgesdk_model.h and NAME.h; the same with .hpp for C++
python/, csharp/   for programs in these languages
lib/cmake/NAME/    so that find_package(NAME) works
golden/            inputs, and the outputs of the reference for them
README.md          for whoever receives it
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edgesdk.bundle.manifest import Manifest, read_manifest
from edgesdk.errors import BundleError


@dataclass(frozen=True)
class Bundle:
    """A bundle on this machine."""

    path: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.path / self.manifest.library

    @property
    def launcher(self) -> Path:
        return self.path / self.manifest.launcher

    @property
    def golden(self) -> Path:
        return self.path / "golden"


def open_bundle(path: Path | str) -> Bundle:
    """Opens the bundle in the folder `path`. Raises BundleError if it is none, or incomplete."""
    folder = Path(path)
    bundle = Bundle(folder, read_manifest(folder))
    for name in bundle.manifest.files:
        if not (folder / name).is_file():
            raise BundleError(
                f"the bundle {folder} lacks {name}", hint="copy it again as a whole, or recompile"
            )
    return bundle


def check_files(bundle: Bundle) -> None:
    """Reads every file and compares its hash. Raises BundleError naming the first that differs."""
    for name, info in bundle.manifest.files.items():
        if file_sha256(bundle.path / name) != info.sha256:
            raise BundleError(
                f"{name} in the bundle {bundle.path} is not what was written (SHA-256 differs)",
                hint="copy it again as a whole, or recompile",
            )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
