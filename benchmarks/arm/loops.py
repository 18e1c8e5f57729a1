"""Inner loops of compiled kernels, and what llvm-mca says of them for a core.

llvm-mca is a model of the core's issue logic: no caches, no branch misses, and for some cores
(Cortex-A76 among them) LLVM uses the scheduling model of a related one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgesdk.proc import run_command

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(?://.*)?$")
_BRANCH = re.compile(r"^(b\.\w+|cbn?z|tbn?z)$")
_TARGET = re.compile(r"(?:^|,\s*)([0-9a-f]+) <[^>]*>$")
_ITERATIONS = 200
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Loop:
    """A loop without a branch inside. `lines` is its assembly, the branch back last.

    `multiply_adds` counts fused multiply-adds of single floats in one iteration, `stores` its store
    instructions: a loop that only sums has none, unless registers were too few.
    """

    function: str
    lines: tuple[str, ...]
    multiply_adds: int
    stores: int


def disassemble(file: Path) -> str:
    result = run_command(
        ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", file], timeout_s=_LIMIT_S
    )
    if not result.ok:
        raise RuntimeError(f"objdump: {result.last_line()}")
    return result.stdout_text


def find_loops(disassembly: str) -> list[Loop]:
    """Returns all loops without a branch or call inside, in the order of the file."""
    loops = []
    function = ""
    run: list[tuple[int, str, str]] = []  # address, mnemonic, operands since the last branch
    for line in disassembly.splitlines():
        if found := _FUNCTION.match(line):
            function, run = found[1], []
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        address, mnemonic, operands = int(found[1], 16), found[2], found[3]
        if _BRANCH.match(mnemonic):
            target = _TARGET.search(operands)
            start = int(target[1], 16) if target else -1
            body = [item for item in run if item[0] >= start]
            if body and body[0][0] == start:
                loops.append(_loop(function, body, mnemonic, operands))
            run = []
        elif mnemonic in ("b", "bl", "br", "blr", "ret"):
            run = []
        else:
            run.append((address, mnemonic, operands))
    return loops


def _loop(function: str, body: list[tuple[int, str, str]], mnemonic: str, operands: str) -> Loop:
    register = operands.rpartition(",")[0]  # of cbz and tbz; a b.cond has none
    branch = f"{mnemonic} {register}, .Lloop" if register else f"{mnemonic} .Lloop"
    lines = (*(f"{name} {rest}".strip() for _, name, rest in body), branch)
    stores = sum(line.startswith("st") for line in lines)
    return Loop(function, lines, multiply_adds(lines), stores)


def multiply_adds(lines: Iterable[str]) -> int:
    """Fused multiply-adds of single floats: by the lanes of the vector that fmla and fmls name."""
    total = 0
    for line in lines:
        mnemonic, _, operands = line.partition(" ")
        if mnemonic in ("fmadd", "fmsub"):
            total += 1
        elif mnemonic in ("fmla", "fmls"):
            lanes = re.match(r"v\d+\.(\d)s", operands.strip())
            total += int(lanes[1]) if lanes else 1
    return total


def cycles(loop: Loop, cpu: str) -> float:
    """Cycles of one iteration on `cpu` by llvm-mca. Raises RuntimeError if it does not know it."""
    text = "\n".join([".Lloop:", *loop.lines, ""]).encode()
    command = ["llvm-mca", "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+neon"]
    command += [f"-iterations={_ITERATIONS}", "-instruction-info=0", "-resource-pressure=0"]
    result = run_command(command, timeout_s=_LIMIT_S, input_bytes=text)
    found = re.search(r"Total Cycles:\s+(\d+)", result.stdout_text)
    if not result.ok or found is None:
        raise RuntimeError(f"llvm-mca: {result.last_line()}")
    return int(found[1]) / _ITERATIONS
