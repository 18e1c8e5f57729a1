"""Compiles a model, or some of its tensors, and runs it once: how wrong results are searched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.compiler import compile_model
from edgesdk.frontend import import_model
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Lookup

if TYPE_CHECKING:
    import numpy as np

# Runs a library in its launcher on inputs, in order, and returns as many outputs as it is told.
Execute = Callable[[Path, Path, "Sequence[np.ndarray]", int], "list[np.ndarray]"]


@dataclass(frozen=True)
class Probe:
    """How to compile for `profile` with the tuned schedules of `lookup`, and where to run.

    `tolerance` is allowed whatever the reference itself moves by (`Precision.tolerance`).
    """

    profile: TargetProfile
    execute: Execute
    lookup: Lookup | None = None
    tolerance: float = 0.0

    def run(
        self,
        path: Path,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the tensors `outputs` (by default the model's outputs) of the model `path`.

        Raises what `import_model`, `compile_model` and `execute` raise.
        """
        shapes = {name: array.shape for name, array in inputs.items()}
        imported = import_model(path, shapes=shapes, outputs=outputs)
        with tempfile.TemporaryDirectory(prefix="edgesdk-") as temporary:
            compiled = compile_model(
                imported,
                self.profile,
                build=Path(temporary),
                lookup=self.lookup,
                name_build=lambda: "probe",
            )
            assert compiled.launcher is not None  # else nothing was run that could differ
            feeds = [inputs[i.name] for i in imported.inputs]
            count = len(imported.outputs)
            arrays = self.execute(compiled.library, compiled.launcher, feeds, count)
        return {o.name: array for o, array in zip(imported.outputs, arrays, strict=True)}
