// edgert on a GPU, with a stand-in for the driver (fake_cuda/): values, what is copied and what is
// not, recorded graphs, and every way to fail. The same tests run with a stand-in of old drivers.

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_plans.h"
#include "fake_cuda/fake_cuda.h"

extern "C" edgesdk_status edgesdk_open_model_gpu(uint32_t, const edgesdk_options*, edgesdk_model**);

namespace {

// Whether the stand-in is one of today's drivers.
const bool kHasGraphs = dlsym(RTLD_DEFAULT, "cuGraphLaunch") != nullptr;

int32_t* At(const FakeLaunch& launch, uint32_t argument) {
  return static_cast<int32_t*>(fake_cuda_host(launch.arguments[argument], kBytes));
}

// out[i] = a[i] + b[i]
int AddKernel(const FakeLaunch& launch) {
  const int32_t* a = At(launch, 0);
  const int32_t* b = At(launch, 1);
  int32_t* out = At(launch, 2);
  if (a == nullptr || b == nullptr || out == nullptr) return 700;
  for (int i = 0; i < 4; ++i) out[i] = a[i] + b[i];
  return 0;
}

// out[i] = 2 a[i]
int TwiceKernel(const FakeLaunch& launch) {
  const int32_t* a = At(launch, 0);
  int32_t* out = At(launch, 1);
  if (a == nullptr || out == nullptr) return 700;
  for (int i = 0; i < 4; ++i) out[i] = 2 * a[i];
  return 0;
}

// Where it leaves what it was launched with.
FakeLaunch last_shape;
int ShapeKernel(const FakeLaunch& launch) {
  last_shape = launch;
  return 0;
}

int CrashKernel(const FakeLaunch&) { return 700; }

constexpr char kCubin[] = "fake cubin sm_90\nadd\ntwice\nshape\ncrash\n";
// The world at the start of a test, and nothing left and nothing done wrong at its end.
struct World {
  World() {
    fake_cuda_reset();
    fake_cuda_register({"add", AddKernel, 3, 5000, 1024, 0});
    fake_cuda_register({"twice", TwiceKernel, 2, 7000, 1024, 0});
    fake_cuda_register({"shape", ShapeKernel, 0, 1, 256, 1024});
    fake_cuda_register({"crash", CrashKernel, 0, 1, 1024, 0});
    setenv("EDGESDK_CUDA_LIBRARY", LibraryOf(reinterpret_cast<void*>(fake_cuda_reset)).c_str(), 1);
    unsetenv("EDGESDK_CUDA_GRAPH");
    unsetenv("EDGESDK_CUDA_SYNC");
  }
  ~World() {
    CHECK_EQ(fake_cuda_live(), 0);
    CHECK_TEXT(fake_cuda_faults(), "");
  }
};

// Copies of any direction that were put into a stream or a recording.
int Copies() {
  return fake_cuda_calls("cuMemcpyHtoDAsync_v2") + fake_cuda_calls("cuMemcpyDtoHAsync_v2") +
         fake_cuda_calls("cuMemcpyDtoDAsync_v2");
}

// The first test: later ones have a driver loaded.
TEST(a_driver_that_cannot_be_loaded) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  setenv("EDGESDK_CUDA_LIBRARY", "/no/such/libcuda.so.1", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no NVIDIA driver: cannot use /no/such/libcuda.so.1, as EDGESDK_CUDA_LIBRARY says; "
             "install the driver, or set EDGESDK_CUDA_LIBRARY to its library");
  setenv("EDGESDK_CUDA_LIBRARY", "/dev/null", 1);
  std::string reason = OpenError(*test, EDGESDK_ERROR_DEVICE);
  CHECK_EQ(reason.rfind("no NVIDIA driver: cannot use /dev/null (", 0), 0u);
  setenv("EDGESDK_CUDA_LIBRARY", "libm.so.6", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no NVIDIA driver: cannot use libm.so.6 (has no cuInit: it is too old), as "
             "EDGESDK_CUDA_LIBRARY says; install the driver, or set EDGESDK_CUDA_LIBRARY to its "
             "library");
  unsetenv("EDGESDK_CUDA_LIBRARY");
  if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) {  // nothing to find on this machine
    reason = OpenError(*test, EDGESDK_ERROR_DEVICE);
    CHECK_EQ(reason.rfind("no NVIDIA driver: cannot use libcuda.so.1", 0), 0u);
  }
}

TEST(a_model_on_the_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  CHECK_TEXT(model.error(), "");
  CHECK_EQ(model->Run(), EDGESDK_ERROR_INPUT_MISSING);
  for (int32_t first : {1, -50, 7}) {
    Values x = {first, 2, 3, 4};
    CheckRun(model, x, SimpleResult(x));
  }
  // One copy of weights; then an upload, two kernels and a download, each recorded once.
  int times = kHasGraphs ? 1 : 3;
  CHECK_EQ(fake_cuda_calls("cuLaunchKernel"), 2 * times);
  CHECK_EQ(Copies(), 1 + 2 * times);
  CHECK_EQ(fake_cuda_calls("cuGraphLaunch"), kHasGraphs ? 3 : 0);
}

TEST(says_what_it_runs_on) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  edgesdk_device_info info = InfoOf(model);
  CHECK_TEXT(info.kind, "cuda");
  CHECK_TEXT(info.name, "Paper GPU");
  CHECK_EQ(info.index, 0);
  CHECK_EQ(info.compute_capability, 90);
  CHECK_EQ(info.driver_version, 12040);
  CHECK_EQ(info.code_architecture, 90);
  CHECK_EQ(info.code_is_intermediate, 0);
  CHECK_EQ(info.unified_memory, 0);
  CHECK_EQ(info.memory_bytes, size_t{1} << 30);
  CHECK_EQ(info.weights_bytes, 80u);
  CHECK_EQ(info.activations_bytes, 128u);
  CHECK_EQ(info.io_bytes, 32u);
  CHECK_EQ(info.free_bytes, (size_t{1} << 30) - 80 - 128 - 32);
  CHECK_EQ(info.replays, kHasGraphs ? 1 : 0);
  CHECK_TEXT(info.replays_reason,
             kHasGraphs ? "" : "this driver has no CUDA graphs: it is older than CUDA 10.1");
  edgesdk_memory_info memory = model->Memory();
  CHECK_EQ(memory.io_bytes, 32u);
}

TEST(the_launch_is_what_the_plan_says) {
  World world;
  TestPlan test = DevicePlan();
  edgert_launch launch = {"shape", {3, 5, 7}, {32, 2, 4}, 1000};
  test.Step(nullptr, "shape", {}, &launch);
  test.inputs.clear();
  test.outputs.clear();
  test.Finish();
  Open model(test);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(last_shape.grid[i], launch.grid[i]);
    CHECK_EQ(last_shape.block[i], launch.block[i]);
  }
  CHECK_EQ(last_shape.shared_bytes, 1000u);
}

TEST(steps_of_cpu_and_gpu_take_turns) {
  World world;
  std::unique_ptr<TestPlan> test = Mixed();
  Open model(*test);
  for (int32_t first : {1, -50, 7}) {
    Values x = {first, 2, 3, 4};
    CheckMixedRun(model, x);
  }
  CHECK_EQ(fake_cuda_calls("cuGraphLaunch"), kHasGraphs ? 6 : 0);
}

TEST(a_mixed_model_whose_inputs_and_outputs_stay_on_the_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Mixed();
  Open model(*test);
  Values x = {5, 6, 7, 8};
  CheckMixedRun(model, x);
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->BindDevice(kEdgertOutput, 1, nullptr, 0), EDGESDK_OK);
  // The CPU's first step gets x from the device's memory.
  void* address = nullptr;
  CHECK_EQ(model->DeviceAddress(kEdgertInput, 0, &address, nullptr), EDGESDK_OK);
  int32_t* on_device =
      static_cast<int32_t*>(fake_cuda_host(reinterpret_cast<uint64_t>(address), kBytes));
  on_device[0] = 77;
  CHECK_EQ(model->Run(), EDGESDK_OK);
  Values now = {77, 6, 7, 8};
  void* second = nullptr;
  CHECK_EQ(model->DeviceAddress(kEdgertOutput, 1, &second, nullptr), EDGESDK_OK);
  CheckValues(fake_cuda_host(reinterpret_cast<uint64_t>(second), kBytes), {1077, 1006, 1007, 1008});
  CheckMixed(model, now);
}

// Memory of the caller's on the device.
struct DeviceBlock {
  DeviceBlock() {
    void* context = nullptr;
    Symbol<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
    Symbol<int (*)(void*)>("cuCtxPushCurrent_v2")(context);
    Symbol<int (*)(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, 256);
    Symbol<int (*)(void**)>("cuCtxPopCurrent_v2")(&context);
  }
  ~DeviceBlock() {
    void* context = nullptr;
    Symbol<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
    Symbol<int (*)(void*)>("cuCtxPushCurrent_v2")(context);
    Symbol<int (*)(uint64_t)>("cuMemFree_v2")(address);
    Symbol<int (*)(void**)>("cuCtxPopCurrent_v2")(&context);
    for (int i = 0; i < 2; ++i) Symbol<int (*)(int)>("cuDevicePrimaryCtxRelease")(0);
  }
  void* pointer() const { return reinterpret_cast<void*>(address); }
  int32_t* values() const { return static_cast<int32_t*>(fake_cuda_host(address, kBytes)); }

  uint64_t address = 0;
};

TEST(inputs_and_outputs_may_be_the_callers_on_the_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  DeviceBlock in;
  DeviceBlock out;
  Open model(*test);
  int before = Copies();
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, in.pointer(), kBytes), EDGESDK_OK);
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, out.pointer(), kBytes), EDGESDK_OK);
  for (int32_t first : {1, 10}) {
    Values x = {first, 2, 3, 4};
    memcpy(in.values(), x.data(), kBytes);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckValues(out.values(), SimpleResult(x));
  }
  CHECK_EQ(Copies(), before);
  void* address = nullptr;
  size_t size_bytes = 0;
  CHECK_EQ(model->DeviceAddress(kEdgertInput, 0, &address, &size_bytes), EDGESDK_OK);
  CHECK(address == in.pointer());
  CHECK_EQ(size_bytes, kBytes);
  CheckOutput(model, SimpleResult({10, 2, 3, 4}));  // brought on demand
  CHECK_EQ(Copies(), before + 1);

  // Another address: what was recorded is recorded anew.
  DeviceBlock other;
  Values x = {9, 9, 9, 9};
  memcpy(other.values(), x.data(), kBytes);
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, other.pointer(), kBytes), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CheckValues(out.values(), SimpleResult(x));

  // Back to the host.
  memset(out.values(), 0, kBytes);
  Values y(4);
  CHECK_EQ(model->SetOutput(0, y.data(), kBytes), EDGESDK_OK);
  CheckRun(model, {3, 3, 3, 3}, SimpleResult({3, 3, 3, 3}));
  CheckValues(y.data(), SimpleResult({3, 3, 3, 3}));
  CheckValues(out.values(), {0, 0, 0, 0});
}

// As a program does that fills one buffer while the network reads the other.
TEST(bindings_that_come_back_are_recorded_once) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  DeviceBlock blocks[6];
  for (int32_t i = 0; i < 6; ++i) {
    const int32_t x[] = {i, 2, 3, 4};
    memcpy(blocks[i].values(), x, kBytes);
  }
  Open model(*test);
  auto run = [&](int32_t number) {
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, blocks[number].pointer(), kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult({number, 2, 3, 4}));
  };
  for (int round = 0; round < 3; ++round) {
    for (int32_t number = 0; number < 4; ++number) run(number);
  }
  CHECK_EQ(fake_cuda_calls("cuGraphInstantiateWithFlags"), kHasGraphs ? 4 : 0);
  for (int round = 0; round < 2; ++round) {  // more than are remembered
    for (int32_t number = 0; number < 6; ++number) run(number);
  }
  CHECK_EQ(fake_cuda_calls("cuGraphInstantiateWithFlags"), kHasGraphs ? 4 + 8 : 0);
}

TEST(inputs_stay_on_the_gpu_in_the_handles_own_memory) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  Values x = {1, 2, 3, 4};
  CheckRun(model, x, SimpleResult(x));
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);
  int before = Copies();
  for (int i = 0; i < 3; ++i) CHECK_EQ(model->Run(), EDGESDK_OK);
  CHECK_EQ(Copies(), before);
  CheckOutput(model, SimpleResult(x));
}

TEST(the_handles_own_memory_on_the_host) {
  World world;
  for (int board = 0; board < 2; ++board) {
    fake_cuda_settings()->integrated = board;
    std::unique_ptr<TestPlan> test = Simple();
    Open model(*test);
    void* own = nullptr;
    size_t size_bytes = 0;
    CHECK_EQ(model->OwnInput(0, &own, &size_bytes), EDGESDK_OK);
    CHECK_EQ(size_bytes, kBytes);
    for (int32_t first : {1, 2}) {
      const int32_t x[] = {first, 2, 3, 4};
      memcpy(own, x, kBytes);
      CHECK_EQ(model->Run(), EDGESDK_OK);
      CheckOutput(model, SimpleResult({first, 2, 3, 4}));
    }
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
    memset(own, 0, kBytes);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    // Where both share the memory, it is the same.
    CheckOutput(model, SimpleResult(board ? Values{0, 0, 0, 0} : Values{2, 2, 3, 4}));
    CHECK_EQ(model->OwnInput(0, &own, nullptr), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult({0, 0, 0, 0}));
  }
}

TEST(the_output_of_one_is_the_input_of_another) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open first(*test);
  Open second(*test);
  void* between = nullptr;
  CHECK_EQ(second->DeviceAddress(kEdgertInput, 0, &between, nullptr), EDGESDK_OK);
  CHECK_EQ(second->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(first->BindDevice(kEdgertOutput, 0, between, kBytes), EDGESDK_OK);
  Values x = {1, 2, 3, 4};
  CHECK_EQ(first->SetInput(0, x.data(), kBytes), EDGESDK_OK);
  CHECK_EQ(first->Run(), EDGESDK_OK);
  CHECK_EQ(second->Run(), EDGESDK_OK);
  CheckOutput(second, SimpleResult(SimpleResult(x)));
}

TEST(addresses_are_checked) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  DeviceBlock block;
  Open model(*test);
  alignas(64) int32_t on_host[4] = {0};
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, on_host, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(model->last_error(), " is no address that GPU 0 (Paper GPU) can use") != nullptr);
  char* inside = static_cast<char*>(block.pointer()) + 8;
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, inside, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(model->last_error(), "no multiple of 16") != nullptr);
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, block.pointer(), 8), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(model->last_error(), "input 'x' has 16 bytes, got 8");
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 8), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(model->last_error(), "output 'y' has 16 bytes, got 8");
  CHECK_EQ(model->BindDevice(kEdgertOutput, 1, nullptr, 0), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(model->last_error(), "there is no output 1: the model has 1");
  CHECK_EQ(model->DeviceAddress(kEdgertInput, 0, nullptr, nullptr), EDGESDK_ERROR_INVALID_ARGUMENT);
  // None of these has changed anything.
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(unaligned_memory_of_the_caller) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  unsigned char in[kBytes + 1];
  unsigned char out[kBytes + 2];
  const int32_t x[] = {4, 3, 2, 1};
  memcpy(in + 1, x, kBytes);
  memset(out, 0x55, sizeof(out));
  CHECK_EQ(model->SetInput(0, in + 1, kBytes), EDGESDK_OK);
  CHECK_EQ(model->SetOutput(0, out + 1, kBytes), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  int32_t y[4];
  memcpy(y, out + 1, kBytes);
  CheckValues(y, SimpleResult({4, 3, 2, 1}));
  CHECK_EQ(int{out[0]}, 0x55);
  CHECK_EQ(int{out[kBytes + 1]}, 0x55);
}

TEST(weights_are_on_the_gpu_once) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open first(*test);
  int allocations = fake_cuda_calls("cuMemAlloc_v2");
  {
    Open second(*test);
    CHECK_EQ(fake_cuda_calls("cuMemAlloc_v2"), 2 * allocations - 1);
    CHECK_EQ(fake_cuda_calls("cuModuleLoadDataEx"), 1);
    CheckRun(second, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  }
  CheckRun(first, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(handles_run_on_several_threads) {
  World world;
  CheckThreadsWithAHandleEach();
}

TEST(the_callers_stream) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  DeviceBlock in;  // keeps the context, too
  void* context = nullptr;
  void* stream = nullptr;
  Symbol<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
  Symbol<int (*)(void*)>("cuCtxPushCurrent_v2")(context);
  Symbol<int (*)(void**, unsigned)>("cuStreamCreate")(&stream, 0);
  {
    // What the caller has put into it comes first.
    Open model(*test, {0, stream});
    alignas(64) int32_t x[] = {1, 2, 3, 4};
    Symbol<int (*)(uint64_t, const void*, size_t, void*)>("cuMemcpyHtoDAsync_v2")(in.address, x,
                                                                                  kBytes, stream);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, in.pointer(), kBytes), EDGESDK_OK);
    for (int i = 0; i < 2; ++i) CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult({1, 2, 3, 4}));
  }
  Symbol<int (*)(void*)>("cuStreamDestroy_v2")(stream);
  Symbol<int (*)(void**)>("cuCtxPopCurrent_v2")(&context);
  Symbol<int (*)(int)>("cuDevicePrimaryCtxRelease")(0);
}

const std::string& Cubin(int architecture) {
  static std::vector<std::unique_ptr<std::string>> texts;
  texts.push_back(std::make_unique<std::string>("fake cubin sm_" + std::to_string(architecture) +
                                                "\nadd\ntwice\n"));
  return *texts.back();
}

const std::string& Ptx(int architecture, const char* version) {
  static std::vector<std::unique_ptr<std::string>> texts;
  texts.push_back(std::make_unique<std::string>(std::string(".version ") + version +
                                                "\n.target sm_" + std::to_string(architecture) +
                                                "\nadd\ntwice\n"));
  return *texts.back();
}

TEST(code_is_chosen_by_compute_capability) {
  World world;
  struct Case {
    std::vector<int> cubins;
    std::vector<int> ptx;
    int gpu;
    int chosen;
    bool is_ptx;
  };
  for (const Case& c : {
           Case{{80, 86, 89, 90}, {75}, 90, 90, false}, Case{{80, 86, 89, 90}, {75}, 89, 89, false},
           Case{{80, 90}, {75}, 89, 80, false},  // the same major, an older minor
           Case{{86, 80}, {75}, 80, 80, false},  // never a newer one
           Case{{80, 90}, {75}, 75, 75, true},
           Case{{80, 90}, {75, 90}, 120, 90, true},  // the newest PTX
           Case{{87}, {}, 87, 87, false},
           Case{{86}, {80}, 87, 80, true},  // a board runs no desktop's machine code
           Case{{87}, {80}, 89, 80, true},  // nor the other way round
       }) {
    std::unique_ptr<TestPlan> test = Simple();
    test->images.clear();
    for (int sm : c.cubins) test->images.push_back(ImageOf(Cubin(sm), kEdgertCubin, sm));
    for (int sm : c.ptx) test->images.push_back(ImageOf(Ptx(sm, "7.5"), kEdgertPtx, sm));
    test->Finish();
    fake_cuda_settings()->capability = c.gpu;
    Open model(*test);
    CHECK_TEXT(model.error(), "");
    edgesdk_device_info info = InfoOf(model);
    CHECK_EQ(info.code_architecture, c.chosen);
    CHECK_EQ(info.code_is_intermediate, c.is_ptx ? 1 : 0);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  }
}

TEST(code_that_fits_no_gpu_is_a_sentence) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  test->images = {ImageOf(Cubin(87), kEdgertCubin, 87)};
  test->Finish();
  fake_cuda_settings()->capability = 72;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "built for sm_87, this GPU (Paper GPU) is sm_72: compile with --target "
             "jetson-xavier-nx");
  test->images = {ImageOf(Cubin(86), kEdgertCubin, 86), ImageOf(Cubin(89), kEdgertCubin, 89),
                  ImageOf(Ptx(80, "7.0"), kEdgertPtx, 80)};
  test->Finish();
  fake_cuda_settings()->capability = 75;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "built for sm_86, sm_89 and PTX of compute_80, this GPU (Paper GPU) is sm_75: compile "
             "with --target cuda-sm_75");
}

TEST(code_that_the_driver_refuses) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  test->images = {ImageOf(Ptx(75, "8.8"), kEdgertPtx, 75)};
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "the library holds PTX 8.8, which is newer than this driver reads (CUDA 12.4): update "
             "the driver, or compile for sm_90");
  test->images = {ImageOf(Ptx(75, "nonsense"), kEdgertPtx, 75)};
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "the driver (CUDA 12.4) refuses the code for PTX of compute_75 on GPU 0 (Paper GPU, "
             "sm_90): CUDA error 218: ptxas fatal   : no target");
  const std::string broken = "broken";
  test->images = {ImageOf(broken, kEdgertCubin, 90)};
  test->Finish();
  CHECK_TEXT(
      OpenError(*test, EDGESDK_ERROR_DEVICE),
      "the driver (CUDA 12.4) refuses the code for sm_90 on GPU 0 (Paper GPU, sm_90): device "
      "kernel image is invalid (CUDA_ERROR_INVALID_IMAGE)");
  // With a second choice, that is taken.
  test->images.push_back(ImageOf(Ptx(75, "7.0"), kEdgertPtx, 75));
  test->Finish();
  Open model(*test);
  CHECK_EQ(InfoOf(model).code_is_intermediate, 1);
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(a_kernel_that_is_not_in_the_code) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  const edgert_launch missing = {"missing", {1, 1, 1}, {1, 1, 1}, 0};
  test->steps[1].launch = &missing;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "missing: named symbol not found (CUDA_ERROR_NOT_FOUND)");
  test->images.clear();
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "the library has no code for the GPU");
}

// "shape" has 1024 bytes of its own shared memory and registers for 256 threads.
TEST(launches_are_checked_against_the_gpu) {
  World world;
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {256, 1, 1}, 0}), "");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {16, 17, 1}, 0}),
             "shape needs blocks of 272 threads; with its registers this GPU (Paper GPU) has room "
             "for 256");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {1, 1, 65}, 0}),
             "shape needs a grid of 1 and blocks of 65 along z; this GPU (Paper GPU) allows "
             "65535 and 64");
  CHECK_TEXT(LaunchError({"shape", {1, 65536, 1}, {1, 1, 1}, 0}),
             "shape needs a grid of 65536 and blocks of 1 along y; this GPU (Paper GPU) allows "
             "65535 and 1024");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {1, 1, 1}, 48 * 1024}), "");  // asks for more
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {1, 1, 1}, 226 * 1024}), "");
  CHECK_TEXT(
      LaunchError({"shape", {1, 1, 1}, {1, 1, 1}, 226 * 1024 + 1}),
      "shape needs 232449 bytes of shared memory; this GPU (Paper GPU) has 232448 per block");
}

// The stand-in cannot show what it gains; it shows which launches are asked to.
TEST(kernels_that_wait_by_themselves_start_early) {
  World world;
  edgert_launch add = kAdd;
  edgert_launch twice = kTwice;
  add.flags = kEdgertStartsEarly;
  twice.flags = kEdgertStartsEarly;
  std::unique_ptr<TestPlan> test = Simple();
  test->steps[0].launch = &add;
  test->steps[1].launch = &twice;
  for (const char* graph : {"1", "0"}) {
    setenv("EDGESDK_CUDA_GRAPH", graph, 1);
    int before = fake_cuda_calls("cuLaunchKernelEx");
    Open model(*test);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    // The first follows a copy.
    CHECK_EQ(fake_cuda_calls("cuLaunchKernelEx") - before, kHasGraphs ? 1 : 0);
    model->SetProfiling(true);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    CHECK_EQ(fake_cuda_calls("cuLaunchKernelEx") - before, kHasGraphs ? 1 : 0);
  }
  unsetenv("EDGESDK_CUDA_GRAPH");
  int after = fake_cuda_calls("cuLaunchKernelEx");
  {
    fake_cuda_settings()->driver_version = 12020;  // graphs of CUDA 12.2 do not know of it
    Open model(*test);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    CHECK_EQ(fake_cuda_calls("cuLaunchKernelEx"), after);
    fake_cuda_settings()->driver_version = 12040;
  }
  // Code of an older architecture has no instruction to wait with.
  test->images = {ImageOf(Ptx(80, "7.0"), kEdgertPtx, 80)};
  test->Finish();
  Open model(*test);
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  CHECK_EQ(fake_cuda_calls("cuLaunchKernelEx"), after);
}

TEST(two_launches_of_one_function_with_different_shared_memory) {
  World world;
  const edgert_launch much = {"shape", {1, 1, 1}, {1, 1, 1}, 200 * 1024};
  const edgert_launch less = {"shape", {1, 1, 1}, {1, 1, 1}, 100 * 1024};
  TestPlan test = DevicePlan();
  test.inputs.clear();
  test.outputs.clear();
  test.Step(nullptr, "much", {}, &much);
  test.Step(nullptr, "less", {}, &less);
  test.Finish();
  Open model(test);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CHECK_EQ(last_shape.shared_bytes, 100u * 1024);
}

TEST(no_gpu_and_no_such_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {1, nullptr}),
             "there is no GPU 1: the driver finds 1");
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {-1, nullptr}),
             "there is no GPU -1: the driver finds 1");
  fake_cuda_settings()->num_devices = 0;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES set?)");
  fake_cuda_reset();
  fake_cuda_fail("cuInit", 1, 3);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "CUDA cannot be used in a child of fork() when the parent has used it");
  fake_cuda_fail("cuInit", 1, 803);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "the NVIDIA driver's library and kernel module are of different versions: restart the "
             "machine after an update of the driver");
  fake_cuda_fail("cuInit", 1, 999);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "the NVIDIA driver does not start: CUDA error 999");
}

TEST(no_memory_on_the_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  for (const char* function : {"cuMemAlloc_v2", "cuMemHostAlloc"}) {
    int all = 0;
    {
      fake_cuda_reset();
      World again;
      Open model(*test);
      all = fake_cuda_calls(function);
    }
    CHECK(all >= 3);
    for (int nth = 1; nth <= all; ++nth) {
      fake_cuda_fail(function, nth, 2);
      std::string reason = OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY);
      CHECK(reason.find("no room for ") != std::string::npos);
      CHECK_EQ(fake_cuda_live(), 0);
    }
  }
  fake_cuda_settings()->memory_bytes = 100;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 128 bytes of activations on GPU 0: out of memory "
             "(CUDA_ERROR_OUT_OF_MEMORY)");
  fake_cuda_settings()->memory_bytes = 79;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 80 bytes of weights on GPU 0: out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
}

TEST(any_call_may_fail) {
  CheckAnyCallMayFail<World>(
      {"cuInit",
       "cuDriverGetVersion",
       "cuDeviceGetCount",
       "cuDeviceGet",
       "cuDeviceGetName",
       "cuDevicePrimaryCtxRetain",
       "cuModuleLoadDataEx",
       "cuModuleGetFunction",
       "cuFuncGetAttribute",
       "cuFuncLoad",
       "cuMemAlloc_v2",
       "cuMemHostAlloc",
       "cuMemcpyHtoDAsync_v2",
       "cuMemcpyDtoHAsync_v2",
       "cuMemcpyDtoDAsync_v2",
       "cuStreamCreate",
       "cuStreamSynchronize",
       "cuEventCreate",
       "cuEventRecord",
       "cuEventRecordWithFlags",
       "cuEventElapsedTime",
       "cuLaunchKernel",
       "cuStreamBeginCapture_v2",
       "cuStreamEndCapture",
       "cuGraphInstantiateWithFlags",
       "cuGraphLaunch"},
      [](const char* function, int nth) { fake_cuda_fail(function, nth, 1); }, fake_cuda_calls);
}

TEST(a_kernel_that_fails_ends_the_handle) {
  World world;
  std::unique_ptr<TestPlan> good = Simple();
  std::unique_ptr<TestPlan> bad = Simple();
  bad->steps[1].launch = &kCrash;
  {
    Open healthy(*good);
    Open model(*bad);
    alignas(64) int32_t x[] = {1, 2, 3, 4};
    CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
    CHECK_TEXT(model->last_error(),
               "a kernel failed on GPU 0: an illegal memory access was encountered "
               "(CUDA_ERROR_ILLEGAL_ADDRESS); EDGESDK_CUDA_SYNC=1 tells which");
    for (int i = 0; i < 2; ++i) {
      CHECK_EQ(model->Run(), EDGESDK_ERROR_DEVICE);
      CHECK_TEXT(model->last_error(),
                 "GPU 0 does nothing more for this process until all its handles are closed; it "
                 "failed earlier: a kernel failed on GPU 0: an illegal memory access was "
                 "encountered (CUDA_ERROR_ILLEGAL_ADDRESS); EDGESDK_CUDA_SYNC=1 tells which");
    }
    // The other handle shares the GPU's fate.
    CHECK_EQ(healthy->SetInput(0, x, kBytes), EDGESDK_OK);
    CHECK_EQ(healthy->Run(), EDGESDK_ERROR_KERNEL);
    CHECK_EQ(healthy->Run(), EDGESDK_ERROR_DEVICE);
    CHECK(strstr(healthy->last_error(), "does nothing more") != nullptr);
  }
  CHECK_EQ(fake_cuda_live(), 0);
  Open model(*good);  // the GPU's context is a new one
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(waiting_each_time_names_the_kernel) {
  World world;
  setenv("EDGESDK_CUDA_SYNC", "1", 1);
  std::unique_ptr<TestPlan> test = Simple();
  {
    Open model(*test);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    CHECK_TEXT(InfoOf(model).replays_reason, "EDGESDK_CUDA_SYNC=1");
  }
  test->steps[1].launch = &kCrash;
  Open model(*test);
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
  CHECK_TEXT(model->last_error(),
             "crash: an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)");
}

TEST(a_refused_launch_names_the_kernel) {
  World world;
  setenv("EDGESDK_CUDA_GRAPH", "0", 1);
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  fake_cuda_fail("cuLaunchKernel", 2, 701);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
  CHECK_TEXT(model->last_error(),
             "twice: too many resources requested for launch (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)");
}

TEST(graphs_may_be_turned_off_or_not_work) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  setenv("EDGESDK_CUDA_GRAPH", "0", 1);
  {
    Open model(*test);
    CHECK_TEXT(InfoOf(model).replays_reason, "EDGESDK_CUDA_GRAPH=0");
    for (int i = 0; i < 2; ++i) CheckRun(model, {i, 2, 3, 4}, SimpleResult({i, 2, 3, 4}));
    CHECK_EQ(fake_cuda_calls("cuGraphLaunch"), 0);
    CHECK_EQ(fake_cuda_calls("cuLaunchKernel"), 4);
  }
  unsetenv("EDGESDK_CUDA_GRAPH");
  if (!kHasGraphs) return;
  Open model(*test);
  fake_cuda_fail("cuGraphInstantiateWithFlags", 1, 2);
  for (int i = 0; i < 2; ++i) CheckRun(model, {i, 2, 3, 4}, SimpleResult({i, 2, 3, 4}));
  CHECK_EQ(InfoOf(model).replays, 0);
  CHECK_TEXT(InfoOf(model).replays_reason, "a graph: out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
  CHECK_EQ(fake_cuda_calls("cuGraphLaunch"), 0);
}

// The stand-in's clock: 5000 ns for add, 7000 for twice, 1000 for a copy.
TEST(profiles_come_from_the_gpus_clock) {
  World world;
  std::unique_ptr<TestPlan> test = Mixed();
  Open model(*test);
  Values x = {1, 2, 3, 4};
  CheckMixedRun(model, x);
  model->SetProfiling(true);
  for (int i = 0; i < 3; ++i) CheckMixedRun(model, x);
  const uint64_t wanted[] = {0, 5000, 1000, 7000, 5000, 7000, 1000, 0, 1000, 7000, 5000};
  for (int32_t i = 0; i < 11; ++i) {
    edgesdk_layer_info layer = {};
    CHECK_EQ(model->LayerInfo(i, &layer), EDGESDK_OK);
    if (wanted[i] == 0) {  // of the CPU, by its clock
      CHECK(layer.total_ns >= layer.last_ns);
      continue;
    }
    // Events give milliseconds in 24 bits.
    CHECK(layer.last_ns + 1 >= wanted[i] && layer.last_ns <= wanted[i] + 1);
    CHECK(layer.total_ns + 3 >= 3 * wanted[i] && layer.total_ns <= 3 * wanted[i] + 3);
  }
  // x to the GPU, y and u from it; z is the CPU's.
  uint64_t transfer_ns = InfoOf(model).transfer_ns;
  CHECK(transfer_ns + 3 >= 3000 && transfer_ns <= 3003);
  model->SetProfiling(false);
  CheckMixedRun(model, x);
}

TEST(boards_share_their_memory_and_copy_nothing) {
  World world;
  fake_cuda_settings()->integrated = 1;
  for (int capability : {53, 87}) {
    fake_cuda_settings()->capability = capability;
    std::unique_ptr<TestPlan> test = Simple();
    test->images = {ImageOf(Cubin(capability), kEdgertCubin, capability)};
    test->Finish();
    DeviceBlock block;
    Open model(*test);
    CHECK_TEXT(model.error(), "");
    CHECK_EQ(InfoOf(model).unified_memory, 1);
    int before = Copies();  // of the weights
    for (int32_t i = 0; i < 3; ++i) CheckRun(model, {i, 2, 3, 4}, SimpleResult({i, 2, 3, 4}));
    CHECK_EQ(Copies(), before);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult({2, 2, 3, 4}));
    CHECK_EQ(Copies(), before);
    // The caller's own block is another memory.
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, block.pointer(), kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckValues(block.values(), SimpleResult({2, 2, 3, 4}));
    CheckOutput(model, SimpleResult({2, 2, 3, 4}));
    CHECK_EQ(Copies(), before + 1);
    CheckRun(model, {8, 2, 3, 4}, SimpleResult({8, 2, 3, 4}));
  }
}

TEST(a_mixed_model_on_a_board) {
  World world;
  fake_cuda_settings()->integrated = 1;
  fake_cuda_settings()->capability = 53;
  std::unique_ptr<TestPlan> test = Mixed();
  test->images = {ImageOf(Cubin(53), kEdgertCubin, 53)};
  test->Finish();
  Open model(*test);
  for (int32_t i = 0; i < 3; ++i) {
    Values x = {i, 2, 3, 4};
    CheckMixedRun(model, x);
  }
}

TEST(outputs_that_are_inputs_or_constants) {
  World world;
  TestPlan test = DevicePlan();
  for (const char* name : {"on_gpu", "on_cpu", "constant"}) {
    test.outputs.push_back({name, EDGESDK_INT32, 1, kFour, kBytes});
  }
  test.tensors = {Four(kEdgertDeviceInput, 0, 0), Four(kEdgertDeviceOutput, 0, 0),
                  Four(kEdgertInput, 0, 0),       Four(kEdgertDeviceOutput, 1, 0),
                  Four(kEdgertOutput, 2, 0),      Four(kEdgertWeight, 0, 64),
                  Four(kEdgertDeviceOutput, 3, 0)};
  test.Step(nullptr, "copy", {0, 1});  // on the GPU
  test.Step(nullptr, "copy", {2, 3});  // to it
  test.Step(nullptr, "copy", {1, 4});  // from it
  test.Step(nullptr, "copy", {5, 6});
  test.Finish();
  Open model(test);
  for (int32_t first : {1, 2}) {
    alignas(64) int32_t x[] = {first, 2, 3, 4};
    CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    for (int32_t i = 0; i < 4; ++i) {
      const void* data = nullptr;
      CHECK_EQ(model->GetOutput(i, &data, nullptr), EDGESDK_OK);
      CheckValues(data, i < 3 ? Values{first, 2, 3, 4} : Values{100, 200, 300, 400});
    }
  }
}

TEST(tensors_of_no_bytes) {
  World world;
  CheckTensorsOfNoBytes();
}

// The C API, with a library that was linked as real ones are.
TEST(a_program_with_a_library_for_a_gpu) {
  World world;
  ProgramOptions options;
  options.device_index = 3;
  edgesdk_model* model = nullptr;
  CHECK_EQ(edgesdk_open_model_gpu(EDGESDK_ABI_VERSION, &options, &model),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK(model == nullptr);
  CHECK_TEXT(options.reason, "there is no GPU 3: the driver finds 1");
  // An older program's options end before the index.
  options.struct_size = offsetof(edgesdk_options, device_index);
  CHECK_EQ(edgesdk_open_model_gpu(EDGESDK_ABI_VERSION, &options, &model), EDGESDK_OK);

  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "Paper GPU");
  CheckProgramRun(model);

  DeviceBlock out;
  void* in = nullptr;
  size_t size_bytes = 0;
  CHECK_EQ(edgesdk_model_get_input_device(model, 0, &in, &size_bytes), EDGESDK_OK);
  CHECK_EQ(size_bytes, kBytes);
  CHECK_EQ(edgesdk_model_set_input_device(model, 0, in, kBytes), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_set_output_device(model, 0, out.pointer(), kBytes), EDGESDK_OK);
  void* where = nullptr;
  CHECK_EQ(edgesdk_model_get_output_device(model, 0, &where, nullptr), EDGESDK_OK);
  CHECK(where == out.pointer());
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CheckValues(out.values(), {12, 16, 20, 24});
  edgesdk_model_close(model);
}

TEST(a_failure_on_the_cpu_leaves_nothing_in_the_queue) {
  World world;
  std::unique_ptr<TestPlan> test = Mixed();
  test->steps[7].kernel = [](void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -7; };
  Open model(*test);
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
    CHECK_TEXT(model->last_error(), "on_cpu failed with code -7");
  }
}

}  // namespace

const edgert_accelerator& the_accelerator = edgert_cuda;
const edgert_image the_image = {kEdgertCubin, 90, reinterpret_cast<const uint8_t*>(kCubin),
                                sizeof(kCubin)};

int main(int argc, char** argv) { return check::Main(argc, argv); }
