// device_plans.h: small networks on an accelerator, and what all tests of one do with them.
//
// All tensors are four int32. The stand-in of each driver has the kernels "add" (c = a + b),
// "twice" (b = 2 a), "shape" (none) and "crash".
#ifndef EDGESDK_TESTS_DEVICE_PLANS_H_
#define EDGESDK_TESTS_DEVICE_PLANS_H_

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "accelerator.h"
#include "check.h"
#include "executor.h"
#include "test_plan.h"

using Values = std::vector<int32_t>;

constexpr uint64_t kBytes = 16;

const edgert_launch kAdd = {"add", {1, 1, 1}, {4, 1, 1}, 0};
const edgert_launch kTwice = {"twice", {2, 1, 1}, {2, 1, 1}, 0};
const edgert_launch kCrash = {"crash", {1, 1, 1}, {1, 1, 1}, 0};

// The test's accelerator and its code.
extern const edgert_accelerator& the_accelerator;
extern const edgert_image the_image;

inline edgert_tensor Four(edgert_storage storage, uint32_t index, uint64_t offset) {
  return {storage, kDLInt, 32, 1, index, offset, kBytes, kFour};
}

inline edgert_image ImageOf(const std::string& text, edgert_image_format format,
                            uint32_t architecture = 0) {
  return {format, architecture, reinterpret_cast<const uint8_t*>(text.c_str()), text.size() + 1};
}

// No steps yet; an input x and an output y.
inline TestPlan DevicePlan() {
  TestPlan test;
  test.accelerator = &the_accelerator;
  test.images = {the_image};
  test.device_arena_bytes = 128;
  const int32_t weights[] = {100, 200, 300, 400};
  memcpy(test.weights + 64, weights, sizeof(weights));
  test.inputs = {{"x", EDGESDK_INT32, 1, kFour, kBytes}};
  test.outputs = {{"y", EDGESDK_INT32, 1, kFour, kBytes}};
  return test;
}

// y = 2 * (x + w), all on the device.
inline std::unique_ptr<TestPlan> Simple() {
  auto test = std::make_unique<TestPlan>(DevicePlan());
  test->tensors = {Four(kEdgertDeviceInput, 0, 0), Four(kEdgertDeviceWeight, 0, 64),
                   Four(kEdgertDeviceArena, 0, 64), Four(kEdgertDeviceOutput, 0, 0)};
  test->Step(nullptr, "add_kernel", {0, 1, 2}, &kAdd);
  test->Step(nullptr, "twice_kernel", {2, 3}, &kTwice);
  test->Finish();
  return test;
}

inline Values SimpleResult(const Values& x) {
  return {2 * (x[0] + 100), 2 * (x[1] + 200), 2 * (x[2] + 300), 2 * (x[3] + 400)};
}

// On the CPU: out[i] = a[i] + 1000.
inline int AddThousand(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  const DLTensor* a = static_cast<const DLTensor*>(args[0].v_ptr);
  const DLTensor* out = static_cast<const DLTensor*>(args[1].v_ptr);
  if (a->device.device_type != kDLCPU || reinterpret_cast<uintptr_t>(a->data) % 64 != 0) return -1;
  for (int i = 0; i < 4; ++i) {
    static_cast<int32_t*>(out->data)[i] = static_cast<const int32_t*>(a->data)[i] + 1000;
  }
  return 0;
}

// y = 2 * (2 * (x + w) + 1000) + x, z = x + 1000 and u = 2 z + x: the middle of y on the CPU, which
// reads x, too, and writes z's memory, which the device then reads.
inline std::unique_ptr<TestPlan> Mixed() {
  auto test = std::make_unique<TestPlan>(DevicePlan());
  test->arena_bytes = 192;
  test->device_arena_bytes = 384;
  test->outputs.push_back({"z", EDGESDK_INT32, 1, kFour, kBytes});
  test->outputs.push_back({"u", EDGESDK_INT32, 1, kFour, kBytes});
  test->tensors = {Four(kEdgertDeviceInput, 0, 0),   Four(kEdgertDeviceWeight, 0, 64),
                   Four(kEdgertDeviceArena, 0, 0),   Four(kEdgertDeviceArena, 0, 64),
                   Four(kEdgertArena, 0, 64),        Four(kEdgertArena, 0, 128),
                   Four(kEdgertDeviceArena, 0, 128), Four(kEdgertDeviceArena, 0, 192),
                   Four(kEdgertDeviceOutput, 0, 0),  Four(kEdgertInput, 0, 0),
                   Four(kEdgertOutput, 1, 0),        Four(kEdgertDeviceArena, 0, 256),
                   Four(kEdgertDeviceArena, 0, 320), Four(kEdgertDeviceOutput, 2, 0)};
  test->Step(AddThousand, "on_cpu_first", {9, 10});  // z
  test->Step(nullptr, "add", {0, 1, 2}, &kAdd);
  test->Step(nullptr, "copy", {10, 11});
  test->Step(nullptr, "twice", {11, 12}, &kTwice);
  test->Step(nullptr, "add", {12, 0, 13}, &kAdd);  // u
  test->Step(nullptr, "twice", {2, 3}, &kTwice);
  test->Step(nullptr, "copy", {3, 4});
  test->Step(AddThousand, "on_cpu", {4, 5});
  test->Step(nullptr, "copy", {5, 6});
  test->Step(nullptr, "twice", {6, 7}, &kTwice);
  test->Step(nullptr, "add", {7, 0, 8}, &kAdd);
  test->Finish();
  return test;
}

class Open {
 public:
  explicit Open(const TestPlan& test, edgert::DeviceOptions options = {}) {
    status_ = edgert::Executor::Create(test.plan, 1, options, &executor_, error_, sizeof(error_));
  }
  ~Open() { edgert::Executor::Destroy(executor_); }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
  edgert::Executor* operator->() { return executor_; }
  edgesdk_status status() const { return status_; }
  std::string error() const { return error_; }

 private:
  edgert::Executor* executor_ = nullptr;
  edgesdk_status status_;
  char error_[edgert::kErrorBytes] = "";
};

inline std::string OpenError(const TestPlan& test, edgesdk_status wanted,
                             edgert::DeviceOptions options = {}) {
  Open model(test, options);
  CHECK_EQ(model.status(), wanted);
  return model.error();
}

inline edgesdk_device_info InfoOf(Open& model) {
  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  CHECK_EQ(model->DeviceInfo(&info), EDGESDK_OK);
  return info;
}

inline void CheckValues(const void* data, const Values& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    CHECK_EQ(static_cast<const int32_t*>(data)[i], wanted[i]);
  }
}

inline void CheckOutput(Open& model, const Values& wanted, int index = 0) {
  const void* data = nullptr;
  CHECK_EQ(model->GetOutput(index, &data, nullptr), EDGESDK_OK);
  if (data != nullptr) CheckValues(data, wanted);
}

// Runs the model on x from the host.
inline void Run(Open& model, const Values& x) {
  CHECK_EQ(model->SetInput(0, x.data(), kBytes), EDGESDK_OK);
  edgesdk_status status = model->Run();
  CHECK_EQ(status, EDGESDK_OK);
  if (status != EDGESDK_OK) CHECK_TEXT(model->last_error(), "");
}

inline void CheckRun(Open& model, const Values& x, const Values& wanted) {
  Run(model, x);
  CheckOutput(model, wanted);
}

// Outputs of Mixed().
inline void CheckMixed(Open& model, const Values& x) {
  Values y = SimpleResult(x);
  Values z, u;
  for (size_t i = 0; i < 4; ++i) {
    y[i] = 2 * (y[i] + 1000) + x[i];
    z.push_back(x[i] + 1000);
    u.push_back(2 * z[i] + x[i]);
  }
  CheckOutput(model, y, 0);
  CheckOutput(model, z, 1);
  CheckOutput(model, u, 2);
}

inline void CheckMixedRun(Open& model, const Values& x) {
  Run(model, x);
  CheckMixed(model, x);
}

// A network whose input and output have no bytes.
inline void CheckTensorsOfNoBytes() {
  TestPlan test = DevicePlan();
  test.inputs = {{"x", EDGESDK_INT32, 2, kNone, 0}};
  test.outputs = {{"y", EDGESDK_INT32, 2, kNone, 0}};
  test.tensors = {{kEdgertDeviceInput, kDLInt, 32, 2, 0, 0, 0, kNone},
                  {kEdgertDeviceOutput, kDLInt, 32, 2, 0, 0, 0, kNone}};
  test.device_arena_bytes = 0;
  test.Step(nullptr, "copy", {0, 1});
  test.Finish();
  Open model(test);
  CHECK_EQ(model->SetInput(0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  const void* data = nullptr;
  CHECK_EQ(model->GetOutput(0, &data, nullptr), EDGESDK_OK);
  CHECK(data != nullptr);
}

inline void CheckThreadsWithAHandleEach() {
  std::unique_ptr<TestPlan> test = Simple();
  std::vector<std::thread> threads;
  for (int32_t number = 0; number < 4; ++number) {
    threads.emplace_back([&test, number] {
      for (int32_t i = 0; i < 10; ++i) {
        Open model(*test);
        CHECK_TEXT(model.error(), "");
        if (model.status() != EDGESDK_OK) return;
        Values x = {number, i, 3, 4};
        for (int k = 0; k < 3; ++k) CheckRun(model, x, SimpleResult(x));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A child of fork() can neither open a handle nor use one of before; the parent goes on.
inline void CheckForkedChildIsRefused(const char* reason) {
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  pid_t child = fork();
  if (child == 0) {
    int code = 0;
    {
      Open second(*test);
      if (second.status() != EDGESDK_ERROR_DEVICE || second.error() != reason) code |= 1;
      alignas(64) int32_t x[] = {1, 2, 3, 4};
      model->SetInput(0, x, kBytes);
      if (model->Run() != EDGESDK_ERROR_DEVICE) code |= 2;
      if (strcmp(model->last_error(), reason) != 0) code |= 4;
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

// Opens and runs a network of the one launch, and returns why it does not open.
inline std::string LaunchError(const edgert_launch& launch) {
  TestPlan test = DevicePlan();
  test.Step(nullptr, "shape", {}, &launch);
  test.Finish();
  Open model(test);
  if (model.status() == EDGESDK_OK) Run(model, {0, 0, 0, 0});
  return model.error();
}

// Has each of `functions` fail at each of its calls, in opening Mixed(), two runs and two profiled
// ones: a status with a text, wrong values never. `World` begins each and finds what is left over;
// `fail(function, nth)` prepares the failure, `calls(function)` counts.
template <typename World, typename Fail, typename Calls>
void CheckAnyCallMayFail(const std::vector<const char*>& functions, Fail fail, Calls calls) {
  std::unique_ptr<TestPlan> test = Mixed();
  for (const char* function : functions) {
    for (int nth = 1; nth < 200; ++nth) {
      World world;
      int made = 0;
      {
        bool failed = false;
        fail(function, nth);
        Values x = {1, 2, 3, 4};
        Open model(*test);
        if (model.status() != EDGESDK_OK) {
          CHECK(!model.error().empty());
          failed = true;
        }
        for (int run = 0; !failed && run < 4; ++run) {
          if (run == 2) model->SetProfiling(true);
          CHECK_EQ(model->SetInput(0, x.data(), kBytes), EDGESDK_OK);
          if (model->Run() == EDGESDK_OK) {
            CheckMixed(model, x);
          } else {
            CHECK(model->last_error()[0] != '\0');
            failed = true;
          }
        }
        made = calls(function);
        fail(function, -1);  // closing is not looked at
      }
      if (made < nth) break;  // the failure was not reached
    }
  }
}

// The file that the stand-in's function `address` is in.
inline std::string LibraryOf(const void* address) {
  Dl_info where;
  dladdr(address, &where);
  return where.dli_fname;
}

// The stand-in's function `name`, for what a program does by itself.
template <typename F>
F Symbol(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

// The C API's options of a program, with room for a failure's reason.
struct ProgramOptions : edgesdk_options {
  char reason[edgert::kErrorBytes] = "";

  ProgramOptions() : edgesdk_options{} {
    struct_size = sizeof(edgesdk_options);
    error_buffer = reason;
    error_buffer_size = sizeof(reason);
  }
};

// Runs the model of test_model.cc through the C API.
inline void CheckProgramRun(edgesdk_model* model) {
  void* own = nullptr;
  CHECK_EQ(edgesdk_model_own_input(model, 0, &own, nullptr), EDGESDK_OK);
  const int32_t x[] = {5, 6, 7, 8};
  memcpy(own, x, kBytes);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  const void* y = nullptr;
  CHECK_EQ(edgesdk_model_get_output(model, 0, &y, nullptr), EDGESDK_OK);
  CheckValues(y, {12, 16, 20, 24});
}

#endif  // EDGESDK_TESTS_DEVICE_PLANS_H_
