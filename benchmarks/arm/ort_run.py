"""Runs inside the emulator: a network with ONNX Runtime, N times.

ort_run.py MODEL.onnx INPUTS.npz OUTPUTS.npz N
"""

import sys

import numpy as np
import onnxruntime


def main() -> None:
    model, inputs, outputs, runs = sys.argv[1:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with np.load(inputs) as file:
        feeds = {value.name: file[value.name] for value in session.get_inputs()}
    for _ in range(int(runs)):
        results = session.run(None, feeds)
    np.savez(outputs, *results)


if __name__ == "__main__":
    main()
