// fake_cuda.h: a stand-in for NVIDIA's driver library, for machines without a GPU.
//
// libfake_cuda.so exports the cu* functions that edgert uses. Device memory is the host's, at
// addresses that the host cannot use; commands wait in their stream until somebody synchronises, so
// that a forgotten wait gives wrong values; kernels are functions of the test, registered by name.
// Time is counted, not measured: a kernel takes what its registration says, a copy 1000 ns.
//
// What a program may not do (unknown or freed handles, addresses outside of an allocation, calls
// that break a capture, no current context) gives the driver's error and is noted as a fault.
#ifndef EDGESDK_TESTS_FAKE_CUDA_H_
#define EDGESDK_TESTS_FAKE_CUDA_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

struct FakeLaunch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  const uint64_t* arguments;  // device addresses
  uint32_t num_arguments;
};

// Returns 0, or the CUresult that the GPU ends with.
using FakeKernel = int (*)(const FakeLaunch& launch);

struct FakeFunction {
  const char* name;
  FakeKernel kernel;
  uint32_t num_arguments;
  uint64_t duration_ns;
  int max_threads;   // of a block, with the function's registers
  int shared_bytes;  // static
};

// The GPU as the driver describes it.
struct FakeSettings {
  int num_devices;
  int capability;  // 10 * major + minor
  int integrated;
  int driver_version;  // 12040: CUDA 12.4
  int ptx_version;     // 84: PTX 8.4 is the newest that it reads
  int shared_per_block_optin;
  uint64_t memory_bytes;
};

// Back to the first state: default settings, no functions, no failures, no notes. Objects that are
// still alive stay so.
void fake_cuda_reset();
FakeSettings* fake_cuda_settings();
void fake_cuda_register(const FakeFunction& function);

// Lets the `nth` call (from 1) of `function` ("cuMemAlloc_v2") from now on return `result`.
void fake_cuda_fail(const char* function, int nth, int result);

// Calls of `function` since the last reset.
int fake_cuda_calls(const char* function);

// Where the host finds `bytes` bytes at a device address; nullptr (and a fault) if they are none.
void* fake_cuda_host(uint64_t address, uint64_t bytes);

// Memory, streams, events, modules, graphs, contexts that are alive.
int fake_cuda_live();

// What was done wrong since the last reset, one line each.
const char* fake_cuda_faults();

}  // extern "C"

#endif  // EDGESDK_TESTS_FAKE_CUDA_H_
