"""Bundles on a device: pushed whole or not at all, switched in one step, and taken back.

    <work folder>/bundles/<name>/<version>/   the files of one version (its manifest's hash)
    <work folder>/bundles/<name>/current      symbolic link to the version in use
    <work folder>/bundles/<name>/history      versions in the order in which they came into use

Versions stand side by side, so a program that runs keeps its files while the next version arrives.
The order is kept in a file, because boards without a clock do not have useful times on files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgesdk.bundle import Bundle, check_files, file_sha256, open_bundle
from edgesdk.bundle.manifest import MANIFEST_NAME, FileInfo, Manifest
from edgesdk.deploy.facts import DeviceFacts, check_device, read_facts
from edgesdk.deploy.transport.base import HASH_OF, Transport, absolute_path, size_text
from edgesdk.errors import BundleError, DeviceError
from edgesdk.proc import CommandResult

KEPT_VERSIONS = 3

_TIMEOUT_S = 60.0
_HASH_TIMEOUT_S = 600.0
_VERSION_DIGITS = 12
_NO_HASH_TOOL, _NOT_THERE = 66, 67
_IS_CURRENT = "/current"  # between file names, none of which is absolute

PushProgress = Callable[[str, int, int], None]
"""Called with the file's name, the bytes copied so far of all files, and the bytes to copy."""


@dataclass(frozen=True)
class RemoteVersion:
    """A version of a bundle on a device, in the absolute folder `folder` there."""

    name: str
    version: str
    folder: str
    current: bool


@dataclass(frozen=True)
class RemoteBundle:
    """A bundle that has been pushed. Paths are absolute, on the device.

    `folder` belongs to this version and stays when another is pushed; `current_folder` always leads
    to the version in use. `copied` and `kept` name the files that were sent, and that were there.
    `facts` is what the device said of itself before.
    """

    name: str
    version: str
    folder: str
    library: str
    launcher: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    copied_bytes: int
    facts: DeviceFacts

    @property
    def current_folder(self) -> str:
        return posixpath.join(posixpath.dirname(self.folder), "current")


def push_bundle(
    bundle_folder: Path,
    transport: Transport,
    *,
    everything: bool = False,
    progress: PushProgress | None = None,
) -> RemoteBundle:
    """Copies the bundle to the device and makes it the current version; older ones are kept.

    Only what a device needs is copied (library, launcher, manifest, golden data), or all files with
    `everything`, and of these only what is not there already. Raises BundleError when the bundle is
    damaged, DeviceMismatchError when it cannot run there (before anything is copied), DeviceError
    when the device cannot take it, DeviceUnreachableError when the connection is lost; the version
    in use stays what it was in all these cases.
    """
    bundle = open_bundle(bundle_folder)
    check_files(bundle)
    manifest = bundle.manifest
    files = _wanted_files(bundle, everything=everything)
    manifest_file = FileInfo(
        file_sha256(bundle.path / MANIFEST_NAME), (bundle.path / MANIFEST_NAME).stat().st_size
    )
    facts = read_facts(transport)
    check_device(manifest.contract, facts, name=transport.name)

    version = manifest_file.sha256[:_VERSION_DIGITS]
    home = _bundle_home(transport, manifest.name)
    folder = posixpath.join(home, version)
    # The manifest goes last: a folder that has one is complete.
    files[MANIFEST_NAME] = manifest_file
    kept, is_current = _reuse(transport, home, version, files)
    missing = {name: info for name, info in files.items() if name not in kept}
    total = sum(info.size_bytes for info in missing.values())
    if facts.disk_available_kib is not None and facts.disk_available_kib * 1024 < total:
        free = size_text(facts.disk_available_kib * 1024)
        raise DeviceError(
            f"{transport.name}: the disk is full: the bundle needs {size_text(total)}, "
            f"and {transport.work_dir} has {free} free",
            hint="delete something there, or set another work-dir in devices.toml",
        )
    done = 0
    for name, info in missing.items():
        transport.upload(
            bundle.path / name,
            posixpath.join(folder, name),
            executable=name == manifest.launcher,
            progress=_file_progress(progress, name, done, total),
        )
        done += info.size_bytes
    if missing or not is_current:
        keep = str(KEPT_VERSIONS)
        _checked(transport, _SWITCH, home, version, keep, failed="cannot switch versions")
    return RemoteBundle(
        name=manifest.name,
        version=version,
        folder=folder,
        library=posixpath.join(folder, manifest.library),
        launcher=posixpath.join(folder, manifest.launcher),
        copied=tuple(missing),
        kept=tuple(kept),
        copied_bytes=total,
        facts=facts,
    )


def rollback(name: str, transport: Transport) -> RemoteVersion:
    """Makes the version that was in use before the current one current again, and returns it.

    Raises DeviceError when there is no such bundle on the device, or nothing older.
    """
    versions = [v for v in list_remote(transport) if v.name == name]
    if not versions:
        others = dict.fromkeys(v.name for v in list_remote(transport))
        raise DeviceError(
            f"{transport.name} has no bundle {name!r}"
            + (f"; it has {', '.join(others)}" if others else ""),
            hint=f"edgesdk push BUNDLE --device {transport.name}",
        )
    position = next((i for i, v in enumerate(versions) if v.current), len(versions))
    if position == 0:
        raise DeviceError(
            f"{transport.name} has no version of {name!r} older than {versions[0].version}",
            hint=f"push the one that is wanted: edgesdk push BUNDLE --device {transport.name}",
        )
    before = versions[position - 1]
    home = _bundle_home(transport, name)
    _checked(transport, _GO_BACK, home, before.version, failed="cannot switch versions")
    return RemoteVersion(name, before.version, before.folder, current=True)


def list_remote(transport: Transport) -> tuple[RemoteVersion, ...]:
    """Returns the versions of all bundles on the device: by name, the oldest first."""
    home = absolute_path(transport.work_dir, "bundles")
    result = _checked(transport, _LIST, home, failed="cannot list bundles")
    found = []
    for line in result.stdout_text.splitlines():
        name, version, current = line.split()
        folder = posixpath.join(home, name, version)
        found.append(RemoteVersion(name, version, folder, current == "current"))
    return tuple(found)


def _bundle_home(transport: Transport, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise BundleError(
            f"{name!r} is no name of a bundle: it cannot be a folder's name on every device",
            hint="compile it again with a plain name",
        )
    return absolute_path(transport.work_dir, f"bundles/{name}")


def _wanted_files(bundle: Bundle, *, everything: bool) -> dict[str, FileInfo]:
    manifest: Manifest = bundle.manifest
    names = list(manifest.files)
    if not everything:
        names = [manifest.library, manifest.launcher]
        names += [*manifest.golden_inputs, *manifest.golden_outputs]
    for name in names:
        path = PurePosixPath(name)
        if name not in manifest.files or path.is_absolute() or ".." in path.parts or "\n" in name:
            raise BundleError(
                f"the manifest of {bundle.path} is wrong: {name!r} is not among its files",
                hint="compile it again",
            )
    return {name: manifest.files[name] for name in names}


def _reuse(
    transport: Transport, home: str, version: str, files: dict[str, FileInfo]
) -> tuple[tuple[str, ...], bool]:
    """Returns which of `files` the version has, and whether it is the current one.

    Links what the current version has before, and makes the folders of what has to come.
    """
    wanted = "".join(f"{info.sha256} {name}\n" for name, info in files.items())
    result = transport.run(
        ["sh", "-c", _REUSE, "edgesdk", home, version],
        timeout_s=_HASH_TIMEOUT_S,
        input_bytes=wanted.encode(),
    )
    if result.returncode == _NO_HASH_TOOL:
        # Nothing is known to be right: all is copied, and checked by reading it back.
        return (), False
    if not result.ok:
        raise DeviceError(
            f"{transport.name}: cannot write to {home}: {result.last_line()}",
            hint="check its owner and mount, or set another work-dir in devices.toml",
        )
    lines = result.stdout_text.splitlines()
    return tuple(name for name in lines if name in files), _IS_CURRENT in lines


def _file_progress(
    progress: PushProgress | None, name: str, before: int, total: int
) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(name, before + done, total)


def _checked(transport: Transport, script: str, *args: str, failed: str) -> CommandResult:
    result = transport.run(["sh", "-c", script, "edgesdk", *args], timeout_s=_TIMEOUT_S)
    if result.returncode == _NOT_THERE:
        raise DeviceError(
            f"{transport.name}: the version {args[1]} is incomplete there", hint="push it again"
        )
    if not result.ok:
        raise DeviceError(
            f"{transport.name}: {failed} in {args[0]}: {result.last_line()}",
            hint="its file system must have symbolic links; set another work-dir in devices.toml",
        )
    return result


# The scripts that run on the device. $1: the folder of the bundle, $2: the version.

# Standard input: "SHA-256 name" lines. Prints the names that the version has, with that content,
# and makes the folders of the others. A file that only the current version has is linked into it:
# files are never changed in place. What a broken connection left behind is removed.
_REUSE = f"""{HASH_OF}
[ -d "$1/$2" ] && find "$1/$2" -name '.*.part' -exec rm -f {{}} \\;
hash_of /dev/null || exit {_NO_HASH_TOOL}
while read -r wanted name; do
    new=$1/$2/$name old=$1/current/$name
    if [ -f "$new" ] && hash_of "$new" && [ "$sum" = "$wanted" ]; then
        printf '%s\\n' "$name"
        continue
    fi
    [ -d "${{new%/*}}" ] || mkdir -p "${{new%/*}}" || exit 1
    if [ -f "$old" ] && hash_of "$old" && [ "$sum" = "$wanted" ]; then
        rm -f "$new.link"
        ln "$old" "$new.link" 2>/dev/null || cp -p "$old" "$new.link" || exit 1
        mv -f "$new.link" "$new" && printf '%s\\n' "$name"
    fi
done
[ "$(readlink "$1/current")" = "$2" ] && echo {_IS_CURRENT}
exit 0
"""

# Moving the new link into the folder, instead of onto the old link, is one rename(2) with every
# mv; "mv new current" would follow the old link, and not every mv has -T.
_SET_CURRENT = f"""
cd "$1" || exit 1
[ -f "$2/{MANIFEST_NAME}" ] || exit {_NOT_THERE}
[ ! -d .switch ] || rm -rf .switch
mkdir .switch && ln -s "$2" .switch/current && mv -f .switch/current . || exit 1
rmdir .switch
"""

# $3: how many versions to keep.
_SWITCH = f"""{_SET_CURRENT}
{{ grep -vxF "$2" history 2>/dev/null; echo "$2"; }} | tail -n "$3" >history.new || exit 1
mv -f history.new history || exit 1
kept=" $(tr '\\n' ' ' <history)"
for folder in *; do
    [ -d "$folder" ] && [ ! -L "$folder" ] || continue
    case $kept in *" $folder "*) ;; *) rm -rf "$folder" ;; esac
done
sync . history 2>/dev/null || sync
"""

# What came after the version is forgotten, so that the next push and rollback do not lead to it.
# Its files stay until the next push.
_GO_BACK = f"""{_SET_CURRENT}
sed "/^$2\\$/q" history >history.new && mv -f history.new history
sync . history 2>/dev/null || sync
"""

_LIST = f"""
cd "$1" 2>/dev/null || exit 0
for name in *; do
    [ -f "$name/history" ] || continue
    current=$(readlink "$name/current")
    while read -r version; do
        [ -f "$name/$version/{MANIFEST_NAME}" ] || continue
        if [ "$version" = "$current" ]; then mark=current; else mark=-; fi
        printf '%s %s %s\\n' "$name" "$version" "$mark"
    done <"$name/history"
done
exit 0
"""
