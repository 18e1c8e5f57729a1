"""Products on tensor cores: what the 32 threads of a warp compute together, as tensor intrinsics.

A warp keeps a tile of sums in its registers, 16 pixels times 16 channels for each *fragment*, and
adds the products of 16 terms at a time (PTX ISA, "Warp-level matrix instructions", `mma.sync`
m16n8k16 for half precision, twice m16n8k8 for TF32). Which thread takes which terms is free as long
as both operands agree: a thread takes 4 neighbouring ones, which blocks of 4 channels have side by
side, so that each operand is one load from shared memory.

TVM declares fragments as `nvcuda::wmma::fragment` and fills them with `fill_fragment`. Both are
defined in `SOURCE`, so that no header of CUDA is needed.
"""

from __future__ import annotations

from typing import Any

# Pixels and channels of a fragment, and the terms of a step in blocks of 4.
FRAGMENT = 16
STEP = 4
MULTIPLY = "edgesdk_multiply"

# The instructions, each a function.
INSTRUCTIONS = """\
__device__ __forceinline__ uint32_t edgesdk_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

__device__ __forceinline__ uint32_t edgesdk_halves(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ void edgesdk_mma_tf32(float* d, uint32_t a0, uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3},"
      " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void edgesdk_mma_f16(float* d, uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
      " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""

# Fragments, and what a warp does with them.
FRAGMENTS = """\
namespace nvcuda { namespace wmma {
struct accumulator;
// A thread's sums: the pixels lane / 4 and 8 on, times the channels 2 * (lane % 4) and the one
// after it, and all that again for the channels 8 on.
template <class Use, int M, int N, int K, class Type>
struct fragment { float x[8]; };
template <class Fragment>
__device__ __forceinline__ void fill_fragment(Fragment& sums, float value) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sums.x[i] = value;
}
} }

template <class Type, int Bytes> struct edgesdk_vector { using two = float2; using four = float4; };
template <class Type> struct edgesdk_vector<Type, 2> { using two = uint32_t; using four = uint2; };

// 16 pixels, of which `upper` and `lower` are a thread's, times 8 channels. The weights were
// rounded when they were packed.
__device__ __forceinline__ void edgesdk_mma(float* d, float4 upper, float4 lower, float4 weights) {
  edgesdk_mma_tf32(d, edgesdk_tf32(upper.x), edgesdk_tf32(lower.x), edgesdk_tf32(upper.y),
                   edgesdk_tf32(lower.y), __float_as_uint(weights.x), __float_as_uint(weights.y));
  edgesdk_mma_tf32(d, edgesdk_tf32(upper.z), edgesdk_tf32(lower.z), edgesdk_tf32(upper.w),
                   edgesdk_tf32(lower.w), __float_as_uint(weights.z), __float_as_uint(weights.w));
}

__device__ __forceinline__ void edgesdk_mma(float* d, uint2 upper, uint2 lower, uint2 weights) {
  edgesdk_mma_f16(d, upper.x, lower.x, upper.y, lower.y, weights.x, weights.y);
}

// Adds to ROWS x COLUMNS fragments the products of 4 blocks of terms, which lie `left_step` and
// `right_step` elements apart.
template <int ROWS, int COLUMNS, class Fragment, class Type>
__device__ __forceinline__ void edgesdk_multiply(
    Fragment* sums, const Type* left, int left_step, const Type* right, int right_step) {
  using Four = typename edgesdk_vector<Type, sizeof(Type)>::four;
  const int group = (threadIdx.x & 31) >> 2, block = threadIdx.x & 3;
  const Type* pixels = left + block * left_step + 4 * group;
  const Type* channels = right + block * right_step + 4 * group;
  Four weights[2 * COLUMNS];
#pragma unroll
  for (int j = 0; j < 2 * COLUMNS; ++j) {
    weights[j] = *reinterpret_cast<const Four*>(channels + 32 * j);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const Four upper = *reinterpret_cast<const Four*>(pixels + 64 * i);
    const Four lower = *reinterpret_cast<const Four*>(pixels + 64 * i + 32);
#pragma unroll
    for (int j = 0; j < 2 * COLUMNS; ++j) {
      edgesdk_mma(sums[i * COLUMNS + j / 2].x + 4 * (j & 1), upper, lower, weights[j]);
    }
  }
}

__device__ __forceinline__ void edgesdk_pair(float2* to, float first, float second) {
  *to = make_float2(first, second);
}

__device__ __forceinline__ void edgesdk_pair(uint32_t* to, float first, float second) {
  *to = edgesdk_halves(first, second);
}

// Writes fragments as blocks of 4 channels, which lie `step` elements apart.
template <int ROWS, int COLUMNS, class Fragment, class Type>
__device__ __forceinline__ void edgesdk_store(Type* to, int step, const Fragment* sums) {
  using Pair = typename edgesdk_vector<Type, sizeof(Type)>::two;
  const int group = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
  Type* first = to + (pair >> 1) * step + 4 * group + 2 * (pair & 1);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * COLUMNS; ++j) {
      const float* x = sums[i * COLUMNS + j / 2].x + 4 * (j & 1);
      Type* at = first + 2 * j * step + 64 * i;
      edgesdk_pair(reinterpret_cast<Pair*>(at), x[0], x[1]);
      edgesdk_pair(reinterpret_cast<Pair*>(at + 32), x[2], x[3]);
    }
  }
}
"""

SOURCE = INSTRUCTIONS + FRAGMENTS


def register(rows: int, columns: int, dtype: str, stored: str, scope: str) -> tuple[str, str, str]:
    """Makes the intrinsics known that fill, multiply, and store the sums of a warp with `rows` x
    `columns` fragments, and returns their names. `dtype` is the operands', `stored` that of the
    results in the memory of `scope`."""
    from tvm.s_tir import TensorIntrin

    tile = f"{rows}x{columns}"
    named = {
        f"edgesdk.warp_fill.{tile}": lambda: _fill(rows, columns),
        f"edgesdk.warp_multiply.{tile}.{dtype}": lambda: _multiply(rows, columns, dtype),
        f"edgesdk.warp_store.{tile}.{stored}.{scope}": lambda: _store(rows, columns, stored, scope),
    }
    for name, functions in named.items():
        if TensorIntrin.get(name, allow_missing=True) is None:
            TensorIntrin.register(name, *functions())
    fill, multiply, store = named
    return fill, multiply, store


def _fill(rows: int, columns: int) -> tuple[Any, Any]:
    from tvm.script import tirx as T

    pixels, blocks, size = FRAGMENT * rows, 4 * columns, FRAGMENT * FRAGMENT

    @T.prim_func(s_tir=True)
    def description(sums: T.handle) -> None:
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:blocks, 0:pixels, 0:4])
            for o, p, b in T.grid(blocks, pixels, 4):
                with T.sblock("init"):
                    vo, vp, vb = T.axis.remap("SSS", [o, p, b])
                    C[vo, vp, vb] = T.float32(0)

    @T.prim_func(s_tir=True)
    def implementation(sums: T.handle) -> None:
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:blocks, 0:pixels, 0:4])
            for i in T.unroll(rows * columns):
                T.evaluate(
                    T.tvm_fill_fragment(
                        C.data, FRAGMENT, FRAGMENT, FRAGMENT, i, T.float32(0), dtype="void"
                    )
                )

    return description, implementation


def _multiply(rows: int, columns: int, dtype: str) -> tuple[Any, Any]:
    from tvm.script import tirx as T

    pixels, blocks, size = FRAGMENT * rows, 4 * columns, FRAGMENT * FRAGMENT
    name = f"{MULTIPLY}<{rows}, {columns}>"

    def wide(value: Any) -> Any:
        return value if dtype == "float32" else T.Cast("float32", value)

    @T.prim_func(s_tir=True)
    def description(left: T.handle, right: T.handle, sums: T.handle) -> None:
        A = T.match_buffer(left, (STEP, pixels, 4), dtype, offset_factor=4, scope="shared")
        B = T.match_buffer(right, (STEP, blocks, 4, 4), dtype, offset_factor=4, scope="shared")
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        with T.sblock("root"):
            T.reads(
                C[0:blocks, 0:pixels, 0:4], A[0:STEP, 0:pixels, 0:4], B[0:STEP, 0:blocks, 0:4, 0:4]
            )
            T.writes(C[0:blocks, 0:pixels, 0:4])
            for k, o, p, b, c in T.grid(STEP, blocks, pixels, 4, 4):
                with T.sblock("update"):
                    vo, vp, vb, vk, vc = T.axis.remap("SSSRR", [o, p, b, k, c])
                    C[vo, vp, vb] = C[vo, vp, vb] + wide(A[vk, vp, vc]) * wide(B[vk, vo, vb, vc])

    @T.prim_func(s_tir=True)
    def implementation(left: T.handle, right: T.handle, sums: T.handle) -> None:
        left_step = T.int32()
        left_pixel = T.int32()
        left_term = T.int32()
        right_step = T.int32()
        right_block = T.int32()
        right_channel = T.int32()
        right_term = T.int32()
        A = T.match_buffer(
            left,
            (STEP, pixels, 4),
            dtype,
            offset_factor=4,
            scope="shared",
            strides=[left_step, left_pixel, left_term],
        )
        B = T.match_buffer(
            right,
            (STEP, blocks, 4, 4),
            dtype,
            offset_factor=4,
            scope="shared",
            strides=[right_step, right_block, right_channel, right_term],
        )
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        with T.sblock("root"):
            T.reads(
                C[0:blocks, 0:pixels, 0:4], A[0:STEP, 0:pixels, 0:4], B[0:STEP, 0:blocks, 0:4, 0:4]
            )
            T.writes(C[0:blocks, 0:pixels, 0:4])
            T.evaluate(
                T.call_extern(
                    "void",
                    name,
                    C.data,
                    A.access_ptr("r", ptr_type=dtype),
                    left_step,
                    B.access_ptr("r", ptr_type=dtype),
                    right_step,
                )
            )

    return description, implementation


def _store(rows: int, columns: int, dtype: str, scope: str) -> tuple[Any, Any]:
    from tvm.script import tirx as T

    pixels, blocks, size = FRAGMENT * rows, 4 * columns, FRAGMENT * FRAGMENT
    name = f"edgesdk_store<{rows}, {columns}>"

    def rounded(value: Any) -> Any:
        return value if dtype == "float32" else T.Cast(dtype, value)

    @T.prim_func(s_tir=True)
    def description(sums: T.handle, out: T.handle) -> None:
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        D = T.match_buffer(out, (blocks, pixels, 4), dtype, offset_factor=4, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:blocks, 0:pixels, 0:4])
            T.writes(D[0:blocks, 0:pixels, 0:4])
            for o, p, b in T.grid(blocks, pixels, 4):
                with T.sblock("store"):
                    vo, vp, vb = T.axis.remap("SSS", [o, p, b])
                    D[vo, vp, vb] = rounded(C[vo, vp, vb])

    @T.prim_func(s_tir=True)
    def implementation(sums: T.handle, out: T.handle) -> None:
        step = T.int32()
        pixel = T.int32()
        channel = T.int32()
        C = T.match_buffer(
            sums, (blocks, pixels, 4), "float32", offset_factor=size, scope="wmma.accumulator"
        )
        D = T.match_buffer(
            out,
            (blocks, pixels, 4),
            dtype,
            offset_factor=4,
            scope=scope,
            strides=[step, pixel, channel],
        )
        with T.sblock("root"):
            T.reads(C[0:blocks, 0:pixels, 0:4])
            T.writes(D[0:blocks, 0:pixels, 0:4])
            T.evaluate(T.call_extern("void", name, D.access_ptr("w", ptr_type=dtype), step, C.data))

    return description, implementation
