// fake_opencl.h: a stand-in for a vendor's OpenCL library, for machines without a GPU.
//
// libfake_opencl.so exports the cl* functions that edgert uses. Commands wait in their queue until
// somebody waits for them, so that a forgotten wait gives wrong values; kernels are functions of
// the test, registered by name; a program's source names them as OpenCL C does ("__kernel void
// NAME("). The host's view of a buffer is a copy, made when it is mapped and written back when it
// is unmapped, so that a forgotten one gives wrong values. Time is counted, not measured.
//
// What a program may not do (unknown or released objects, a kernel on a mapped buffer, copies that
// overlap or reach beyond a buffer) gives an error and is noted as a fault.
#ifndef EDGESDK_TESTS_FAKE_OPENCL_H_
#define EDGESDK_TESTS_FAKE_OPENCL_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

struct FakeClLaunch {
  size_t global[3];
  size_t local[3];
  void* arguments[8];  // nullptr: a buffer that is none
  size_t bytes[8];
};

// Returns 0, or the error that the queue ends with.
using FakeClFunction = int (*)(const FakeClLaunch& launch);

struct FakeClKernel {
  const char* name;
  FakeClFunction function;
  uint32_t num_arguments;
  uint64_t duration_ns;
  size_t max_group;      // with the kernel's registers
  uint64_t local_bytes;  // of local memory
};

// The devices as the driver describes them.
struct FakeClSettings {
  int num_cpus;  // "Paper CPU 0", ...: listed before the GPUs
  int num_gpus;  // "Paper GPU 0", ...
  uint32_t unified;
  uint32_t has_compiler;
  uint32_t alignment_bits;
  uint64_t max_allocation;
  uint64_t memory_bytes;
  uint64_t local_bytes;
  const char* driver_version;
  const char* extensions;
  bool moves_views;   // each mapping is at another address
  bool no_platforms;  // a loader without a driver
};

// Back to the first state: default settings, no kernels, no failures, no notes.
void fake_cl_reset();
FakeClSettings* fake_cl_settings();
void fake_cl_register(const FakeClKernel& kernel);

// Lets the `nth` call (from 1) of `function` ("clCreateBuffer") from now on fail with `result`.
void fake_cl_fail(const char* function, int nth, int result);

// Calls of `function` since the last reset.
int fake_cl_calls(const char* function);

// Objects that are alive: contexts, queues, buffers, programs, kernels, events.
int fake_cl_live();

// What was done wrong since the last reset, one line each.
const char* fake_cl_faults();

}  // extern "C"

#endif  // EDGESDK_TESTS_FAKE_OPENCL_H_
