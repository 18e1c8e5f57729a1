"""One module for each engine, all of the same form:

PACKAGES                              what pip installs for it, pinned
WITHOUT_DEPENDENCIES                  packages (if any) that are installed without what they ask for
version() -> str
load(model, shapes, threads) -> run   run(inputs) -> outputs, in the order of the model

`model` is an ONNX file (a library for edgesdk, a .tflite file for LiteRT), `shapes` the sizes of
its inputs by name, `inputs` and `outputs` NumPy arrays. Files that an engine makes of the model go
into a folder of the engine's name beside it. Everything that `run` does is measured, the way from
arrays to arrays included. What an engine cannot do, it says by an exception.

Nothing is imported at module level that pip must install first.
"""
