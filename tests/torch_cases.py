"""Run by a Python with PyTorch: compiles modules and programs, and prints what came out as JSON.

python torch_cases.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import edgesdk
from edgesdk.errors import EdgeSdkError


class SmallCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 32, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classes = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = nn.functional.hardswish(self.norm(self.first(image)))
        x = nn.functional.relu6(self.wide(self.depthwise(x)))
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.classes(self.pool(x).flatten(1)).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (hidden, _) = self.lstm(x)
        return self.out(y), hidden


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.block(self.words(ids), src_key_padding_mask=mask)


class Nested(nn.Module):
    """Takes and returns containers."""

    def forward(self, parts: dict[str, torch.Tensor], scale: torch.Tensor) -> dict[str, Any]:
        return {"sum": parts["a"] + parts["b"], "both": (parts["a"] * scale, parts["b"] - scale)}


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Searching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


def main(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 32, 32)
    mask = torch.zeros(1, 7, dtype=torch.bool)
    mask[0, 5:] = True
    numbers = torch.randn(2, 3)
    cases: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "cnn": (SmallCnn(), (image,)),
        "lstm": (Recurrent(), (torch.randn(1, 5, 8),)),
        "transformer": (Transformer(), (torch.randint(0, 100, (1, 7)), mask)),
        "nested": (Nested(), ({"a": numbers, "b": numbers + 1}, torch.randn(3))),
    }
    said: dict[str, Any] = {}
    for name, (module, inputs) in cases.items():
        module.eval()
        _shake(module)
        bundle = edgesdk.compile(module, example_inputs=inputs, output=folder / name)
        said[name] = _compared(bundle, module, inputs)

    # A program with an open batch, as a file; and what it was made of gives the same hash.
    cnn, inputs = cases["cnn"]
    path = folder / "small_cnn.pt2"
    open_batch = {"image": {0: torch.export.Dim("batch")}}
    example = (torch.randn(2, 3, 32, 32),)
    torch.export.save(torch.export.export(cnn, example, dynamic_shapes=open_batch), path)
    batch = torch.randn(3, 3, 32, 32)
    bundle = edgesdk.compile(path, shapes={"image": (3, 3, 32, 32)}, output=folder / "batch")
    said["batch"] = _compared(bundle, cnn, (batch,))
    report = edgesdk.verify(bundle, model=path, seeds=1)
    said["batch"]["verified"] = [check.name for check in report.checks]

    said["errors"] = {
        "no inputs": _error(lambda: edgesdk.compile(cnn, output=folder / "e")),
        "training": _error(
            lambda: edgesdk.compile(nn.Linear(2, 2), example_inputs=(numbers,), output=folder / "e")
        ),
        "branch": _error(lambda: edgesdk.compile(Branching().eval(), example_inputs=(numbers,))),
        "nonzero": _error(lambda: edgesdk.compile(Searching().eval(), example_inputs=(numbers,))),
        "no model": _error(lambda: edgesdk.compile(3)),  # type: ignore[arg-type]
        "open": _error(lambda: edgesdk.compile(path, output=folder / "e")),
    }
    return said


def _shake(module: nn.Module) -> None:
    """Gives normalisations the statistics of a trained network."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2)


def _compared(bundle: Any, module: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Runs `bundle` on `inputs` and compares with the module, called as Python calls it."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    names = [tensor.name for tensor in bundle.manifest.inputs]
    outputs = edgesdk.run(bundle, {n: t.numpy() for n, t in zip(names, leaves, strict=True)})
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*inputs))
    errors = []
    for array, tensor in zip(outputs.values(), expected, strict=True):
        wanted = tensor.numpy()
        assert array.shape == wanted.shape and array.dtype == wanted.dtype
        errors.append(float(np.abs(array - wanted).max() / np.abs(wanted).max()))
    return {
        "name": bundle.manifest.name,
        "inputs": names,
        "reference": bundle.manifest.verification.reference,
        "errors": errors,
    }


def _error(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except EdgeSdkError as error:
        return {"code": error.exit_code, "message": error.message, "hint": error.hint}
    return {}


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    print("\n" + json.dumps(result))
