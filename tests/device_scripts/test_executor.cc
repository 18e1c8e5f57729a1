// The executor on plans that models rarely have: shared storage, no bytes, no memory, odd failures.

#include <stdint.h>
#include <string.h>

#include <string>
#include <vector>

#include "check.h"
#include "executor.h"
#include "kernel_error.h"
#include "plan.h"
#include "platform.h"
#include "test_plan.h"

extern "C" {
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text);
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t num_parts);
extern void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void*);
}

namespace {

using edgert::Executor;

Executor* Create(const edgert_plan& plan, edgesdk_status wanted) {
  Executor* executor = nullptr;
  char error[edgert::kErrorBytes] = "";
  CHECK_EQ(Executor::Create(plan, 0, {}, &executor, error, sizeof(error)), wanted);
  CHECK_TEXT(error, "");
  return executor;
}

class Open {
 public:
  explicit Open(const edgert_plan& plan) : executor_(Create(plan, EDGESDK_OK)) {
    CHECK(executor_ != nullptr);
  }
  ~Open() { Executor::Destroy(executor_); }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
  Executor* operator->() { return executor_; }

 private:
  Executor* executor_;
};

const DLTensor* Tensor(const TVMFFIAny& argument) {
  return static_cast<const DLTensor*>(argument.v_ptr);
}

// out[i] = a[i] + b[i] over int32, and a look at what a kernel is handed.
int Add(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  if (self != nullptr || num_args != 3 || result == nullptr) return -1;
  int64_t count = 1;
  for (int i = 0; i < 3; ++i) {
    const DLTensor* tensor = Tensor(args[i]);
    if (args[i].type_index != kTVMFFIDLTensorPtr || tensor->device.device_type != kDLCPU ||
        tensor->dtype.code != kDLInt || tensor->dtype.bits != 32 || tensor->dtype.lanes != 1 ||
        tensor->strides != nullptr || tensor->byte_offset != 0 ||
        reinterpret_cast<uintptr_t>(tensor->data) % 64 != 0) {
      return -2;
    }
  }
  for (int32_t i = 0; i < Tensor(args[2])->ndim; ++i) count *= Tensor(args[2])->shape[i];
  for (int64_t i = 0; i < count; ++i) {
    static_cast<int32_t*>(Tensor(args[2])->data)[i] =
        static_cast<int32_t*>(Tensor(args[0])->data)[i] +
        static_cast<int32_t*>(Tensor(args[1])->data)[i];
  }
  return 0;
}

TEST(tensors_may_be_views_of_one_storage) {
  TestPlan test;
  test.inputs = {{"x", EDGESDK_INT32, 1, kFour, 16}};
  test.outputs = {{"y", EDGESDK_INT32, 2, kTwoByTwo, 16}};
  int32_t second[] = {100, 200, 300, 400};
  memcpy(test.weights + 64, second, sizeof(second));
  test.arena_bytes = 192;
  test.tensors = {
      {kEdgertInput, kDLInt, 32, 1, 0, 0, 16, kFour},
      {kEdgertInput, kDLInt, 32, 2, 0, 0, 16, kTwoByTwo},    // the input, reshaped
      {kEdgertWeight, kDLInt, 32, 2, 0, 64, 16, kTwoByTwo},  // the second constant
      {kEdgertArena, kDLInt, 32, 1, 0, 128, 16, kFour},
      {kEdgertArena, kDLInt, 32, 2, 0, 128, 16, kTwoByTwo},
      {kEdgertOutput, kDLInt, 32, 2, 0, 0, 16, kTwoByTwo},
  };
  test.Step(Add, "double", {0, 0, 3});
  test.Step(Add, "add", {4, 2, 5});
  Open model(test.Finish());
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, 16), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  const void* data = nullptr;
  CHECK_EQ(model->GetOutput(0, &data, nullptr), EDGESDK_OK);
  for (int i = 0; i < 4; ++i) CHECK_EQ(static_cast<const int32_t*>(data)[i], 2 * x[i] + second[i]);
}

TEST(an_input_may_be_an_output_and_a_constant_too) {
  TestPlan test;
  test.inputs = {{"x", EDGESDK_INT32, 1, kFour, 16}};
  test.outputs = {{"x", EDGESDK_INT32, 1, kFour, 16}, {"c", EDGESDK_INT32, 1, kFour, 16}};
  test.weights[0] = 42;
  test.tensors = {{kEdgertInput, kDLInt, 32, 1, 0, 0, 16, kFour},
                  {kEdgertOutput, kDLInt, 32, 1, 0, 0, 16, kFour},
                  {kEdgertWeight, kDLInt, 32, 1, 0, 0, 16, kFour},
                  {kEdgertOutput, kDLInt, 32, 1, 1, 0, 16, kFour}};
  test.Step(nullptr, "copy", {0, 1});
  test.Step(nullptr, "copy", {2, 3});
  Open model(test.Finish());
  int32_t x[] = {7, 8, 9, 10};
  CHECK_EQ(model->SetInput(0, x, 16), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  const void* data = nullptr;
  CHECK_EQ(model->GetOutput(0, &data, nullptr), EDGESDK_OK);
  CHECK_EQ(static_cast<const int32_t*>(data)[3], 10);
  CHECK_EQ(model->GetOutput(1, &data, nullptr), EDGESDK_OK);
  CHECK_EQ(static_cast<const int32_t*>(data)[0], 42);
}

TEST(tensors_of_no_bytes) {
  TestPlan test;
  test.inputs = {{"x", EDGESDK_INT32, 2, kNone, 0}};
  test.outputs = {{"y", EDGESDK_INT32, 2, kNone, 0}};
  test.tensors = {{kEdgertInput, kDLInt, 32, 2, 0, 0, 0, kNone},
                  {kEdgertOutput, kDLInt, 32, 2, 0, 0, 0, kNone}};
  test.Step(Add, "add", {0, 0, 1});
  test.Step(nullptr, "copy", {0, 1});
  Open model(test.Finish());
  CHECK_EQ(model->Run(), EDGESDK_ERROR_INPUT_MISSING);
  CHECK_EQ(model->SetInput(0, nullptr, 4), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(model->SetInput(0, nullptr, 0), EDGESDK_OK);  // what an empty std::vector has
  CHECK_EQ(model->Run(), EDGESDK_OK);
  char odd[3];
  CHECK_EQ(model->SetInput(0, odd + 1, 0), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  const void* data = nullptr;
  size_t size_bytes = 1;
  CHECK_EQ(model->GetOutput(0, &data, &size_bytes), EDGESDK_OK);
  CHECK(data != nullptr);
  CHECK_EQ(size_bytes, 0u);
}

TEST(an_input_may_be_the_handles_own_memory) {
  TestPlan test;
  test.inputs = {{"x", EDGESDK_INT32, 1, kFour, 16}};
  test.outputs = {{"y", EDGESDK_INT32, 1, kFour, 16}};
  test.tensors = {{kEdgertInput, kDLInt, 32, 1, 0, 0, 16, kFour},
                  {kEdgertOutput, kDLInt, 32, 1, 0, 0, 16, kFour}};
  test.Step(Add, "double", {0, 0, 1});
  Open model(test.Finish());
  void* own = nullptr;
  size_t size_bytes = 0;
  CHECK_EQ(model->OwnInput(0, &own, &size_bytes), EDGESDK_OK);
  CHECK_EQ(size_bytes, 16u);
  CHECK_EQ(reinterpret_cast<uintptr_t>(own) % 64, 0u);
  int32_t* x = static_cast<int32_t*>(own);
  const void* data = nullptr;
  CHECK_EQ(model->GetOutput(0, &data, nullptr), EDGESDK_OK);
  for (int32_t first : {1, 2}) {
    for (int32_t i = 0; i < 4; ++i) x[i] = first + i;
    CHECK_EQ(model->Run(), EDGESDK_OK);
    for (int32_t i = 0; i < 4; ++i) CHECK_EQ(static_cast<const int32_t*>(data)[i], 2 * (first + i));
  }
  // The caller's memory, and back: an unaligned input is copied to the same place.
  unsigned char unaligned[17] = {0};
  unaligned[1] = 21;
  CHECK_EQ(model->SetInput(0, unaligned + 1, 16), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CHECK_EQ(static_cast<const int32_t*>(data)[0], 42);
  void* again = nullptr;
  CHECK_EQ(model->OwnInput(0, &again, nullptr), EDGESDK_OK);
  CHECK(again == own);
  x[0] = 4;
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CHECK_EQ(static_cast<const int32_t*>(data)[0], 8);
  CHECK_EQ(model->OwnInput(1, &own, nullptr), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(model->OwnInput(0, nullptr, nullptr), EDGESDK_ERROR_INVALID_ARGUMENT);
}

TEST(a_plan_of_nothing) {
  TestPlan test;
  Open model(test.Finish());
  CHECK_EQ(model->Run(), EDGESDK_OK);
  model->SetProfiling(true);
  CHECK_EQ(model->Run(), EDGESDK_OK);
}

TEST(no_memory_is_an_error) {
  for (uint64_t bytes : {uint64_t{1} << 60, UINT64_MAX, uint64_t{SIZE_MAX} - 8}) {
    TestPlan test;
    test.arena_bytes = bytes;
    CHECK(Create(test.Finish(), EDGESDK_ERROR_OUT_OF_MEMORY) == nullptr);
    test.arena_bytes = 0;
    test.outputs = {{"y", EDGESDK_INT32, 1, kFour, 16}, {"z", EDGESDK_INT32, 1, kFour, bytes}};
    CHECK(Create(test.Finish(), EDGESDK_ERROR_OUT_OF_MEMORY) == nullptr);
    CHECK(edgert::AllocateAligned(bytes) == nullptr);
  }
}

int FailSilently(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -7; }

int FailAtLength(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) {
  std::string text(5000, 'x');
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text.c_str());
  return -1;
}

int FailInParts(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) {
  const char* parts[] = {"expected ", "4", nullptr, " elements"};
  TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 4);
  return -1;
}

int FailForMemory(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) {
  return __TVMBackendAllocWorkspace(kDLCPU, 0, uint64_t{1} << 60, 0, 32) == nullptr ? -1 : 0;
}

std::string Failure(TVMFFISafeCallType kernel) {
  TestPlan test;
  test.Step(kernel, "k", {});
  Open model(test.Finish());
  CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
  return model->last_error();
}

TEST(a_failure_has_its_text) {
  CHECK_TEXT(Failure(FailInParts), "k failed: ValueError: expected 4 elements");
  CHECK_TEXT(Failure(FailSilently), "k failed with code -7");  // and not the last one's reason
  std::string text = Failure(FailAtLength);
  CHECK_EQ(text.rfind("k failed: RuntimeError: xxxx", 0), 0u);
  CHECK_EQ(text.size(), strlen("k failed: ") + edgert::KernelError::kBytes - 1);
  CHECK_TEXT(Failure(FailForMemory),
             "k failed: out of memory: needs 1152921504606846976 bytes of scratch");
}

TEST(a_failing_step_ends_the_run) {
  TestPlan test;
  test.outputs = {{"y", EDGESDK_INT32, 1, kFour, 16}};
  test.weights[0] = 42;
  test.tensors = {{kEdgertWeight, kDLInt, 32, 1, 0, 0, 16, kFour},
                  {kEdgertOutput, kDLInt, 32, 1, 0, 0, 16, kFour}};
  test.Step(FailSilently, "k", {});
  test.Step(nullptr, "copy", {0, 1});
  Open model(test.Finish());
  alignas(64) int32_t y[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetOutput(0, y, 16), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
  CHECK_EQ(y[0], 1);
}

TEST(workspace_is_aligned_and_given_back) {
  for (uint64_t bytes : {0, 1, 63, 64, 100000}) {
    void* memory = __TVMBackendAllocWorkspace(kDLCPU, 0, bytes, 2, 32);
    CHECK(memory != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
    memset(memory, 1, static_cast<size_t>(bytes));
    CHECK_EQ(__TVMBackendFreeWorkspace(kDLCPU, 0, memory), 0);
  }
}

}  // namespace

int main(int argc, char** argv) { return check::Main(argc, argv); }
