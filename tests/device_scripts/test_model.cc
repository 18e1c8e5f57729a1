// A model by hand, in the form that edgesdk/compiler/emit.py writes and TVM's generated code has.
//
// MODEL names it. As such: y = relu(FACTOR * weight * x) + 1 with weight[i] = i, x and y float32
// [10, 100], in parallel; it fails with a message where x holds a NaN. With ALL_DTYPES: 13 inputs
// of 2 x 3, one per type, copied to 13 outputs. With NO_INPUTS: one output, 1 to 4. With ON_GPU:
// y = 2 * (x + w), four int32 with w = 1 to 4, by the kernels of the stand-in for a GPU's driver;
// with ON_OPENCL the same for OpenCL's, with ON_METAL for Metal. With TWO_SHAPES a second variant:
// y = x, of 4 elements.

#if defined(ON_OPENCL)
#define ON_GPU
#define ACCELERATOR edgert_opencl
#elif defined(ON_METAL)
#define ON_GPU
#define ACCELERATOR edgert_metal
#else
#define ACCELERATOR edgert_cuda
#endif
#if defined(ON_GPU)
#include "accelerator.h"
#endif
#include "plan.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace {

struct ParallelEnv {
  void* sync_handle;
  int32_t num_task;
};
using ParallelLambda = int (*)(int, ParallelEnv*, void*);

}  // namespace

extern "C" {

// As in TVM's objects: a variable that edgert's definition takes the place of.
extern __attribute__((weak)) int (*__TVMBackendParallelLaunch)(ParallelLambda, void*, int);
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t num_parts);

}  // extern "C"

namespace {

// The test replaces the feature, to see how a CPU that lacks one is refused.
const char* cpu_features[] = {nullptr, nullptr};

#if defined(ALL_DTYPES)

const int64_t shape[] = {2, 3};

// dtype code and bits of DLPack, number of edgesdk_dtype, for each; 64 bytes hold the largest.
#define PORT(name, dtype, bits) \
  { name, dtype, 2, shape, 6 * (bits) / 8 }
#define ALL_PORTS                                                                     \
  {                                                                                   \
    PORT("float32", EDGESDK_FLOAT32, 32), PORT("float64", EDGESDK_FLOAT64, 64),       \
        PORT("float16", EDGESDK_FLOAT16, 16), PORT("bfloat16", EDGESDK_BFLOAT16, 16), \
        PORT("int8", EDGESDK_INT8, 8), PORT("int16", EDGESDK_INT16, 16),              \
        PORT("int32", EDGESDK_INT32, 32), PORT("int64", EDGESDK_INT64, 64),           \
        PORT("uint8", EDGESDK_UINT8, 8), PORT("uint16", EDGESDK_UINT16, 16),          \
        PORT("uint32", EDGESDK_UINT32, 32), PORT("uint64", EDGESDK_UINT64, 64),       \
        PORT("bool", EDGESDK_BOOL, 8)                                                 \
  }
const edgert_port inputs[] = ALL_PORTS;
const edgert_port outputs[] = ALL_PORTS;

#define PAIR(index, code, bits)                                     \
  {kEdgertInput, code, bits, 2, index, 0, 6 * (bits) / 8, shape}, { \
    kEdgertOutput, code, bits, 2, index, 0, 6 * (bits) / 8, shape   \
  }
const edgert_tensor tensors[] = {
    PAIR(0, kDLFloat, 32), PAIR(1, kDLFloat, 64), PAIR(2, kDLFloat, 16), PAIR(3, kDLBfloat, 16),
    PAIR(4, kDLInt, 8),    PAIR(5, kDLInt, 16),   PAIR(6, kDLInt, 32),   PAIR(7, kDLInt, 64),
    PAIR(8, kDLUInt, 8),   PAIR(9, kDLUInt, 16),  PAIR(10, kDLUInt, 32), PAIR(11, kDLUInt, 64),
    PAIR(12, kDLBool, 8)};
const uint32_t arguments[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12,
                              13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25};
#define COPY(index) \
  { nullptr, "copy", "copy " #index, arguments + 2 * index, 2 }
const edgert_step steps[] = {COPY(0), COPY(1), COPY(2), COPY(3),  COPY(4),  COPY(5), COPY(6),
                             COPY(7), COPY(8), COPY(9), COPY(10), COPY(11), COPY(12)};
constexpr uint32_t kNumInputs = 13;
constexpr uint64_t kArenaBytes = 0;
alignas(64) const unsigned char weights[64] = {0};

#elif defined(NO_INPUTS)

const int64_t shape[] = {4};
const edgert_port inputs[] = {{}};
const edgert_port outputs[] = {{"count", EDGESDK_INT32, 1, shape, 16}};
const edgert_tensor tensors[] = {{kEdgertWeight, kDLInt, 32, 1, 0, 0, 16, shape},
                                 {kEdgertOutput, kDLInt, 32, 1, 0, 0, 16, shape}};
const uint32_t arguments[] = {0, 1};
const edgert_step steps[] = {{nullptr, "copy", "constant", arguments, 2}};
constexpr uint32_t kNumInputs = 0;
constexpr uint64_t kArenaBytes = 0;
alignas(64) const int32_t weights[16] = {1, 2, 3, 4};

#elif defined(ON_GPU)

const int64_t shape[] = {4};
const edgert_port inputs[] = {{"x", EDGESDK_INT32, 1, shape, 16}};
const edgert_port outputs[] = {{"y", EDGESDK_INT32, 1, shape, 16}};
const edgert_tensor tensors[] = {{kEdgertDeviceInput, kDLInt, 32, 1, 0, 0, 16, shape},
                                 {kEdgertDeviceWeight, kDLInt, 32, 1, 0, 0, 16, shape},
                                 {kEdgertDeviceArena, kDLInt, 32, 1, 0, 0, 16, shape},
                                 {kEdgertDeviceOutput, kDLInt, 32, 1, 0, 0, 16, shape}};
const uint32_t arguments[] = {0, 1, 2, 2, 3};
const edgert_launch launches[] = {{"add", {1, 1, 1}, {4, 1, 1}, 0},
                                  {"twice", {1, 1, 1}, {4, 1, 1}, 0}};
const edgert_step steps[] = {{nullptr, "add", "sum", arguments, 3, launches},
                             {nullptr, "twice", "double", arguments + 3, 2, launches + 1}};
#if defined(ON_OPENCL)
const char code[] = "__kernel void add(int* a) {}\n__kernel void twice(int* a) {}\n";
const edgert_image images[] = {
    {kEdgertOpenclSource, 0, reinterpret_cast<const uint8_t*>(code), sizeof(code)}};
#elif defined(ON_METAL)
const char code[] = "kernel void add(int* a) {}\nkernel void twice(int* a) {}\n";
const edgert_image images[] = {
    {kEdgertMetalSource, 0, reinterpret_cast<const uint8_t*>(code), sizeof(code)}};
#else
const char code[] = "fake cubin sm_90\nadd\ntwice\n";
const edgert_image images[] = {
    {kEdgertCubin, 90, reinterpret_cast<const uint8_t*>(code), sizeof(code)}};
#endif
constexpr uint32_t kNumInputs = 1;
constexpr uint64_t kArenaBytes = 0;
alignas(64) const int32_t weights[16] = {1, 2, 3, 4};

#else

constexpr int kCount = 1000;
constexpr uint64_t kBytes = kCount * sizeof(float);
constexpr uint64_t kRoom = (kBytes + 63) / 64 * 64;

struct Weights {
  float values[kCount];
  constexpr Weights() : values() {
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<float>(i);
  }
};
alignas(64) constexpr Weights weights;

float* Data(const TVMFFIAny& argument) {
  return static_cast<float*>(static_cast<DLTensor*>(argument.v_ptr)->data);
}

struct Loop {
  const float* x;
  const float* weight;
  float* out;
};

int MultiplyTask(int task, ParallelEnv* env, void* data) {
  const Loop* loop = static_cast<const Loop*>(data);
  int share = (kCount + env->num_task - 1) / env->num_task;
  int end = (task + 1) * share < kCount ? (task + 1) * share : kCount;
  for (int i = task * share; i < end; ++i) {
    if (loop->x[i] != loop->x[i]) {
      const char* parts[] = {"x holds ", nullptr, "a NaN"};
      TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 3);
      return -1;
    }
    float product = FACTOR * loop->weight[i] * loop->x[i];
    loop->out[i] = product > 0 ? product : 0;
  }
  return 0;
}

int Multiply(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny*) {
  if (num_args != 3) return -1;
  Loop loop{Data(args[0]), Data(args[1]), Data(args[2])};
  return __TVMBackendParallelLaunch(MultiplyTask, &loop, 0);
}

int AddOne(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny*) {
  if (num_args != 2) return -1;
  for (int i = 0; i < kCount; ++i) Data(args[1])[i] = Data(args[0])[i] + 1;
  return 0;
}

const int64_t shape[] = {10, 100};
const int64_t flat[] = {kCount};
const edgert_port inputs[] = {{"x=1:\"0", EDGESDK_FLOAT32, 2, shape, kBytes}};
const edgert_port outputs[] = {{"y", EDGESDK_FLOAT32, 2, shape, kBytes}};
const edgert_tensor tensors[] = {{kEdgertInput, kDLFloat, 32, 1, 0, 0, kBytes, flat},
                                 {kEdgertWeight, kDLFloat, 32, 1, 0, 0, kBytes, flat},
                                 {kEdgertArena, kDLFloat, 32, 1, 0, 0, kBytes, flat},
                                 {kEdgertArena, kDLFloat, 32, 2, 0, kRoom, kBytes, shape},
                                 {kEdgertOutput, kDLFloat, 32, 2, 0, 0, kBytes, shape}};
const uint32_t arguments[] = {0, 1, 2, 2, 3, 3, 4};
const edgert_step steps[] = {{Multiply, "multiply", "scale of x", arguments, 3},
                             {nullptr, "copy", "copy", arguments + 3, 2},
                             {AddOne, "add_one", "shift", arguments + 5, 2}};
constexpr uint32_t kNumInputs = 1;
constexpr uint64_t kArenaBytes = 2 * kRoom;

#if defined(TWO_SHAPES)
const int64_t four[] = {4};
const edgert_port few_inputs[] = {{"x=1:\"0", EDGESDK_FLOAT32, 1, four, 16}};
const edgert_port few_outputs[] = {{"y", EDGESDK_FLOAT32, 1, four, 16}};
// Its activations end behind those of the other shape.
const edgert_tensor few_tensors[] = {{kEdgertInput, kDLFloat, 32, 1, 0, 0, 16, four},
                                     {kEdgertArena, kDLFloat, 32, 1, 0, 4 * kRoom, 16, four},
                                     {kEdgertOutput, kDLFloat, 32, 1, 0, 0, 16, four}};
const uint32_t few_arguments[] = {0, 1, 1, 2};
const edgert_step few_steps[] = {{nullptr, "copy", "in", few_arguments, 2},
                                 {nullptr, "copy", "out", few_arguments + 2, 2}};
const edgert_plan others[] = {{TEXT(MODEL), "test", "0123456789abcdef", cpu_features, few_inputs,
                               few_outputs, few_tensors, few_steps, 1, 1, 3, 2,
                               reinterpret_cast<const uint8_t*>(&weights), sizeof(weights),
                               4 * kRoom + 64}};
#endif

#endif

}  // namespace

extern "C" {

const edgert_plan edgert_model_plan = {
    TEXT(MODEL),
    "test",
    "0123456789abcdef",
    cpu_features,
    inputs,
    outputs,
    tensors,
    steps,
    kNumInputs,
    sizeof(outputs) / sizeof(outputs[0]),
    sizeof(tensors) / sizeof(tensors[0]),
    sizeof(steps) / sizeof(steps[0]),
    reinterpret_cast<const uint8_t*>(&weights),
    sizeof(weights),
    kArenaBytes,
#if defined(ON_GPU)
    &ACCELERATOR,
    images,
    sizeof(images) / sizeof(images[0]),
    64,
#elif defined(TWO_SHAPES)
    nullptr,
    nullptr,
    0,
    0,
    others,
    1,
#endif
};

EDGESDK_API edgesdk_status JOIN(edgesdk_open_, MODEL)(uint32_t abi_version,
                                                      const edgesdk_options* options,
                                                      edgesdk_model** model) {
  return edgert_open(abi_version, options, model);
}

EDGESDK_API void JOIN(MODEL, _need_cpu_feature)(const char* name) { cpu_features[0] = name; }

}  // extern "C"
