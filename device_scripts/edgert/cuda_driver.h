// cuda_driver.h: what edgert uses of NVIDIA's driver library, found when it is needed.
//
// Types, numbers and prototypes are those of the CUDA driver API reference manual
// (https://docs.nvidia.com/cuda/cuda-driver-api/), declared here so that neither CUDA's headers nor
// its libraries are needed to build. A function's name in the library may end in _v2 where its
// prototype changed once: those are the names that CUDA's own header gives programs of today.
#ifndef EDGERT_CUDA_DRIVER_H_
#define EDGERT_CUDA_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

namespace edgert {
namespace cuda {

using Result = int;                        // CUresult
using Device = int;                        // CUdevice
using DevicePointer = unsigned long long;  // CUdeviceptr: 64 bits on every system of today
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Graph = struct CUgraph_st*;
using GraphExec = struct CUgraphExec_st*;

// CUresult
constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kNoDevice = 100;
constexpr Result kNoBinaryForGpu = 209;
constexpr Result kUnsupportedPtxVersion = 222;
constexpr Result kSystemDriverMismatch = 803;

// CUdevice_attribute
constexpr int kMaxThreadsPerBlock = 1;
constexpr int kMaxBlockDimX = 2;  // Y and Z follow
constexpr int kMaxGridDimX = 5;   // Y and Z follow
constexpr int kIntegrated = 18;
constexpr int kCanMapHostMemory = 19;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryPerBlockOptin = 97;

// CUfunction_attribute
constexpr int kFunctionMaxThreadsPerBlock = 0;
constexpr int kFunctionSharedSizeBytes = 1;
constexpr int kFunctionMaxDynamicSharedSizeBytes = 8;

// CUjit_option
constexpr int kJitErrorLogBuffer = 5;
constexpr int kJitErrorLogBufferSizeBytes = 6;

// CUpointer_attribute and CUmemorytype
constexpr int kPointerMemoryType = 2;
constexpr unsigned kMemoryTypeHost = 1;

constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
constexpr unsigned kMemHostAllocPortable = 1;   // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kMemHostAllocDeviceMap = 2;  // CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kCaptureThreadLocal = 1;          // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr unsigned kEventRecordExternal = 1;    // CU_EVENT_RECORD_EXTERNAL

constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;

// CUlaunchAttribute and CUlaunchConfig
struct LaunchAttribute {
  int id;
  int padding;
  union {
    int programmatic_stream_serialization_allowed;
    char room[64];
  } value;
};
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchAttribute) == 72, "as in the driver's ABI");

// EDGERT_CUDA_FUNCTIONS(NEEDED, OPTIONAL): each is (member, name in the library, parameters).
// OPTIONAL ones came with later drivers; the member is nullptr where they lack.
#define EDGERT_CUDA_FUNCTIONS(NEEDED, OPTIONAL)                                                   \
  NEEDED(Init, "cuInit", (unsigned))                                                              \
  NEEDED(DriverGetVersion, "cuDriverGetVersion", (int*))                                          \
  NEEDED(GetErrorName, "cuGetErrorName", (Result, const char**))                                  \
  NEEDED(GetErrorString, "cuGetErrorString", (Result, const char**))                              \
  NEEDED(DeviceGetCount, "cuDeviceGetCount", (int*))                                              \
  NEEDED(DeviceGet, "cuDeviceGet", (Device*, int))                                                \
  NEEDED(DeviceGetName, "cuDeviceGetName", (char*, int, Device))                                  \
  NEEDED(DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, Device))                         \
  NEEDED(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, Device))                                \
  NEEDED(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (Context*, Device))                  \
  NEEDED(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", (Device))                          \
  NEEDED(CtxPushCurrent, "cuCtxPushCurrent_v2", (Context))                                        \
  NEEDED(CtxPopCurrent, "cuCtxPopCurrent_v2", (Context*))                                         \
  NEEDED(ModuleLoadDataEx, "cuModuleLoadDataEx", (Module*, const void*, unsigned, int*, void**))  \
  NEEDED(ModuleUnload, "cuModuleUnload", (Module))                                                \
  NEEDED(ModuleGetFunction, "cuModuleGetFunction", (Function*, Module, const char*))              \
  NEEDED(FuncGetAttribute, "cuFuncGetAttribute", (int*, int, Function))                           \
  NEEDED(FuncSetAttribute, "cuFuncSetAttribute", (Function, int, int))                            \
  NEEDED(MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                                       \
  NEEDED(MemAlloc, "cuMemAlloc_v2", (DevicePointer*, size_t))                                     \
  NEEDED(MemFree, "cuMemFree_v2", (DevicePointer))                                                \
  NEEDED(MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))                              \
  NEEDED(MemFreeHost, "cuMemFreeHost", (void*))                                                   \
  NEEDED(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                 \
         (DevicePointer*, void*, unsigned))                                                       \
  NEEDED(PointerGetAttribute, "cuPointerGetAttribute", (void*, int, DevicePointer))               \
  NEEDED(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (DevicePointer, const void*, size_t, Stream))   \
  NEEDED(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, DevicePointer, size_t, Stream))         \
  NEEDED(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (DevicePointer, DevicePointer, size_t, Stream)) \
  NEEDED(StreamCreate, "cuStreamCreate", (Stream*, unsigned))                                     \
  NEEDED(StreamDestroy, "cuStreamDestroy_v2", (Stream))                                           \
  NEEDED(StreamSynchronize, "cuStreamSynchronize", (Stream))                                      \
  NEEDED(EventCreate, "cuEventCreate", (Event*, unsigned))                                        \
  NEEDED(EventDestroy, "cuEventDestroy_v2", (Event))                                              \
  NEEDED(EventRecord, "cuEventRecord", (Event, Stream))                                           \
  NEEDED(EventElapsedTime, "cuEventElapsedTime", (float*, Event, Event))                          \
  NEEDED(LaunchKernel, "cuLaunchKernel",                                                          \
         (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, \
          void**, void**))                                                                        \
  OPTIONAL(LaunchKernelEx, "cuLaunchKernelEx", (const LaunchConfig*, Function, void**, void**))   \
  OPTIONAL(FuncLoad, "cuFuncLoad", (Function))                                                    \
  OPTIONAL(EventRecordWithFlags, "cuEventRecordWithFlags", (Event, Stream, unsigned))             \
  OPTIONAL(StreamBeginCapture, "cuStreamBeginCapture_v2", (Stream, int))                          \
  OPTIONAL(StreamEndCapture, "cuStreamEndCapture", (Stream, Graph*))                              \
  OPTIONAL(GraphInstantiate, "cuGraphInstantiate", (GraphExec*, Graph, void*, char*, size_t))     \
  OPTIONAL(GraphInstantiateWithFlags, "cuGraphInstantiateWithFlags",                              \
           (GraphExec*, Graph, unsigned long long))                                               \
  OPTIONAL(GraphLaunch, "cuGraphLaunch", (GraphExec, Stream))                                     \
  OPTIONAL(GraphExecDestroy, "cuGraphExecDestroy", (GraphExec))                                   \
  OPTIONAL(GraphDestroy, "cuGraphDestroy", (Graph))

#if defined(_WIN32)
#define EDGERT_CUDA_CALL __stdcall
#else
#define EDGERT_CUDA_CALL
#endif

struct Driver {
#define EDGERT_CUDA_MEMBER(member, name, parameters) Result(EDGERT_CUDA_CALL* member) parameters;
  EDGERT_CUDA_FUNCTIONS(EDGERT_CUDA_MEMBER, EDGERT_CUDA_MEMBER)
#undef EDGERT_CUDA_MEMBER
};

// Fills `driver` from the library that EDGESDK_CUDA_LIBRARY names, or else from where drivers are
// installed. The library stays loaded. Returns false with one line of reason.
bool LoadDriver(Driver* driver, char* error, size_t error_bytes);

}  // namespace cuda
}  // namespace edgert

#endif  // EDGERT_CUDA_DRIVER_H_
