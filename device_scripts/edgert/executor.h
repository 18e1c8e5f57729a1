// executor.h: one open handle of a model: its memory, its bindings, and the walk over the plan.
#ifndef EDGERT_EXECUTOR_H_
#define EDGERT_EXECUTOR_H_

#include <cstddef>
#include <cstdint>

#include "accelerator.h"
#include "edgesdk_model.h"
#include "plan.h"

namespace edgert {

// Threads that parallel loops of the calling thread may use now; 0: no limit. Set by Executor::Run.
int CurrentMaxThreads();

class Executor {
 public:
  // `num_threads` 0: all of the pool. `device` is for the plan's accelerator, if it has one, which
  // writes the reason of its failure; a plain lack of memory has no text. `arena` is memory for the
  // activations on the CPU that outlives the executor, and that others which do not run at the same
  // time may use, too; nullptr: it has its own.
  static edgesdk_status Create(const edgert_plan& plan, int num_threads,
                               const DeviceOptions& device, Executor** executor, char* error,
                               size_t error_bytes, unsigned char* arena = nullptr);
  static void Destroy(Executor* executor);

  const edgert_plan& plan() const { return plan_; }
  const char* last_error() const { return error_; }

  edgesdk_status SetInput(int32_t index, const void* data, size_t size_bytes);
  edgesdk_status OwnInput(int32_t index, void** data, size_t* size_bytes);
  edgesdk_status SetOutput(int32_t index, void* data, size_t size_bytes);
  edgesdk_status GetOutput(int32_t index, const void** data, size_t* size_bytes);
  edgesdk_status Run();

  // `storage` is kEdgertInput or kEdgertOutput.
  edgesdk_status BindDevice(edgert_storage storage, int32_t index, void* data, size_t size_bytes);
  edgesdk_status DeviceAddress(edgert_storage storage, int32_t index, void** data,
                               size_t* size_bytes);
  edgesdk_status DeviceInfo(edgesdk_device_info* info);

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

  explicit Executor(const edgert_plan& plan) : plan_(plan) {}
  ~Executor() = default;
  bool Allocate();
  bool AllocatePorts();
  void* AllocateBlock(edgert_storage storage, uint32_t index, uint64_t bytes);
  void Bind(edgert_storage storage, uint32_t index, void* base);
  edgesdk_status RunSteps();
  edgesdk_status RunStep(uint32_t index);
  edgesdk_status CheckIndex(edgert_storage storage, int32_t index);
  edgesdk_status DeviceFailed(edgesdk_status status);

  const edgert_plan& plan_;
  // With an accelerator all memory that it copies from and to is the device's to allocate; what the
  // caller binds is copied on each run.
  DeviceRun* device_ = nullptr;
  int max_threads_ = 0;
  bool profiling_ = false;
  unsigned char* arena_ = nullptr;
  bool owns_arena_ = true;
  DLTensor* tensors_ = nullptr;         // plan_.num_tensors
  TVMFFIAny* arguments_ = nullptr;      // all steps' arguments, one after the other
  uint32_t* first_argument_ = nullptr;  // per step
  Port* inputs_ = nullptr;
  Port* outputs_ = nullptr;
  StepTime* times_ = nullptr;
  size_t io_bytes_ = 0;
  char error_[kErrorBytes] = {0};
};

}  // namespace edgert

#endif  // EDGERT_EXECUTOR_H_
