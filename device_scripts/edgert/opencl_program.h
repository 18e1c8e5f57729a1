// opencl_program.h: what all handles of a plan on one device share: context, code and weights.
#ifndef EDGERT_OPENCL_PROGRAM_H_
#define EDGERT_OPENCL_PROGRAM_H_

#include <stddef.h>
#include <stdint.h>

#include "accelerator.h"
#include "edgesdk_model.h"
#include "opencl_driver.h"
#include "plan.h"

namespace edgert {
namespace opencl {

struct Program {
  const edgert_plan* plan;
  Program* next;
  int handles;

  int index;  // in the order of `AcquireProgram`
  Device device;
  Context context;
  Context callers;  // the context of the caller's queue, or nullptr: `context` is our own
  char name[128];
  char versions[240];  // "OpenCL 3.0 PoCL ..., driver 3.1"
  bool unified;        // host and device share one memory
  size_t max_items[3];
  uint64_t max_allocation;
  uint64_t local_bytes;
  uint64_t alignment;  // of a part of a buffer

  Code code;
  uint64_t load_ns;  // of the code: reading or building it
  bool from_cache;
  char cache[1100];  // the file that holds the built code, or why there is none
  Memory weights;
  uint64_t weights_bytes;
};

// The driver, once a program was opened.
const Driver& TheDriver();

// Returns the program of the plan on the chosen device, opened by the first call, or writes one
// line of reason. Devices are numbered with all GPUs first, then the others, in the driver's order;
// without a number EDGESDK_OPENCL_DEVICE may hold a part of a name. A queue of the caller's decides
// by itself.
edgesdk_status AcquireProgram(const edgert_plan& plan, const DeviceOptions& options,
                              Program** program, char* error, size_t error_bytes);

// Gives it back; the last handle's call frees it.
void ReleaseProgram(Program* program);

// Whether this process was forked from one that had used OpenCL, whose driver's threads and locks
// are not here. `error` gets the reason.
bool IsForked(char* error, size_t error_bytes);

// A new kernel for a step that launches one, which belongs to the caller, checked against the
// device's limits.
edgesdk_status MakeKernel(const Program& program, const edgert_step& step, Kernel* kernel,
                          char* error, size_t error_bytes);

}  // namespace opencl
}  // namespace edgert

#endif  // EDGERT_OPENCL_PROGRAM_H_
