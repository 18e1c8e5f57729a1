"""edgesdk compiles, tunes and deploys trained networks for the board on the desk.

    bundle = edgesdk.compile("model.onnx", target="rpi4", shapes={"x": (1, 3, 224, 224)})
    outputs = edgesdk.run(bundle, {"x": array}, device="pi")

Everything is imported when it is used, never by `import edgesdk`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgesdk import errors
    from edgesdk.api import bench, compile, push, run, run_folder, tune, verify
    from edgesdk.bundle import Bundle, open_bundle

__version__ = "0.1.0"
__all__ = [
    "Bundle",
    "__version__",
    "bench",
    "compile",
    "errors",
    "open_bundle",
    "push",
    "run",
    "run_folder",
    "tune",
    "verify",
]

_HOMES = {"Bundle": "edgesdk.bundle", "open_bundle": "edgesdk.bundle"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edgesdk' has no attribute {name!r}")
    import importlib

    if name == "errors":
        return importlib.import_module("edgesdk.errors")
    return getattr(importlib.import_module(_HOMES.get(name, "edgesdk.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
