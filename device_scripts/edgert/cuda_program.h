// cuda_program.h: what all handles of a plan on one GPU share: context, code and weights.
#ifndef EDGERT_CUDA_PROGRAM_H_
#define EDGERT_CUDA_PROGRAM_H_

#include <stddef.h>
#include <stdint.h>

#include "cuda_driver.h"
#include "edgesdk_model.h"
#include "plan.h"

namespace edgert {
namespace cuda {

struct Program {
  const edgert_plan* plan;
  Program* next;
  int handles;

  int index;
  Device device;
  Context context;  // the primary one: the same that the CUDA runtime of the program uses
  char name[256];
  int driver_version;
  int architecture;  // 10 * major + minor of the compute capability
  bool unified;      // CPU and GPU share one memory, and host memory can be mapped

  const edgert_image* image;
  Module module;
  Function* functions;  // one per step; nullptr for steps that launch nothing
  DevicePointer weights;
  uint64_t weights_bytes;
};

// The driver, once a program was opened.
const Driver& TheDriver();

// "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
void Describe(Result result, char* text, size_t bytes);

// Returns the program of the plan on GPU number `index`, opened by the first call, or writes one
// line of reason.
edgesdk_status AcquireProgram(const edgert_plan& plan, int index, Program** program, char* error,
                              size_t error_bytes);

// Gives it back; the last handle's call frees it.
void ReleaseProgram(Program* program);

// Makes the program's context the thread's current one, and the caller's again at the end.
class CurrentContext {
 public:
  explicit CurrentContext(const Program& program);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  Result result() const { return result_; }

 private:
  Result result_;
};

}  // namespace cuda
}  // namespace edgert

#endif  // EDGERT_CUDA_PROGRAM_H_
