// metal_program.h: what all handles of a plan on one GPU share: device, code and weights.
#ifndef EDGERT_METAL_PROGRAM_H_
#define EDGERT_METAL_PROGRAM_H_

#include <stddef.h>
#include <stdint.h>

#include "accelerator_common.h"
#include "edgesdk_model.h"
#include "metal_driver.h"
#include "plan.h"

namespace edgert {
namespace metal {

struct Program {
  const edgert_plan* plan;
  Program* next;
  int handles;

  Object device;  // MTLDevice
  char name[128];
  Uint max_buffer;
  Object library;     // MTLLibrary, only while the program is opened
  Object* pipelines;  // MTLComputePipelineState, per step; nullptr for steps that launch nothing
  uint64_t load_ns;   // of the code: compiling it
  Object weights;     // MTLBuffer
  uint64_t weights_bytes;
};

// The driver, once a program was opened.
const Driver& TheDriver();

// Returns the program of the plan on the GPU, or on that of the caller's queue, opened by the first
// call, or writes one line of reason.
edgesdk_status AcquireProgram(const edgert_plan& plan, const DeviceOptions& options,
                              Program** program, char* error, size_t error_bytes);

// Gives it back; the last handle's call frees it.
void ReleaseProgram(Program* program);

// Whether this process was forked from one that had used Metal, which cannot be used here then.
// `error` gets the reason.
bool IsForked(char* error, size_t error_bytes);

// Makes a buffer that CPU and GPU see, a copy of `content` if there is one.
edgesdk_status MakeBuffer(const Program& program, uint64_t bytes, const void* content,
                          const char* what, Object* buffer, const Report& report);

}  // namespace metal
}  // namespace edgert

#endif  // EDGERT_METAL_PROGRAM_H_
