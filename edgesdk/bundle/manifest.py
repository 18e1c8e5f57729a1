"""manifest.json: what a bundle is, as frozen dataclasses, and their reading and writing.

The schema version rises when a reader of the old version would misread the new one. Unknown keys
are ignored on reading (a newer edgesdk of the same schema may add some); missing ones are errors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgesdk.errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: the model's own `name`, its static `shape`, and a NumPy `dtype` name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GpuContract:
    """The GPU that code is for: machine code for `architectures` (10 * major + minor of CUDA's
    compute capability), and PTX for those from `ptx` on.

    `cuda` and `ptx_cuda` are the CUDA versions of the oldest drivers that are promised to take the
    one and the other. OpenCL: the `extensions` that the source needs, the most work items of a
    `work_group`, and the bytes that such a group keeps in local memory, and of the largest buffer.
    """

    api: str
    architectures: tuple[int, ...]
    ptx: int | None = None
    cuda: str | None = None
    ptx_cuda: str | None = None
    extensions: tuple[str, ...] = ()
    work_group: int | None = None
    local_memory_bytes: int | None = None
    buffer_bytes: int | None = None


@dataclass(frozen=True)
class ContractInfo:
    """What a device must offer. `machine` is what `uname -m` may print, e.g. ("aarch64",)."""

    os: str
    machine: tuple[str, ...]
    libc: str | None
    libc_version: str | None
    cpu_features: tuple[str, ...]
    gpu: GpuContract | None = None


@dataclass(frozen=True)
class FileInfo:
    """A file of the bundle: its SHA-256 (hex) and size in bytes."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class VerificationInfo:
    """How the results were checked when the bundle was made.

    `how`: "native", "emulated" or "not run". `max_relative_error` is the largest absolute
    difference to the reference divided by the reference output's largest magnitude, and
    `min_cosine` the smallest cosine between an output and its reference, over all inputs that were
    tried: those drawn from `seeds`, and the user's own with `given_inputs`. `detail` says why it
    was not run, or what is remarkable about the reference.
    """

    how: str
    reference: str
    max_relative_error: float | None
    max_abs_error: float | None
    tolerance: float
    detail: str = ""
    min_cosine: float | None = None
    seeds: tuple[int, ...] = ()
    given_inputs: bool = False


@dataclass(frozen=True)
class Variant:
    """One of the fixed shapes that a bundle serves: see edgesdk_model_select_variant.

    The variants share their weights, and the memory of the largest serves all.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    golden_inputs: tuple[str, ...]
    golden_outputs: tuple[str, ...]
    verification: VerificationInfo

    @property
    def golden(self) -> str:
        """The folder of the golden files."""
        return (*self.golden_inputs, *self.golden_outputs)[0].rpartition("/")[0]

    @property
    def text(self) -> str:
        """Its input shapes as people type them: "x=1x3x224x224 ids=1x128"."""
        return " ".join(f"{t.name}={'x'.join(map(str, t.shape)) or 'scalar'}" for t in self.inputs)


@dataclass(frozen=True)
class BatchInfo:
    """Inputs of any number of rows are served: see `edgesdk.deploy.shapes`.

    `sizes` are the batches that were compiled, ascending, one for each variant. `inputs` names the
    inputs whose first axis is the batch; it is that of all outputs.
    """

    sizes: tuple[int, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """`inputs` to `verification` are those of the first variant; `arena_bytes` is the largest."""

    name: str
    target: str
    description: str
    library: str
    launcher: str
    contract: ContractInfo
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    golden_inputs: tuple[str, ...]
    golden_outputs: tuple[str, ...]
    verification: VerificationInfo
    model_sha256: str
    abi_version: int
    precision: str
    weights_bytes: int
    arena_bytes: int
    files: dict[str, FileInfo]
    tools: dict[str, str]
    build: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    other_variants: tuple[Variant, ...] = ()
    batch: BatchInfo | None = None

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All shapes that the library serves, in its order."""
        first = Variant(
            self.inputs,
            self.outputs,
            self.golden_inputs,
            self.golden_outputs,
            self.verification,
        )
        return (first, *self.other_variants)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Reads `folder`/manifest.json. Raises BundleError with what is wrong."""
    path = folder / MANIFEST_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}",
            hint="give the folder that `edgesdk compile` wrote",
        ) from None
    except NotADirectoryError:
        raise BundleError(f"{folder} is not a bundle: it is not a folder") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}", hint="compile it again") from error
    try:
        version = data["schema_version"]
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path} has schema version {version}; this edgesdk reads {SCHEMA_VERSION}",
                hint="update edgesdk, or compile the model again",
            )
        return _manifest_from(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} is incomplete: {error}", hint="compile it again") from error


def _manifest_from(data: dict[str, Any]) -> Manifest:
    added = {"other_variants": (), "batch": None}  # what older bundles of this schema lack
    plain = {f.name: {**added, **data}[f.name] for f in dataclasses.fields(Manifest)}
    contract = _known(data["contract"], ContractInfo)
    contract["machine"] = tuple(contract["machine"])
    contract["cpu_features"] = tuple(contract["cpu_features"])
    if contract.get("gpu") is not None:
        gpu = _known(contract["gpu"], GpuContract)
        lists = {key: tuple(gpu.get(key, ())) for key in ("architectures", "extensions")}
        contract["gpu"] = GpuContract(**gpu | lists)
    plain |= {
        **_ports(data),
        "contract": ContractInfo(**contract),
        "other_variants": tuple(Variant(**_ports(item)) for item in plain["other_variants"]),
        "files": {n: FileInfo(**_known(info, FileInfo)) for n, info in data["files"].items()},
    }
    if plain["batch"] is not None:
        lists = _known(plain["batch"], BatchInfo)
        plain["batch"] = BatchInfo(**{key: tuple(value) for key, value in lists.items()})
    return Manifest(**plain)


def _ports(data: dict[str, Any]) -> dict[str, Any]:
    """What a manifest and its variants have in common."""
    verification = _known(data["verification"], VerificationInfo)
    verification["seeds"] = tuple(verification.get("seeds", ()))
    return {
        "inputs": _tensors(data["inputs"]),
        "outputs": _tensors(data["outputs"]),
        "golden_inputs": tuple(data["golden_inputs"]),
        "golden_outputs": tuple(data["golden_outputs"]),
        "verification": VerificationInfo(**verification),
    }


def _known(table: dict[str, Any], kind: type) -> dict[str, Any]:
    """The keys of `table` that this edgesdk knows."""
    return {f.name: table[f.name] for f in dataclasses.fields(kind) if f.name in table}


def _tensors(items: list[dict[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(i["name"], tuple(i["shape"]), i["dtype"]) for i in items)
