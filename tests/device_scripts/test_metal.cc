// edgert on Apple's Metal, with a stand-in for it and the Objective-C runtime (fake_metal/):
// values, what is copied and what is not, ownership of objects, and every way to fail.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "device_plans.h"
#include "fake_metal/fake_metal.h"

extern "C" edgesdk_status edgesdk_open_model_metal(uint32_t, const edgesdk_options*,
                                                   edgesdk_model**);

namespace {

const int32_t* Read(const FakeMetalLaunch& launch, int argument) {
  return static_cast<const int32_t*>(launch.arguments[argument]);
}

// Whether the kernel was given so many whole tensors.
bool HasRoom(const FakeMetalLaunch& launch, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (launch.bytes[i] < kBytes) return false;
  }
  return launch.num_arguments >= count;
}

// out[i] = a[i] + b[i]
const char* AddKernel(const FakeMetalLaunch& launch) {
  if (!HasRoom(launch, 3)) return "beyond a buffer";
  int32_t* out = static_cast<int32_t*>(launch.arguments[2]);
  for (int i = 0; i < 4; ++i) out[i] = Read(launch, 0)[i] + Read(launch, 1)[i];
  return nullptr;
}

// out[i] = 2 a[i]
const char* TwiceKernel(const FakeMetalLaunch& launch) {
  if (!HasRoom(launch, 2)) return "beyond a buffer";
  int32_t* out = static_cast<int32_t*>(launch.arguments[1]);
  for (int i = 0; i < 4; ++i) out[i] = 2 * Read(launch, 0)[i];
  return nullptr;
}

FakeMetalLaunch last_shape;
const char* ShapeKernel(const FakeMetalLaunch& launch) {
  last_shape = launch;
  return nullptr;
}

const char* CrashKernel(const FakeMetalLaunch&) { return "Caused GPU Address Fault Error"; }

constexpr char kSource[] =
    "kernel void add(int* a, int* b, int* c) {}\n"
    "kernel void twice(int* a, int* b) {}\n"
    "kernel void shape() {}\n"
    "kernel void crash(int* a, int* b) {}\n";

edgert_image Image(const std::string& text) { return ImageOf(text, kEdgertMetalSource); }

// The world at the start of a test, and nothing left and nothing done wrong at its end.
struct World {
  World() {
    fake_metal_reset();
    fake_metal_register({"add", AddKernel, 3, 5000, 1024});
    fake_metal_register({"twice", TwiceKernel, 2, 7000, 1024});
    fake_metal_register({"shape", ShapeKernel, 0, 1, 256});
    fake_metal_register({"crash", CrashKernel, 2, 1, 1024});
    setenv("EDGESDK_METAL_LIBRARY", LibraryOf(reinterpret_cast<void*>(fake_metal_reset)).c_str(),
           1);
    unsetenv("EDGESDK_METAL_SYNC");
  }
  ~World() {
    CHECK_EQ(fake_metal_live(), 0);
    CHECK_TEXT(fake_metal_faults(), "");
  }
};

// A buffer of the program's own.
struct Callers {
  void* buffer;
  explicit Callers(size_t bytes = kBytes, bool is_private = false)
      : buffer(fake_metal_new_buffer(bytes, is_private)) {}
  ~Callers() { fake_metal_release(buffer); }
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;
  int32_t* values() { return static_cast<int32_t*>(fake_metal_contents(buffer)); }
};

// The first test: later ones have a driver loaded.
TEST(a_driver_that_cannot_be_loaded) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  setenv("EDGESDK_METAL_LIBRARY", "/no/such/Metal", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no Metal, which Apple's systems have: cannot use /no/such/Metal, as "
             "EDGESDK_METAL_LIBRARY says");
  setenv("EDGESDK_METAL_LIBRARY", "libm.so.6", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no Metal, which Apple's systems have: cannot use libm.so.6 (has no objc_getClass), "
             "as EDGESDK_METAL_LIBRARY says");
  unsetenv("EDGESDK_METAL_LIBRARY");
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no Metal, which Apple's systems have: cannot use "
             "/System/Library/Frameworks/Metal.framework/Metal");
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
  // A run is one command buffer.
  CHECK_EQ(fake_metal_calls("commandBuffer"), 3);
  CHECK_EQ(fake_metal_calls("waitUntilCompleted"), 3);
  CHECK_EQ(fake_metal_calls("dispatchThreadgroups:threadsPerThreadgroup:"), 6);
  CHECK(!fake_metal_fast_math());
  CHECK_EQ(fake_metal_language_version(), 0x20002u);
}

TEST(says_what_it_runs_on) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  edgesdk_device_info info = InfoOf(model);
  CHECK_TEXT(info.kind, "metal");
  CHECK_TEXT(info.name, "Paper M1");
  CHECK_EQ(info.index, 0);
  CHECK_EQ(info.unified_memory, 1);
  CHECK_EQ(info.replays, 0);
  CHECK_EQ(info.memory_bytes, size_t{1} << 30);
  CHECK_EQ(info.weights_bytes, 80u);
  CHECK_EQ(info.activations_bytes, 128u);
  CHECK_EQ(info.io_bytes, 32u);
  CHECK(info.load_ns > 0);
  CHECK(info.driver == nullptr);
  CHECK(info.code_cache == nullptr);
}

TEST(which_gpu) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {1, nullptr}),
             "there is no GPU 1: Apple's devices have one");
  // A program of macOS without Core Graphics.
  fake_metal_settings()->has_default_device = false;
  {
    Open model(*test);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  }
  fake_metal_settings()->has_any_device = false;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "Metal finds no GPU");
}

TEST(the_launch_is_what_the_plan_says) {
  World world;
  TestPlan test = DevicePlan();
  edgert_launch launch = {"shape", {3, 5, 7}, {32, 2, 4}, 0};
  test.Step(nullptr, "shape", {}, &launch);
  test.inputs.clear();
  test.outputs.clear();
  test.Finish();
  Open model(test);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(last_shape.grid[i], size_t{launch.grid[i]});
    CHECK_EQ(last_shape.block[i], size_t{launch.block[i]});
  }
}

TEST(steps_of_cpu_and_gpu_take_turns) {
  World world;
  std::unique_ptr<TestPlan> test = Mixed();
  Open model(*test);
  CHECK_TEXT(model.error(), "");
  for (int32_t first : {1, -50, 7}) CheckMixedRun(model, {first, 2, 3, 4});
}

TEST(inputs_and_outputs_are_in_the_memory_of_both) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  CheckRun(model, {5, 6, 7, 8}, SimpleResult({5, 6, 7, 8}));
  void* own = nullptr;
  void* buffer = nullptr;
  CHECK_EQ(model->OwnInput(0, &own, nullptr), EDGESDK_OK);
  CHECK_EQ(model->DeviceAddress(kEdgertInput, 0, &buffer, nullptr), EDGESDK_OK);
  CHECK(fake_metal_contents(buffer) == own);
  const int32_t x[] = {9, 9, 9, 9};
  memcpy(own, x, kBytes);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CheckOutput(model, SimpleResult({9, 9, 9, 9}));
}

TEST(the_callers_queue_and_buffers) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  void* queue = fake_metal_new_queue();
  {
    Open model(*test, {0, queue});
    CHECK_TEXT(model.error(), "");
    fake_metal_release(queue);  // the handle has its own hold on it
    Callers in;
    Callers out;
    const int32_t x[] = {5, 6, 7, 8};
    memcpy(in.values(), x, kBytes);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, in.buffer, kBytes), EDGESDK_OK);
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, out.buffer, kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckValues(out.values(), SimpleResult({5, 6, 7, 8}));
    CheckOutput(model, SimpleResult({5, 6, 7, 8}));  // brought on demand
    // From the host into the caller's buffer.
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);

    Callers small(kBytes - 1);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, small.buffer, kBytes),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK_TEXT(model->last_error(), "the buffer has 15 bytes, 16 are needed");
    Callers hidden(kBytes, true);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, hidden.buffer, kBytes),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK_TEXT(model->last_error(),
               "the buffer is the GPU's alone: make it with MTLResourceStorageModeShared");
    void* other = fake_metal_new_queue();
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, other, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(model->last_error(), " is no MTLBuffer") != nullptr);
    fake_metal_release(other);
    CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {0, small.buffer}),
               "device_stream is no MTLCommandQueue of Metal");
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  }
}

TEST(handles_share_code_and_weights) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open first(*test);
  Open second(*test);
  CHECK_EQ(fake_metal_calls("newLibraryWithSource:options:error:"), 1);
  CHECK_EQ(fake_metal_calls("newComputePipelineStateWithFunction:error:"), 2);
  CHECK_EQ(fake_metal_calls("newBufferWithBytes:length:options:"), 1);
  CheckRun(first, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  CheckRun(second, {5, 6, 7, 8}, SimpleResult({5, 6, 7, 8}));
}

TEST(threads_with_a_handle_each) {
  World world;
  CheckThreadsWithAHandleEach();
}

TEST(code_that_is_refused) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  std::string source = "kernel void add(int* a) {\n}\n\nkernel void twice(int* a) {\n#error\n}\n";
  test->images = {Image(source)};
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "Metal refuses the code of twice on Paper M1: program_source:5:3: error: a register "
             "that paper has not");
  test->images.clear();
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "the library has no code for the GPU");
  test = Simple();
  const edgert_launch missing = {"missing", {1, 1, 1}, {1, 1, 1}, 0};
  test->steps[1].launch = &missing;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "missing is not in the library's code for the GPU");
  test = Simple();
  fake_metal_fail("newComputePipelineStateWithFunction:error:", 2);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "twice: Compiler encountered an internal error");
}

TEST(launches_are_checked_against_the_pipeline) {
  World world;
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {256, 1, 1}, 0}), "");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {16, 17, 1}, 0}),
             "shape needs 272 threads in a group; with its registers Paper M1 has room for 256");
}

TEST(no_memory) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  fake_metal_settings()->max_buffer = 100;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 128 bytes of activations on Paper M1 (at most 100 at once)");
  fake_metal_settings()->max_buffer = 79;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 80 bytes of weights on Paper M1 (at most 79 at once)");
}

TEST(any_call_may_fail) {
  CheckAnyCallMayFail<World>(
      {"MTLCreateSystemDefaultDevice", "new",
       "stringWithUTF8String:", "newLibraryWithSource:options:error:", "newFunctionWithName:",
       "newComputePipelineStateWithFunction:error:", "newBufferWithLength:options:",
       "newBufferWithBytes:length:options:", "newCommandQueue", "commandBuffer",
       "computeCommandEncoder", "waitUntilCompleted"},
      fake_metal_fail, fake_metal_calls);
}

TEST(a_kernel_that_fails) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  test->steps[1].launch = &kCrash;
  Open model(*test);
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
    CHECK_TEXT(model->last_error(),
               "a kernel failed on Paper M1: Caused GPU Address Fault Error; "
               "EDGESDK_METAL_SYNC=1 tells which");
  }
  setenv("EDGESDK_METAL_SYNC", "1", 1);
  {
    Open slow(*test);
    CHECK_EQ(slow->SetInput(0, x, kBytes), EDGESDK_OK);
    CHECK_EQ(slow->Run(), EDGESDK_ERROR_KERNEL);
    CHECK_TEXT(slow->last_error(), "crash: Caused GPU Address Fault Error");
  }
  // What happens to an app in the background is over when it comes back.
  unsetenv("EDGESDK_METAL_SYNC");
  std::unique_ptr<TestPlan> healthy = Simple();
  Open other(*healthy);
  fake_metal_fail("waitUntilCompleted", 1);
  CHECK_EQ(other->SetInput(0, x, kBytes), EDGESDK_OK);
  CHECK_EQ(other->Run(), EDGESDK_ERROR_KERNEL);
  CheckRun(other, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(times_are_the_gpus) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  model->SetProfiling(true);
  for (int i = 0; i < 3; ++i) CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  const uint64_t wanted[] = {5000, 7000};
  for (int32_t i = 0; i < 2; ++i) {
    edgesdk_layer_info layer;
    CHECK_EQ(model->LayerInfo(i, &layer), EDGESDK_OK);
    // Metal gives seconds as a double.
    CHECK(layer.last_ns + 1 >= wanted[i] && layer.last_ns <= wanted[i] + 1);
    CHECK(layer.total_ns + 3 >= 3 * wanted[i] && layer.total_ns <= 3 * wanted[i] + 3);
  }
  CHECK_EQ(InfoOf(model).transfer_ns, 0u);
}

TEST(tensors_of_no_bytes) {
  World world;
  CheckTensorsOfNoBytes();
}

TEST(a_forked_child_is_refused) {
  World world;
  CheckForkedChildIsRefused(
      "Metal cannot be used in a child of fork() when the parent has used it");
}

// The C API, with a library that was linked as real ones are.
TEST(a_program_with_a_library_for_metal) {
  World world;
  ProgramOptions options;
  options.device_index = 3;
  edgesdk_model* model = nullptr;
  CHECK_EQ(edgesdk_open_model_metal(EDGESDK_ABI_VERSION, &options, &model),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(options.reason, "there is no GPU 3: Apple's devices have one");
  CHECK_EQ(edgesdk_open_model_metal(EDGESDK_ABI_VERSION, nullptr, &model), EDGESDK_OK);
  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "Paper M1");
  CheckProgramRun(model);
  edgesdk_model_close(model);
}

}  // namespace

const edgert_accelerator& the_accelerator = edgert_metal;
const edgert_image the_image = {kEdgertMetalSource, 0, reinterpret_cast<const uint8_t*>(kSource),
                                sizeof(kSource)};

int main(int argc, char** argv) { return check::Main(argc, argv); }
