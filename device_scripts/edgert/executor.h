// executor.h: one open handle of a model: its memory, its bindings, and the walk over the plan.
#ifndef EDGERT_EXECUTOR_H_
#define EDGERT_EXECUTOR_H_

#include <cstddef>
#include <cstdint>

#include "edgesdk_model.h"
#include "plan.h"

namespace edgert {

// Threads that parallel loops of the calling thread may use now; 0: no limit. Set by Executor::Run.
int CurrentMaxThreads();

class Executor {
 public:
  // Returns nullptr when memory is short. `num_threads` 0: all of the pool.
  static Executor* Create(const edgert_plan& plan, int num_threads);
  static void Destroy(Executor* executor);

  const edgert_plan& plan() const { return plan_; }
  const char* last_error() const { return error_; }

  edgesdk_status SetInput(int32_t index, const void* data, size_t size_bytes);
  edgesdk_status SetOutput(int32_t index, void* data, size_t size_bytes);
  edgesdk_status GetOutput(int32_t index, const void** data, size_t* size_bytes);
  edgesdk_status Run();

  void SetProfiling(bool enabled);
  edgesdk_status LayerInfo(int32_t index, edgesdk_layer_info* info);
  edgesdk_memory_info Memory() const;
  int NumThreads() const;

  edgesdk_status Fail(edgesdk_status status, const char* format, ...)
      __attribute__((format(printf, 3, 4)));

 private:
  struct Port {
    void* caller;  // what the caller bound, nullptr: nothing, or an input of no bytes
    void* own;     // memory of the handle: outputs always, inputs when the caller's is unaligned
    bool copy;     // the caller's memory is unaligned: copy on each run
    bool bound;    // inputs only: the caller has set it
  };
  struct StepTime {
    uint64_t last_ns;
    uint64_t total_ns;
  };

  explicit Executor(const edgert_plan& plan) : plan_(plan) {}
  ~Executor() = default;
  bool Allocate();
  void Bind(edgert_storage storage, uint32_t index, void* base);
  edgesdk_status RunStep(uint32_t index);

  const edgert_plan& plan_;
  int max_threads_ = 0;
  bool profiling_ = false;
  unsigned char* arena_ = nullptr;
  DLTensor* tensors_ = nullptr;         // plan_.num_tensors
  TVMFFIAny* arguments_ = nullptr;      // all steps' arguments, one after the other
  uint32_t* first_argument_ = nullptr;  // per step
  Port* inputs_ = nullptr;
  Port* outputs_ = nullptr;
  StepTime* times_ = nullptr;
  size_t io_bytes_ = 0;
  char error_[1280] = {0};
};

}  // namespace edgert

#endif  // EDGERT_EXECUTOR_H_
