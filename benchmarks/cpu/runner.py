"""A process that holds one engine with one network and runs it when told to.

    runner.py ENGINE JOB.json

Lines of JSON go both ways. It says {"version"} once the network is loaded, or {"error"}; then
answers {"runs": N} with {"wall_s": [N numbers], "cpu_s": the CPU time of all threads for these N
runs}, and {"save": FILE.npz} with {"saved": number of outputs}. It ends with its standard input.

It runs in the engines' own virtual environment and imports nothing of edgesdk's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")

    name, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    try:
        engine = importlib.import_module(f"engines.{name}")
        with np.load(job["inputs"]) as file:
            inputs = {key: np.ascontiguousarray(file[key]) for key in job["shapes"]}
        shapes = {key: tuple(sizes) for key, sizes in job["shapes"].items()}
        run = engine.load(Path(job["model"]), shapes, job["threads"])
        run(inputs)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return
    answer(version=engine.version())
    for line in sys.stdin:
        request = json.loads(line)
        if "runs" in request:
            wall_s = []
            cpu = time.process_time()
            for _ in range(request["runs"]):
                start = time.perf_counter()
                run(inputs)
                wall_s.append(time.perf_counter() - start)
            answer(wall_s=wall_s, cpu_s=time.process_time() - cpu)
        elif "save" in request:
            outputs = run(inputs)
            np.savez(request["save"], *outputs)
            answer(saved=len(outputs))


if __name__ == "__main__":
    main()
