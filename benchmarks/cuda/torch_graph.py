"""Latency of a torchvision network in a CUDA graph, in µs: one number a turn, as JSON.

python torch_graph.py "fp32" | "tf32" | "fp16 compiled"  NETWORK  TURNS
"""

import json
import sys
import time

import torch
import torchvision

_RUNS = 200


def main() -> None:
    mode, name, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tf32 = mode == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    network = getattr(torchvision.models, name)(weights=None).eval().cuda()
    x = torch.randn(1, 3, 224, 224, device="cuda")
    if mode.startswith("fp16"):
        network = network.half().to(memory_format=torch.channels_last)
        x = x.half().to(memory_format=torch.channels_last)
        network = torch.compile(network)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(5):
                network(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            network(x)
    medians = []
    for _ in range(turns):
        times = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        medians.append(sorted(times)[_RUNS // 2])
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
