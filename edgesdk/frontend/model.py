"""What an imported model is: the data that the compiler, the bundle and the gate read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    `name` is the model's own, `identifier` a C identifier unique in the model, `shape` counts
    elements per axis, `dtype` is NumPy's name ("float32", "int64", "bool").
    """

    name: str
    identifier: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ValueHint:
    """Which numbers an input may take: `low` to `high` inclusive, or one of `choices`."""

    low: int = 0
    high: int = 0
    choices: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImportedModel:
    """A model ready to be compiled.

    `module` is a Relax module whose `main` takes the inputs in the order of `inputs` and returns
    one tensor, or a tuple in the order of `outputs`; weights are constants in it and all shapes
    are static. `sha256` covers the file and its external data. `shapes` are the fixed input
    shapes by the model's own names. `repairs` says, a line each, what was rewritten or assumed.
    `hints` holds, by the model's own input names, the integers that the graph can take. `flops`
    are the operations of one run (`frontend.costs`), None where they are not known. `reference` is
    the program that its results are compared with. `quantised` models compute with integers that
    stand for rounded numbers.
    """

    name: str
    module: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: Path
    sha256: str
    opset: int
    shapes: dict[str, tuple[int, ...]]
    repairs: tuple[str, ...]
    hints: dict[str, ValueHint] = field(default_factory=dict)
    flops: int | None = None
    reference: str = ""
    quantised: bool = False

    def take_module(self) -> tvm.IRModule:
        """Returns `module` and forgets it, so that its weights live no longer than it is needed.

        Raises ValueError at the second call.
        """
        module = self.module
        if module is None:
            raise ValueError(f"the module of {self.name} has been taken")
        object.__setattr__(self, "module", None)
        return module
