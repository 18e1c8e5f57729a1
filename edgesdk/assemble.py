"""From a compiled library to its bundle: the gate for each of its shapes, and the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.bundle.manifest import GpuContract, Variant, VerificationInfo
    from edgesdk.compiler import CompiledModel
    from edgesdk.compiler.cuda import Image
    from edgesdk.compiler.gate import Sample
    from edgesdk.frontend import ImportedModel
    from edgesdk.frontend.variants import Variants
    from edgesdk.profiles import TargetProfile
    from edgesdk.tuning.lookup import RecordLookup


def verified(
    variants: Variants,
    profile: TargetProfile,
    compiled: CompiledModel,
    given: Mapping[str, np.ndarray] | None,
    verify: bool,
    allowed: float,
    lookup: RecordLookup | None,
    destination: Path,
    target: str,
    progress: Callable[[str], None],
) -> list[tuple[Sample, VerificationInfo]]:
    """Passes the gate for each of the shapes; returns its golden inputs and what was found."""
    from edgesdk.frontend.variants import shape_of

    results = []
    for model in variants.models:
        mine = given if given is not None and shape_of(given) == model.shapes else None
        samples, verification = _verified_shape(
            model,
            profile,
            compiled,
            mine,
            verify,
            allowed,
            lookup,
            destination,
            target,
            progress,
        )
        results.append((samples[0], verification))
    if variants.batch_inputs:
        from edgesdk.compiler.batches import check_rows

        progress("comparing batches that are cut")
        check_rows(variants.models, variants.batch_inputs, max(v.tolerance for _, v in results))
    return results


def _verified_shape(
    imported: ImportedModel,
    profile: TargetProfile,
    compiled: CompiledModel,
    given: Mapping[str, np.ndarray] | None,
    verify: bool,
    allowed: float,
    lookup: RecordLookup | None,
    destination: Path,
    target: str,
    progress: Callable[[str], None],
) -> tuple[list[Sample], VerificationInfo]:
    """Draws inputs, the golden ones first, and passes the gate."""
    import shlex

    from edgesdk.bundle.manifest import VerificationInfo
    from edgesdk.compiler import gate
    from edgesdk.compiler.diagnose import explain
    from edgesdk.compiler.probe import Probe

    progress("running the reference")
    toolchain = compiled.toolchain
    seeds = gate.choose_seeds(profile, toolchain, imported.flops) if verify else gate.SEEDS[:1]
    samples, tolerance = gate.draw_samples(imported, seeds=seeds, given=given)
    tolerance = max(tolerance, allowed)
    if not verify:
        return samples, VerificationInfo(
            "not run", imported.reference, None, None, tolerance, "switched off by the caller"
        )
    progress(f"comparing results on {len(samples)} sets of inputs")
    try:
        verification = gate.check_results(
            library=compiled.library,
            launcher=compiled.launcher,
            profile=profile,
            toolchain=toolchain,
            samples=samples,
            tolerance=tolerance,
            reference=imported.reference,
        )
    except gate.MismatchError as error:
        progress("results differ: looking for the first layer that does")
        raise explain(
            error,
            model=imported.source,
            probe=Probe(profile, gate.executor(profile, toolchain), lookup, allowed),
            folder=destination.with_name(f"{destination.name}.mismatch"),
            command=lambda words: shlex.join(
                ["edgesdk", "compile", *words, "--target", target, *_precision_words(profile)]
            ),
        ) from error
    return samples, gate.with_remark(verification, imported, samples)


def _precision_words(profile: TargetProfile) -> list[str]:
    return [] if profile.precision == "fp32" else ["--precision", profile.precision]


def fill(
    staging: Path,
    variants: Variants,
    profile: TargetProfile,
    compiled: CompiledModel,
    precision: str,
    results: Sequence[tuple[Sample, VerificationInfo]],
    records_skipped: Mapping[str, int],
) -> None:
    """Writes the bundle's files. `results` are those of `verified`."""
    from dataclasses import replace

    from edgesdk.bundle.manifest import BatchInfo, Manifest
    from edgesdk.bundle.writer import write_bundle
    from edgesdk.deploy.facts import contract_of

    imported = variants.models[0]
    first, *others = (
        _variant(number, model, verification)
        for number, (model, (_, verification)) in enumerate(
            zip(variants.models, results, strict=True)
        )
    )
    batch = None
    if variants.batch_inputs:
        sizes = tuple(model.shapes[variants.batch_inputs[0]][0] for model in variants.models)
        batch = BatchInfo(sizes, variants.batch_inputs)
    manifest = Manifest(
        name=imported.name,
        target=profile.name,
        description=profile.description,
        library=f"lib/{compiled.library.name}",
        launcher=f"bin/{compiled.launcher.name}" if compiled.launcher else "",
        contract=replace(contract_of(profile), gpu=_gpu_contract(profile, compiled)),
        inputs=first.inputs,
        outputs=first.outputs,
        golden_inputs=first.golden_inputs,
        golden_outputs=first.golden_outputs,
        verification=first.verification,
        other_variants=tuple(others),
        batch=batch,
        model_sha256=imported.sha256,
        abi_version=_abi_version(),
        precision=precision,
        weights_bytes=compiled.weights_bytes,
        arena_bytes=compiled.arena_bytes,
        files={},
        tools=_tools(compiled),
        build={
            "id": compiled.build_id,
            "opset": imported.opset,
            "repairs": list(imported.repairs),
            "kernel_calls": compiled.num_kernel_calls,
            "activations_bytes": compiled.activations_bytes,
            "coverage": {
                "rungs": compiled.coverage.rungs,
                "shares": {r: round(share, 4) for r, share in compiled.coverage.shares.items()},
                "problems": compiled.coverage.problems,
            },
            "records_skipped": dict(records_skipped),
            "toolchain": compiled.toolchain.name,
            "tvm_target": profile.tvm,
            "device_code": [_image_report(image) for image in compiled.device_images],
            "device_code_remark": _image_remark(profile, compiled),
        },
    )
    write_bundle(
        staging,
        manifest,
        library=compiled.library,
        launcher=compiled.launcher,
        header=compiled.header,
        golden=[
            (list(sample.inputs.values()), list(sample.expected.values())) for sample, _ in results
        ],
    )


def _variant(number: int, model: ImportedModel, verification: VerificationInfo) -> Variant:
    from edgesdk.bundle.manifest import TensorInfo, Variant

    folder = f"golden/variant_{number}" if number else "golden"
    return Variant(
        inputs=tuple(TensorInfo(t.name, t.shape, t.dtype) for t in model.inputs),
        outputs=tuple(TensorInfo(t.name, t.shape, t.dtype) for t in model.outputs),
        golden_inputs=tuple(f"{folder}/input_{i}.npy" for i in range(len(model.inputs))),
        golden_outputs=tuple(f"{folder}/output_{i}.npy" for i in range(len(model.outputs))),
        verification=verification,
    )


def _gpu_contract(profile: TargetProfile, compiled: CompiledModel) -> GpuContract | None:
    """What the code for the GPU asks of it; None if every kernel is for the CPU."""
    from edgesdk.bundle.audit import version_key
    from edgesdk.bundle.manifest import GpuContract

    if profile.gpu is None or not compiled.device_images:
        return None
    cubins = [image for image in compiled.device_images if image.format == "cubin"]
    ptx = next((image for image in compiled.device_images if image.format == "ptx"), None)
    return GpuContract(
        api=profile.gpu.api,
        architectures=tuple(image.architecture for image in cubins),
        ptx=ptx.architecture if ptx else None,
        cuda=max((image.driver for image in cubins), key=version_key, default=None),
        ptx_cuda=ptx.driver if ptx else None,
        **(_opencl_needs(compiled) if profile.gpu.api == "opencl" else {}),
    )


def _opencl_needs(compiled: CompiledModel) -> dict[str, Any]:
    from dataclasses import asdict

    from edgesdk.compiler import opencl

    needs = opencl.needs_of(compiled.device_images[0].data.decode())
    return asdict(needs) | {"buffer_bytes": max(compiled.arena_bytes, compiled.weights_bytes)}


def _image_report(image: Image) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "format": image.format,
        "architecture": image.architecture,
        "compiler": image.compiler,
        "driver": image.driver,
        "size_bytes": len(image.data),
        "kernels": [asdict(kernel) for kernel in image.resources],
    }


def _image_remark(profile: TargetProfile, compiled: CompiledModel) -> str | None:
    """What is to be said if the code was made for newer drivers than the target's."""
    from edgesdk.compiler import cuda

    if profile.gpu is None or not compiled.device_images:
        return None
    found = cuda.too_new(profile.gpu)
    if found is None:
        return None
    why, fix = found
    return f"{why} ({fix})" if fix else why


def build_id_of(
    variants: Variants,
    profile: TargetProfile,
    precision: str,
    lookup: RecordLookup | None,
) -> str:
    """16 hex digits that change with the model, its shapes, the target, the tools and what tuning
    found."""
    import json

    parts = {
        "model": variants.models[0].sha256,
        "shapes": [{k: list(v) for k, v in m.shapes.items()} for m in variants.models],
        "batch": variants.batch_inputs,
        "target": profile.name,
        "tvm": profile.tvm,
        "precision": precision,
        "versions": _versions(),
        "tuned": lookup.used if lookup is not None else {},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        name: version(name)
        for name in ("edgesdk", "apache-tvm", "apache-tvm-ffi", "onnx", "onnxruntime")
    }


def _tools(compiled: CompiledModel) -> dict[str, str]:
    return {**_versions(), "compiler": compiled.toolchain.version()}


def _abi_version() -> int:
    """EDGESDK_ABI_VERSION of the public header."""
    import re

    from edgesdk.resources import data_folder

    header = data_folder("device_scripts") / "include" / "edgesdk_model.h"
    found = re.search(r"#define EDGESDK_ABI_VERSION (\d+)u", header.read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError(f"{header} has no EDGESDK_ABI_VERSION")
    return int(found.group(1))
