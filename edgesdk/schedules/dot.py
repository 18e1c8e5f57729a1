"""Sums of products of 8-bit integers: which instruction a CPU has for them, as tensor intrinsics.

Each step takes `depth` neighbouring channels of one pixel, multiplies them with the weights of as
many output channels as a vector has 32-bit lanes, and adds the products to 32-bit sums. No step
saturates: where the instruction set has no such dot product, numbers are widened to 16 bits first.
x86's vpmaddubsw, which is faster but cuts sums of two products at 16 bits, is used for weights so
small that no sum can reach that far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules.hardware import lanes

if TYPE_CHECKING:
    import numpy as np

# (sums, data, weights) -> sums; see the functions at the end.
_Emit = Callable[[Any, Any, Any, "DotProduct"], Any]


@dataclass(frozen=True)
class Instruction:
    """An instruction, or a short sequence. `features` are LLVM's names, all of which it needs;
    `data` the types that it multiplies with signed weights of the type `weight`. Where it `cuts`
    sums of two products at 16 bits, it is for small weights only."""

    name: str
    machine: str
    features: tuple[str, ...]
    lanes: int
    depth: int
    data: tuple[str, ...]
    weight: str
    emit: _Emit
    llvm: str
    cuts: bool = False


@dataclass(frozen=True)
class DotProduct:
    """An instruction for data of one type. `shift` is added to each number of the data before: it
    moves a type that the instruction does not take into the range of the one that it takes."""

    instruction: Instruction
    data: str

    @property
    def name(self) -> str:
        return f"{self.instruction.name}.{self.data}"

    @property
    def depth(self) -> int:
        return self.instruction.depth

    @property
    def shift(self) -> int:
        if self.data in self.instruction.data:
            return 0
        return 128 if self.data == "int8" else -128

    def holds(self, weight: np.ndarray) -> bool:
        """Whether `weight`, [..., terms in their order], gives exact sums."""
        import numpy as np

        limit = 128 if self.instruction.weight == "int8" else 2**15
        if weight.size and not -limit <= weight.min() <= weight.max() < limit:
            return False
        if not self.instruction.cuts:
            return True
        even = np.concatenate([weight, np.zeros_like(weight[..., : weight.shape[-1] % 2])], -1)
        pairs = even.reshape(*even.shape[:-1], -1, 2)
        highest, lowest = (f(pairs, 0).sum(-1) for f in (np.maximum, np.minimum))
        return bool(
            255 * highest.max(initial=0) < 2**15 and 255 * lowest.min(initial=0) >= -(2**15)
        )


def has_dot(profile: TargetProfile) -> bool:
    """Whether the profile's processor is a CPU with any of these instructions."""
    return profile.gpu is None and any(_present(profile))


def find_dot(profile: TargetProfile, data: str, weight: np.ndarray) -> DotProduct | None:
    """Returns the best instruction of the profile's CPU for `data` ("int8" or "uint8") and
    `weight`, [..., terms in their order], if there is one that gives exact sums."""
    dots = [DotProduct(instruction, data) for instruction in _present(profile)]
    exact = [dot for dot in dots if dot.holds(weight)]
    # More products first; of as many, those of the data as they are.
    return min(exact, key=lambda dot: (-dot.depth, dot.shift != 0), default=None)


def _present(profile: TargetProfile) -> Iterator[Instruction]:
    """The instructions of the profile's CPU, the best first."""
    import tvm
    from tvm.target.codegen import target_has_features

    target = tvm.target.Target(profile.tvm)
    for instruction in _INSTRUCTIONS:
        if (instruction.machine, instruction.lanes) != (profile.machine, lanes(profile)):
            continue
        if all(target_has_features(feature, target) for feature in instruction.features):
            yield instruction


def register(name: str) -> DotProduct:
    """Makes the tensor intrinsic `name` known to TVM and returns what it stands for."""
    from tvm.s_tir import TensorIntrin

    short, _, data = name.rpartition(".")
    dot = DotProduct(next(i for i in _INSTRUCTIONS if i.name == short), data)
    if TensorIntrin.get(name, allow_missing=True) is None:
        TensorIntrin.register(name, *_functions(dot))
    return dot


def widened(value: Any, dot: DotProduct) -> Any:
    """A number of the data as the sums take it: the description of what the instruction does."""
    wide = value.astype("int32")
    return wide + dot.shift if dot.shift else wide


def _functions(dot: DotProduct) -> tuple[Any, Any]:
    """What the intrinsic means, and how it is done."""
    from tvm.script import tirx as T

    width, depth = dot.instruction.lanes, dot.depth
    data_type, weight_type = dot.data, dot.instruction.weight

    @T.prim_func(s_tir=True)
    def description(data: T.handle, weight: T.handle, sums: T.handle) -> None:
        A = T.match_buffer(data, (depth,), data_type, offset_factor=1)
        B = T.match_buffer(weight, (width, depth), weight_type, offset_factor=1)
        C = T.match_buffer(sums, (width,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:width], A[0:depth], B[0:width, 0:depth])
            T.writes(C[0:width])
            for i in T.serial(0, width):
                for j in T.serial(0, depth):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, j])
                        C[vi] = C[vi] + widened(A[vk], dot) * T.cast(B[vi, vk], "int32")

    @T.prim_func(s_tir=True)
    def implementation(data: T.handle, weight: T.handle, sums: T.handle) -> None:
        A = T.match_buffer(data, (depth,), data_type, offset_factor=1)
        B = T.match_buffer(weight, (width, depth), weight_type, offset_factor=1)
        C = T.match_buffer(sums, (width,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:width], A[0:depth], B[0:width, 0:depth])
            T.writes(C[0:width])
            C[T.ramp(0, 1, width)] = dot.instruction.emit(
                C.vload([0], f"int32x{width}"),
                A.vload([0], f"{data_type}x{depth}"),
                B.vload([0, 0], f"{weight_type}x{width * depth}"),
                dot,
            )

    return description, implementation


def _spread(data: Any, dot: DotProduct) -> Any:
    """The channels of a step repeated for every lane."""
    from tvm import tirx

    number = {2: "int16", 4: "int32"}[dot.depth]
    word = tirx.reinterpret(number, data)
    count = dot.instruction.lanes
    return tirx.reinterpret(f"{dot.data}x{count * dot.depth}", tirx.Broadcast(word, count))


def _flip(data: Any, dot: DotProduct) -> Any:
    """Adds `shift`: modulo 256 both shifts are the same flip of the highest bit."""
    from tvm import tirx

    if not dot.shift:
        return data
    size = dot.instruction.lanes * dot.depth
    flipped = data ^ tirx.Broadcast(tirx.const(-128 if dot.data == "int8" else 128, dot.data), size)
    other = "uint8" if dot.data == "int8" else "int8"
    return tirx.reinterpret(f"{other}x{size}", flipped)


def _call(llvm: str, dtype: str, *arguments: Any) -> Any:
    from tvm import tirx

    return tirx.call_llvm_pure_intrin(dtype, llvm, *arguments)


def _four(sums: Any, data: Any, weights: Any, dot: DotProduct) -> Any:
    """Four products a lane in one instruction."""
    spread = _flip(_spread(data, dot), dot)
    return _call(dot.instruction.llvm, f"int32x{dot.instruction.lanes}", sums, spread, weights)


def _four_cut(sums: Any, data: Any, weights: Any, dot: DotProduct) -> Any:
    """Four products a lane by way of two 16-bit sums."""
    from tvm import tirx

    count = dot.instruction.lanes
    products = _call(
        dot.instruction.llvm, f"int16x{count * 2}", _flip(_spread(data, dot), dot), weights
    )
    ones = tirx.Broadcast(tirx.const(1, "int16"), count * 2)
    return sums + _call(_PAIR_SUMS[count], f"int32x{count}", products, ones)


def _pair(sums: Any, data: Any, weights: Any, dot: DotProduct) -> Any:
    """Two products of 16-bit numbers a lane, summed without loss."""
    count = dot.instruction.lanes
    wide = _spread(data, dot).astype(f"int16x{count * 2}")
    return sums + _call(dot.instruction.llvm, f"int32x{count}", wide, weights)


def _long(sums: Any, data: Any, weights: Any, dot: DotProduct) -> Any:
    """8-bit numbers to 16-bit products, of which pairs are added to 32 bits."""
    spread = _flip(_spread(data, dot), dot)
    products = spread.astype("int16x8") * weights.astype("int16x8")
    return sums + _call(dot.instruction.llvm, "int32x4", products)


_BOTH = ("uint8", "int8")

# vpmaddwd by its lanes.
_PAIR_SUMS = {
    16: "llvm.x86.avx512.pmaddw.d.512",
    8: "llvm.x86.avx2.pmadd.wd",
    4: "llvm.x86.sse2.pmadd.wd",
}

# The best of each machine first.
_INSTRUCTIONS = (
    Instruction(
        "vpdpbusd512", "x86_64", ("avx512vnni",), 16, 4, ("uint8",), "int8", _four,
        "llvm.x86.avx512.vpdpbusd.512",
    ),
    Instruction(
        "vpdpbusd256", "x86_64", ("avxvnni",), 8, 4, ("uint8",), "int8", _four,
        "llvm.x86.avx512.vpdpbusd.256",
    ),
    Instruction(
        "pmaddubsw512", "x86_64", ("avx512bw",), 16, 4, ("uint8",), "int8", _four_cut,
        "llvm.x86.avx512.pmaddubs.w.512", cuts=True,
    ),
    Instruction(
        "pmaddubsw256", "x86_64", ("avx2",), 8, 4, ("uint8",), "int8", _four_cut,
        "llvm.x86.avx2.pmadd.ub.sw", cuts=True,
    ),
    Instruction(
        "pmaddubsw128", "x86_64", ("ssse3",), 4, 4, ("uint8",), "int8", _four_cut,
        "llvm.x86.ssse3.pmadd.ub.sw.128", cuts=True,
    ),
    Instruction(
        "pmaddwd512", "x86_64", ("avx512bw",), 16, 2, _BOTH, "int16", _pair, _PAIR_SUMS[16]
    ),
    Instruction("pmaddwd256", "x86_64", ("avx2",), 8, 2, _BOTH, "int16", _pair, _PAIR_SUMS[8]),
    Instruction("pmaddwd128", "x86_64", ("sse2",), 4, 2, _BOTH, "int16", _pair, _PAIR_SUMS[4]),
    Instruction(
        "usdot", "aarch64", ("i8mm",), 4, 4, ("uint8",), "int8", _four, "llvm.aarch64.neon.usdot"
    ),
    Instruction(
        "sdot", "aarch64", ("dotprod",), 4, 4, ("int8",), "int8", _four, "llvm.aarch64.neon.sdot"
    ),
    Instruction(
        "smull", "aarch64", ("neon",), 4, 2, ("int8",), "int8", _long, "llvm.aarch64.neon.saddlp"
    ),
    Instruction(
        "vmull", "arm", ("neon",), 4, 2, ("int8",), "int8", _long, "llvm.arm.neon.vpaddls"
    ),
)  # fmt: skip
