// opencl_driver.h: what edgert uses of an OpenCL library, found when it is needed.
//
// Types, numbers and prototypes are those of the OpenCL API specification, version 1.2
// (https://registry.khronos.org/OpenCL/), declared here so that neither Khronos' headers nor a
// library is needed to build. A later OpenCL has all of them.
#ifndef EDGERT_OPENCL_DRIVER_H_
#define EDGERT_OPENCL_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

namespace edgert {
namespace opencl {

using Result = int32_t;     // cl_int
using Uint = uint32_t;      // cl_uint, cl_bool, and all types of what is asked for
using Bitfield = uint64_t;  // cl_bitfield
using Platform = struct _cl_platform_id*;
using Device = struct _cl_device_id*;
using Context = struct _cl_context*;
using Queue = struct _cl_command_queue*;
using Memory = struct _cl_mem*;
using Code = struct _cl_program*;
using Kernel = struct _cl_kernel*;
using Event = struct _cl_event*;

// Errors.
constexpr Result kSuccess = 0;
constexpr Result kDeviceNotFound = -1;
constexpr Result kMemObjectAllocationFailure = -4;
constexpr Result kOutOfResources = -5;
constexpr Result kOutOfHostMemory = -6;
constexpr Result kMapFailure = -12;
constexpr Result kInvalidBufferSize = -61;
constexpr Result kPlatformNotFound = -1001;  // cl_khr_icd: the loader knows no driver

// cl_device_type
constexpr Bitfield kDeviceTypeGpu = 1 << 2;
constexpr Bitfield kDeviceTypeAll = 0xFFFFFFFF;

// cl_platform_info
constexpr Uint kPlatformVersion = 0x0901;
constexpr Uint kPlatformName = 0x0902;

// cl_device_info
constexpr Uint kDeviceType = 0x1000;
constexpr Uint kDeviceMaxWorkGroupSize = 0x1004;
constexpr Uint kDeviceMaxWorkItemSizes = 0x1005;
constexpr Uint kDeviceMaxMemAllocSize = 0x1010;
constexpr Uint kDeviceMemBaseAddrAlign = 0x1019;
constexpr Uint kDeviceGlobalMemSize = 0x101F;
constexpr Uint kDeviceLocalMemSize = 0x1023;
constexpr Uint kDeviceAvailable = 0x1027;
constexpr Uint kDeviceCompilerAvailable = 0x1028;
constexpr Uint kDeviceName = 0x102B;
constexpr Uint kDriverVersion = 0x102D;
constexpr Uint kDeviceVersion = 0x102F;
constexpr Uint kDeviceExtensions = 0x1030;
constexpr Uint kDevicePlatform = 0x1031;
constexpr Uint kDeviceHostUnifiedMemory = 0x1035;

// cl_mem_flags, cl_mem_info, cl_buffer_create_type, cl_map_flags
constexpr Bitfield kMemReadWrite = 1 << 0;
constexpr Bitfield kMemReadOnly = 1 << 2;
constexpr Bitfield kMemAllocHostPtr = 1 << 4;
constexpr Uint kMemSize = 0x1102;
constexpr Uint kMemContext = 0x1106;
constexpr Uint kBufferCreateTypeRegion = 0x1220;
constexpr Bitfield kMapRead = 1 << 0;
constexpr Bitfield kMapWrite = 1 << 1;

// cl_command_queue_properties, cl_command_queue_info
constexpr Bitfield kQueueOutOfOrder = 1 << 0;
constexpr Bitfield kQueueProfiling = 1 << 1;
constexpr Uint kQueueContext = 0x1090;
constexpr Uint kQueueDevice = 0x1091;
constexpr Uint kQueueProperties = 0x1093;

// cl_program_info, cl_program_build_info, cl_kernel_work_group_info, cl_profiling_info
constexpr Uint kProgramBinarySizes = 0x1165;
constexpr Uint kProgramBinaries = 0x1166;
constexpr Uint kProgramBuildLog = 0x1183;
constexpr Uint kKernelWorkGroupSize = 0x11B0;
constexpr Uint kKernelLocalMemSize = 0x11B2;
constexpr Uint kProfilingStart = 0x1282;
constexpr Uint kProfilingEnd = 0x1283;

struct BufferRegion {
  size_t origin;
  size_t size;
};

#if defined(_WIN32)
#define EDGERT_OPENCL_CALL __stdcall
#else
#define EDGERT_OPENCL_CALL
#endif

using Notify = void(EDGERT_OPENCL_CALL*)(const char*, const void*, size_t, void*);
using BuildNotify = void(EDGERT_OPENCL_CALL*)(Code, void*);

// EDGERT_OPENCL_FUNCTIONS(F): each is (result, member, parameters); the name in the library is the
// member's with "cl" before it.
#define EDGERT_OPENCL_FUNCTIONS(F)                                                          \
  F(Result, GetPlatformIDs, (Uint, Platform*, Uint*))                                       \
  F(Result, GetPlatformInfo, (Platform, Uint, size_t, void*, size_t*))                      \
  F(Result, GetDeviceIDs, (Platform, Bitfield, Uint, Device*, Uint*))                       \
  F(Result, GetDeviceInfo, (Device, Uint, size_t, void*, size_t*))                          \
  F(Context, CreateContext, (const intptr_t*, Uint, const Device*, Notify, void*, Result*)) \
  F(Result, RetainContext, (Context))                                                       \
  F(Result, ReleaseContext, (Context))                                                      \
  F(Queue, CreateCommandQueue, (Context, Device, Bitfield, Result*))                        \
  F(Result, RetainCommandQueue, (Queue))                                                    \
  F(Result, ReleaseCommandQueue, (Queue))                                                   \
  F(Result, GetCommandQueueInfo, (Queue, Uint, size_t, void*, size_t*))                     \
  F(Memory, CreateBuffer, (Context, Bitfield, size_t, void*, Result*))                      \
  F(Memory, CreateSubBuffer, (Memory, Bitfield, Uint, const void*, Result*))                \
  F(Result, ReleaseMemObject, (Memory))                                                     \
  F(Result, GetMemObjectInfo, (Memory, Uint, size_t, void*, size_t*))                       \
  F(Code, CreateProgramWithSource, (Context, Uint, const char**, const size_t*, Result*))   \
  F(Code, CreateProgramWithBinary,                                                          \
    (Context, Uint, const Device*, const size_t*, const unsigned char**, Result*, Result*)) \
  F(Result, BuildProgram, (Code, Uint, const Device*, const char*, BuildNotify, void*))     \
  F(Result, ReleaseProgram, (Code))                                                         \
  F(Result, GetProgramInfo, (Code, Uint, size_t, void*, size_t*))                           \
  F(Result, GetProgramBuildInfo, (Code, Device, Uint, size_t, void*, size_t*))              \
  F(Kernel, CreateKernel, (Code, const char*, Result*))                                     \
  F(Result, ReleaseKernel, (Kernel))                                                        \
  F(Result, SetKernelArg, (Kernel, Uint, size_t, const void*))                              \
  F(Result, GetKernelWorkGroupInfo, (Kernel, Device, Uint, size_t, void*, size_t*))         \
  F(Result, EnqueueNDRangeKernel,                                                           \
    (Queue, Kernel, Uint, const size_t*, const size_t*, const size_t*, Uint, const Event*,  \
     Event*))                                                                               \
  F(Result, EnqueueReadBuffer,                                                              \
    (Queue, Memory, Uint, size_t, size_t, void*, Uint, const Event*, Event*))               \
  F(Result, EnqueueWriteBuffer,                                                             \
    (Queue, Memory, Uint, size_t, size_t, const void*, Uint, const Event*, Event*))         \
  F(Result, EnqueueCopyBuffer,                                                              \
    (Queue, Memory, Memory, size_t, size_t, size_t, Uint, const Event*, Event*))            \
  F(void*, EnqueueMapBuffer,                                                                \
    (Queue, Memory, Uint, Bitfield, size_t, size_t, Uint, const Event*, Event*, Result*))   \
  F(Result, EnqueueUnmapMemObject, (Queue, Memory, void*, Uint, const Event*, Event*))      \
  F(Result, Flush, (Queue))                                                                 \
  F(Result, Finish, (Queue))                                                                \
  F(Result, ReleaseEvent, (Event))                                                          \
  F(Result, GetEventProfilingInfo, (Event, Uint, size_t, void*, size_t*))

struct Driver {
#define EDGERT_OPENCL_MEMBER(result, member, parameters) \
  result(EDGERT_OPENCL_CALL* member) parameters;
  EDGERT_OPENCL_FUNCTIONS(EDGERT_OPENCL_MEMBER)
#undef EDGERT_OPENCL_MEMBER
};

// Fills `driver` from the library that EDGESDK_OPENCL_LIBRARY names, or else from the first of
// those that systems and vendors install that knows a device. It stays loaded. Returns false with a
// reason, which lists what was tried.
bool LoadDriver(Driver* driver, char* error, size_t error_bytes);

// "out of resources (OpenCL error -5)".
void Describe(Result result, char* text, size_t bytes);

// Whether an error says that memory is short.
bool IsOutOfMemory(Result result);

}  // namespace opencl
}  // namespace edgert

#endif  // EDGERT_OPENCL_DRIVER_H_
