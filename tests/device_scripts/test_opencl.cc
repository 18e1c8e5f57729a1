// edgert on an OpenCL device, with a stand-in for the vendor's library (fake_opencl/): values, what
// is copied and what is not, the code's cache, and every way to fail.

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_plans.h"
#include "fake_opencl/fake_opencl.h"
#include "opencl_driver.h"

extern "C" edgesdk_status edgesdk_open_model_opencl(uint32_t, const edgesdk_options*,
                                                    edgesdk_model**);

namespace {

using edgert::opencl::Context;
using edgert::opencl::Device;
using edgert::opencl::Memory;
using edgert::opencl::Queue;

int32_t* At(const FakeClLaunch& launch, int argument) {
  return launch.bytes[argument] < kBytes ? nullptr
                                         : static_cast<int32_t*>(launch.arguments[argument]);
}

// out[i] = a[i] + b[i]
int AddKernel(const FakeClLaunch& launch) {
  const int32_t* a = At(launch, 0);
  const int32_t* b = At(launch, 1);
  int32_t* out = At(launch, 2);
  if (a == nullptr || b == nullptr || out == nullptr) return -5;
  for (int i = 0; i < 4; ++i) out[i] = a[i] + b[i];
  return 0;
}

// out[i] = 2 a[i]
int TwiceKernel(const FakeClLaunch& launch) {
  const int32_t* a = At(launch, 0);
  int32_t* out = At(launch, 1);
  if (a == nullptr || out == nullptr) return -5;
  for (int i = 0; i < 4; ++i) out[i] = 2 * a[i];
  return 0;
}

FakeClLaunch last_shape;
int ShapeKernel(const FakeClLaunch& launch) {
  last_shape = launch;
  return 0;
}

int CrashKernel(const FakeClLaunch&) { return -5; }

constexpr char kSource[] =
    "__kernel void add(int* a, int* b, int* c) {}\n"
    "__kernel void twice(int* a, int* b) {}\n"
    "__kernel void shape() {}\n"
    "__kernel void crash(int* a, int* b) {}\n";

edgert_image Image(const std::string& text) { return ImageOf(text, kEdgertOpenclSource); }

std::string FolderOf(const void* address) {
  std::string path = LibraryOf(address);
  return path.substr(0, path.rfind('/'));
}

// A folder of its own, removed at the end.
struct Folder {
  std::string path;
  Folder() {
    char pattern[] = "/tmp/edgesdk-test-XXXXXX";
    path = mkdtemp(pattern);
  }
  ~Folder() {
    std::string command = "rm -rf " + path;
    CHECK_EQ(system(command.c_str()), 0);
  }
};

// The world at the start of a test, and nothing left and nothing done wrong at its end.
struct World {
  Folder cache;

  World() {
    fake_cl_reset();
    fake_cl_register({"add", AddKernel, 3, 5000, 1024, 0});
    fake_cl_register({"twice", TwiceKernel, 2, 7000, 1024, 0});
    fake_cl_register({"shape", ShapeKernel, 0, 1, 256, 1024});
    fake_cl_register({"crash", CrashKernel, 2, 1, 1024, 0});
    setenv("EDGESDK_OPENCL_LIBRARY", LibraryOf(reinterpret_cast<void*>(fake_cl_reset)).c_str(), 1);
    setenv("EDGESDK_CACHE_DIR", cache.path.c_str(), 1);
    unsetenv("EDGESDK_OPENCL_DEVICE");
    unsetenv("EDGESDK_OPENCL_SYNC");
    unsetenv("EDGESDK_OPENCL_COPY");
  }
  ~World() {
    CHECK_EQ(fake_cl_live(), 0);
    CHECK_TEXT(fake_cl_faults(), "");
  }
};

int Copies() {
  return fake_cl_calls("clEnqueueReadBuffer") + fake_cl_calls("clEnqueueWriteBuffer") +
         fake_cl_calls("clEnqueueCopyBuffer");
}

// A queue of the program's own, with its context and a buffer there.
struct Callers {
  Context context;
  Queue queue;
  Memory buffer;
  Device device;

  explicit Callers(uint64_t bytes = kBytes, uint64_t properties = 0) {
    Device devices[4];
    int32_t result = 0;
    Symbol<int32_t (*)(void*, uint64_t, uint32_t, Device*, uint32_t*)>("clGetDeviceIDs")(
        nullptr, 0xFFFFFFFF, 4, devices, nullptr);
    device = devices[1];  // the GPU
    context = Symbol<Context (*)(void*, uint32_t, Device*, void*, void*, int32_t*)>(
        "clCreateContext")(nullptr, 1, &device, nullptr, nullptr, &result);
    queue = Symbol<Queue (*)(Context, Device, uint64_t, int32_t*)>("clCreateCommandQueue")(
        context, device, properties, &result);
    buffer = Symbol<Memory (*)(Context, uint64_t, size_t, void*, int32_t*)>("clCreateBuffer")(
        context, 1, bytes, nullptr, &result);
  }
  ~Callers() {
    Symbol<int32_t (*)(Memory)>("clReleaseMemObject")(buffer);
    Symbol<int32_t (*)(Queue)>("clReleaseCommandQueue")(queue);
    Symbol<int32_t (*)(Context)>("clReleaseContext")(context);
  }
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;

  void Write(const Values& values) {  // does not wait
    Symbol<int32_t (*)(Queue, Memory, uint32_t, size_t, size_t, const void*, uint32_t, void*,
                       void*)>("clEnqueueWriteBuffer")(queue, buffer, 0, 0, kBytes, values.data(),
                                                       0, nullptr, nullptr);
  }
  Values Read() {
    Values values(4);
    Symbol<int32_t (*)(Queue, Memory, uint32_t, size_t, size_t, void*, uint32_t, void*, void*)>(
        "clEnqueueReadBuffer")(queue, buffer, 1, 0, kBytes, values.data(), 0, nullptr, nullptr);
    return values;
  }
};

// The first test: later ones have a driver loaded.
TEST(a_driver_that_cannot_be_loaded) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  setenv("EDGESDK_OPENCL_LIBRARY", "/no/such/libOpenCL.so", 1);
  std::string advice =
      "; install the GPU's driver and the loader (on Debian ocl-icd-libopencl1), or set "
      "EDGESDK_OPENCL_LIBRARY to its library";
  CHECK_TEXT(
      OpenError(*test, EDGESDK_ERROR_DEVICE),
      "no OpenCL: cannot use /no/such/libOpenCL.so, as EDGESDK_OPENCL_LIBRARY says" + advice);
  setenv("EDGESDK_OPENCL_LIBRARY", "libm.so.6", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no OpenCL: cannot use libm.so.6 (has no clGetPlatformIDs), as "
             "EDGESDK_OPENCL_LIBRARY says" +
                 advice);
  setenv("EDGESDK_OPENCL_LIBRARY", LibraryOf(reinterpret_cast<void*>(fake_cl_reset)).c_str(), 1);
  fake_cl_settings()->no_platforms = true;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no OpenCL: cannot use " + LibraryOf(reinterpret_cast<void*>(fake_cl_reset)) +
                 " (knows no driver: is one listed in /etc/OpenCL/vendors?), as "
                 "EDGESDK_OPENCL_LIBRARY says" +
                 advice);
  fake_cl_settings()->no_platforms = false;
  fake_cl_settings()->num_gpus = 0;
  fake_cl_settings()->num_cpus = 0;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "the OpenCL driver finds no device");
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
  // One copy of weights; then an upload, two kernels and a download each time.
  CHECK_EQ(fake_cl_calls("clEnqueueNDRangeKernel"), 6);
  CHECK_EQ(Copies(), 1 + 2 * 3);
  // Arguments are set once.
  CHECK_EQ(fake_cl_calls("clSetKernelArg"), 5);
}

TEST(says_what_it_runs_on) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  edgesdk_device_info info = InfoOf(model);
  CHECK_TEXT(info.kind, "opencl");
  CHECK_TEXT(info.name, "Paper GPU 0");
  CHECK_TEXT(info.driver, "OpenCL 1.2, driver 7.1");
  CHECK_EQ(info.index, 0);
  CHECK_EQ(info.unified_memory, 0);
  CHECK_EQ(info.replays, 0);
  CHECK_EQ(info.memory_bytes, size_t{1} << 30);
  CHECK_EQ(info.weights_bytes, 80u);
  CHECK_EQ(info.activations_bytes, 128u);
  CHECK_EQ(info.io_bytes, 32u);
  CHECK_EQ(info.code_from_cache, 0);
  CHECK(info.load_ns > 0);
  // A program of the first header has room for less.
  edgesdk_device_info old = {};
  old.struct_size = offsetof(edgesdk_device_info, driver);
  CHECK_EQ(model->DeviceInfo(&old), EDGESDK_OK);
  CHECK_TEXT(old.name, "Paper GPU 0");
  CHECK(old.driver == nullptr);
}

TEST(gpus_come_first) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  fake_cl_settings()->num_cpus = 2;
  fake_cl_settings()->num_gpus = 2;
  const char* names[] = {"Paper GPU 0", "Paper GPU 1", "Paper CPU 0", "Paper CPU 1"};
  for (int32_t i = 0; i < 4; ++i) {
    Open model(*test, {i, nullptr});
    CHECK_TEXT(InfoOf(model).name, names[i]);
    CHECK_EQ(InfoOf(model).index, i);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  }
  for (int32_t i : {-1, 4}) {
    CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {i, nullptr}),
               "there is no device " + std::to_string(i) +
                   ": OpenCL finds 'Paper GPU 0', 'Paper GPU 1', 'Paper CPU 0', 'Paper CPU 1'");
  }
  setenv("EDGESDK_OPENCL_DEVICE", "cpu 1", 1);
  {
    Open model(*test);
    CHECK_TEXT(InfoOf(model).name, "Paper CPU 1");
  }
  setenv("EDGESDK_OPENCL_DEVICE", "Mali", 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "no OpenCL device is called 'Mali', as EDGESDK_OPENCL_DEVICE says; there are "
             "'Paper GPU 0', 'Paper GPU 1', 'Paper CPU 0', 'Paper CPU 1'");
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
    CHECK_EQ(last_shape.global[i], size_t{launch.grid[i]} * launch.block[i]);
    CHECK_EQ(last_shape.local[i], size_t{launch.block[i]});
  }
}

TEST(steps_of_cpu_and_gpu_take_turns) {
  for (uint32_t unified : {0, 1}) {
    World world;
    fake_cl_settings()->unified = unified;
    std::unique_ptr<TestPlan> test = Mixed();
    Open model(*test);
    CHECK_TEXT(model.error(), "");
    CHECK_EQ(InfoOf(model).unified_memory, static_cast<int32_t>(unified));
    for (int32_t first : {1, -50, 7}) {
      Values x = {first, 2, 3, 4};
      CheckMixedRun(model, x);
    }
  }
}

TEST(shared_memory_is_not_copied) {
  World world;
  fake_cl_settings()->unified = 1;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  int before = Copies();  // of the weights
  for (int32_t i = 0; i < 3; ++i) CheckRun(model, {i, 2, 3, 4}, SimpleResult({i, 2, 3, 4}));
  CHECK_EQ(Copies(), before);
  CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_OK);
  CheckOutput(model, SimpleResult({2, 2, 3, 4}));
  CHECK_EQ(Copies(), before);
  CheckRun(model, {8, 2, 3, 4}, SimpleResult({8, 2, 3, 4}));
}

TEST(a_driver_that_maps_elsewhere_each_time_copies) {
  World world;
  fake_cl_settings()->unified = 1;
  fake_cl_settings()->moves_views = true;
  std::unique_ptr<TestPlan> test = Mixed();
  Open model(*test);
  CHECK_EQ(InfoOf(model).unified_memory, 0);
  CheckMixedRun(model, {1, 2, 3, 4});
}

TEST(a_driver_that_begins_to_move_memory_later) {
  World world;
  fake_cl_settings()->unified = 1;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  fake_cl_settings()->moves_views = true;
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_DEVICE);
  CHECK_TEXT(model->last_error(),
             "the driver of Paper GPU 0 moves mapped memory: set EDGESDK_OPENCL_COPY=1");
  setenv("EDGESDK_OPENCL_COPY", "1", 1);
  Open copying(*test);
  CHECK_EQ(InfoOf(copying).unified_memory, 0);
  CheckRun(copying, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
}

TEST(the_callers_queue_and_buffers) {
  for (uint32_t unified : {0, 1}) {
    World world;
    fake_cl_settings()->unified = unified;
    std::unique_ptr<TestPlan> test = Simple();
    Callers in;
    Open model(*test, {0, in.queue});
    CHECK_TEXT(model.error(), "");
    // What the caller has put into it comes first.
    Values x = {5, 6, 7, 8};
    in.Write(x);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, in.buffer, kBytes), EDGESDK_OK);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult(x));
    // A profile does not use that queue, and waits for it.
    Values other = {9, 9, 9, 9};
    in.Write(other);
    model->SetProfiling(true);
    CHECK_EQ(model->Run(), EDGESDK_OK);
    CheckOutput(model, SimpleResult(other));
    model->SetProfiling(false);
    void* own = nullptr;
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, nullptr, 0), EDGESDK_OK);
    CHECK_EQ(model->DeviceAddress(kEdgertInput, 0, &own, nullptr), EDGESDK_OK);
    CHECK(own != nullptr && own != in.buffer);
    CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
    // From the host's view into the caller's buffer.
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, in.buffer, kBytes), EDGESDK_OK);
    CheckRun(model, x, SimpleResult(x));
    CHECK(in.Read() == SimpleResult(x));
    CHECK_EQ(model->BindDevice(kEdgertOutput, 0, nullptr, 0), EDGESDK_OK);
    Callers foreign;
    Callers small(kBytes - 1);
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, foreign.buffer, kBytes),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK_TEXT(model->last_error(),
               "the buffer belongs to another context: open the model with a queue of that one as "
               "device_stream");
    CHECK_EQ(model->BindDevice(kEdgertInput, 0, small.buffer, kBytes),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK_TEXT(model->last_error(), "the buffer has 15 bytes, 16 are needed");
  }
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Callers disordered(kBytes, 1);
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_INVALID_ARGUMENT, {0, disordered.queue}),
             "device_stream is a queue that executes out of order");
}

TEST(handles_share_code_and_weights) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Open first(*test);
  Open second(*test);
  CHECK_EQ(fake_cl_calls("clBuildProgram"), 1);
  CHECK_EQ(fake_cl_calls("clCreateContext"), 1);
  CheckRun(first, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  CheckRun(second, {5, 6, 7, 8}, SimpleResult({5, 6, 7, 8}));
}

TEST(threads_with_a_handle_each) {
  World world;
  fake_cl_settings()->unified = 1;
  CheckThreadsWithAHandleEach();
}

// What a new handle, with no other open, says about its code.
struct Loaded {
  bool from_cache;
  std::string cache;
};

Loaded Load(const TestPlan& test, const char* folder = nullptr) {
  Open model(test, {0, nullptr, folder});
  CHECK_TEXT(model.error(), "");
  if (model.status() != EDGESDK_OK) return {};
  CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  edgesdk_device_info info = InfoOf(model);
  return {info.code_from_cache != 0, info.code_cache};
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(built_code_is_kept) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  Loaded first = Load(*test);
  CHECK(!first.from_cache);
  CHECK_EQ(first.cache.rfind(world.cache.path + "/plan-", 0), 0u);
  Loaded second = Load(*test);
  CHECK(second.from_cache);
  CHECK_TEXT(second.cache, first.cache);
  CHECK_EQ(fake_cl_calls("clCreateProgramWithSource"), 1);
  // The next driver compiles anew, and so does other code.
  fake_cl_settings()->driver_version = "7.2";
  Loaded third = Load(*test);
  CHECK(!third.from_cache);
  CHECK(third.cache != first.cache);
  std::string source = std::string(kSource) + "// other";
  test->images = {Image(source)};
  test->Finish();
  CHECK(!Load(*test).from_cache);
}

TEST(damaged_files_are_built_anew) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  std::string path = Load(*test).cache;
  std::string good = ReadFile(path);
  CHECK(good.size() > 100);
  std::string other_key = good;
  other_key[8] ^= 1;
  std::string flipped = good;
  flipped[good.size() - 3] ^= 1;
  std::string huge = good;
  huge[30] = 0x7f;  // of the size
  for (const std::string& text : {std::string(), std::string("EDGECL1\n"), good.substr(0, 50),
                                  good + "x", other_key, flipped, huge}) {
    WriteFile(path, text);
    CHECK(!Load(*test).from_cache);
    CHECK(ReadFile(path) == good);
  }
  // A file that is whole, and that the driver does not take.
  fake_cl_fail("clCreateProgramWithBinary", 1, -42);
  CHECK(!Load(*test).from_cache);
  fake_cl_fail("clBuildProgram", 1, -11);
  CHECK(!Load(*test).from_cache);
  CHECK(Load(*test).from_cache);
}

TEST(folders_for_built_code) {
  World world;
  Folder other;
  std::unique_ptr<TestPlan> test = Simple();
  // The program's choice wins, and is made if need be.
  std::string chosen = other.path + "/some/where";
  CHECK_EQ(Load(*test, chosen.c_str()).cache.rfind(chosen + "/plan-", 0), 0u);
  unsetenv("EDGESDK_CACHE_DIR");
  setenv("XDG_CACHE_HOME", other.path.c_str(), 1);
  CHECK_EQ(Load(*test).cache.rfind(other.path + "/edgesdk/opencl/plan-", 0), 0u);
  unsetenv("XDG_CACHE_HOME");
  std::string home = getenv("HOME") != nullptr ? getenv("HOME") : "";
  setenv("HOME", other.path.c_str(), 1);
  Loaded at_home = Load(*test);
  CHECK_EQ(at_home.cache.rfind(other.path + "/.cache/edgesdk/opencl/plan-", 0), 0u);
  unsetenv("HOME");
  CHECK_TEXT(Load(*test).cache, "not kept: HOME is not set, nor is EDGESDK_CACHE_DIR");
  setenv("HOME", home.c_str(), 1);
  Loaded refused = Load(*test, "/proc/none");
  CHECK(!refused.from_cache);
  CHECK_EQ(refused.cache.rfind("not kept: cannot write /proc/none/plan-", 0), 0u);
  // Shipped: beside the library, here the program that holds this code.
  std::string name = at_home.cache.substr(at_home.cache.rfind('/'));
  std::string shipped = FolderOf(reinterpret_cast<const void*>(&edgert_opencl)) + name;
  WriteFile(shipped, ReadFile(at_home.cache));
  Loaded beside = Load(*test, "/proc/none");
  CHECK(beside.from_cache);
  CHECK_TEXT(beside.cache, shipped);
  CHECK_EQ(unlink(shipped.c_str()), 0);
}

TEST(code_that_the_driver_refuses) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  std::string source =
      "__kernel void add(int* a) {\n}\n\n__kernel void twice(int* a) {\n#error\n}\n";
  test->images = {Image(source)};
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "Paper GPU 0 (OpenCL 1.2, driver 7.1) refuses the code of twice: build program "
             "failure (OpenCL error -11): <source>:5:1: error: a register that paper has not");
  source = "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n" + std::string(kSource);
  test->images = {Image(source)};
  test->Finish();
  Load(*test);
  for (const char* extensions : {"", "cl_khr_fp16_other xcl_khr_fp16 cl_khr_fp64"}) {
    fake_cl_settings()->extensions = extensions;
    // Another driver, whose code is not kept yet.
    fake_cl_settings()->driver_version = "8";
    CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
               "Paper GPU 0 has no cl_khr_fp16, which the library built for target 'test' uses");
  }
  test = Simple();
  fake_cl_settings()->has_compiler = 0;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "the driver of Paper GPU 0 has no compiler");
  test->images.clear();
  test->Finish();
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE), "the library has no code for the GPU");
}

TEST(a_kernel_that_is_not_in_the_code) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  const edgert_launch missing = {"missing", {1, 1, 1}, {1, 1, 1}, 0};
  test->steps[1].launch = &missing;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_DEVICE),
             "missing: invalid kernel name (OpenCL error -46)");
}

// "shape" has 1024 bytes of local memory and registers for groups of 256.
TEST(launches_are_checked_against_the_device) {
  World world;
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {256, 1, 1}, 0}), "");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {16, 17, 1}, 0}),
             "shape needs work-groups of 272; with its registers Paper GPU 0 has room for 256");
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {1, 1, 65}, 0}),
             "shape needs work-groups of 65 along z; Paper GPU 0 allows 64");
  fake_cl_settings()->local_bytes = 1023;
  CHECK_TEXT(LaunchError({"shape", {1, 1, 1}, {1, 1, 1}, 0}),
             "shape needs 1024 bytes of local memory; Paper GPU 0 has 1023");
}

TEST(parts_of_buffers_begin_where_the_device_wants_them) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  fake_cl_settings()->alignment_bits = 1024;
  CHECK_TEXT(
      OpenError(*test, EDGESDK_ERROR_DEVICE),
      "Paper GPU 0 wants parts of buffers at multiples of 128 bytes, and the library has one "
      "at 64: compile for a target whose [gpu] alignment-bytes is 128");
}

TEST(no_memory_on_the_device) {
  World world;
  std::unique_ptr<TestPlan> test = Simple();
  int all = 0;
  {
    Open model(*test);
    all = fake_cl_calls("clCreateBuffer");
  }
  CHECK_EQ(all, 4);  // weights, activations, input, output
  for (int nth = 1; nth <= all; ++nth) {
    fake_cl_fail("clCreateBuffer", nth, -4);
    std::string reason = OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(reason.rfind("no room for ", 0), 0u);
    CHECK(reason.find("memory object allocation failure (OpenCL error -4)") != std::string::npos);
    CHECK_EQ(fake_cl_live(), 0);
  }
  fake_cl_settings()->max_allocation = 100;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 128 bytes of activations on Paper GPU 0 (at most 100 at once): invalid "
             "buffer size (OpenCL error -61)");
  fake_cl_settings()->max_allocation = 79;
  CHECK_TEXT(OpenError(*test, EDGESDK_ERROR_OUT_OF_MEMORY),
             "no room for 80 bytes of weights on Paper GPU 0 (at most 79 at once): invalid buffer "
             "size (OpenCL error -61)");
}

struct UnifiedWorld : World {
  UnifiedWorld() { fake_cl_settings()->unified = 1; }
};

void Fail(const char* function, int nth) { fake_cl_fail(function, nth, -30); }

TEST(any_call_may_fail) {
  const std::vector<const char*> functions = {"clGetPlatformIDs",
                                              "clGetDeviceIDs",
                                              "clGetDeviceInfo",
                                              "clGetPlatformInfo",
                                              "clCreateContext",
                                              "clCreateCommandQueue",
                                              "clCreateBuffer",
                                              "clCreateSubBuffer",
                                              "clCreateProgramWithSource",
                                              "clBuildProgram",
                                              "clGetProgramInfo",
                                              "clCreateKernel",
                                              "clSetKernelArg",
                                              "clGetKernelWorkGroupInfo",
                                              "clEnqueueNDRangeKernel",
                                              "clEnqueueReadBuffer",
                                              "clEnqueueWriteBuffer",
                                              "clEnqueueCopyBuffer",
                                              "clEnqueueMapBuffer",
                                              "clEnqueueUnmapMemObject",
                                              "clFlush",
                                              "clFinish",
                                              "clGetEventProfilingInfo"};
  CheckAnyCallMayFail<World>(functions, Fail, fake_cl_calls);
  CheckAnyCallMayFail<UnifiedWorld>(functions, Fail, fake_cl_calls);
}

TEST(a_kernel_that_fails_ends_the_handle) {
  World world;
  std::unique_ptr<TestPlan> good = Simple();
  std::unique_ptr<TestPlan> bad = Simple();
  bad->steps[1].launch = &kCrash;
  Open healthy(*good);
  Open model(*bad);
  alignas(64) int32_t x[] = {1, 2, 3, 4};
  CHECK_EQ(model->SetInput(0, x, kBytes), EDGESDK_OK);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_KERNEL);
  std::string reason =
      "a kernel failed on Paper GPU 0: out of resources (OpenCL error -5); EDGESDK_OPENCL_SYNC=1 "
      "tells which";
  CHECK_TEXT(model->last_error(), reason);
  CHECK_EQ(model->Run(), EDGESDK_ERROR_DEVICE);
  CHECK_TEXT(model->last_error(), reason);
  CheckRun(healthy, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  setenv("EDGESDK_OPENCL_SYNC", "1", 1);
  Open slow(*bad);
  CHECK_EQ(slow->SetInput(0, x, kBytes), EDGESDK_OK);
  CHECK_EQ(slow->Run(), EDGESDK_ERROR_KERNEL);
  CHECK_TEXT(slow->last_error(), "crash: out of resources (OpenCL error -5)");
}

TEST(times_are_the_devices) {
  World world;
  fake_cl_settings()->unified = 0;
  std::unique_ptr<TestPlan> test = Simple();
  Open model(*test);
  model->SetProfiling(true);
  for (int i = 0; i < 3; ++i) CheckRun(model, {1, 2, 3, 4}, SimpleResult({1, 2, 3, 4}));
  const uint64_t wanted[] = {5000, 7000};
  for (int32_t i = 0; i < 2; ++i) {
    edgesdk_layer_info layer;
    CHECK_EQ(model->LayerInfo(i, &layer), EDGESDK_OK);
    CHECK_EQ(layer.last_ns, wanted[i]);
    CHECK_EQ(layer.total_ns, 3 * wanted[i]);
  }
  CHECK_EQ(InfoOf(model).transfer_ns, 2000u);
}

TEST(tensors_of_no_bytes) {
  World world;
  CheckTensorsOfNoBytes();
}

TEST(a_forked_child_is_refused) {
  World world;
  CheckForkedChildIsRefused(
      "OpenCL cannot be used in a child of fork() when the parent has used it");
}

// The C API, with a library that was linked as real ones are.
TEST(a_program_with_a_library_for_opencl) {
  World world;
  Folder chosen;
  ProgramOptions options;
  options.device_index = 3;
  options.cache_folder = chosen.path.c_str();
  edgesdk_model* model = nullptr;
  CHECK_EQ(edgesdk_open_model_opencl(EDGESDK_ABI_VERSION, &options, &model),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(options.reason, "there is no device 3: OpenCL finds 'Paper GPU 0', 'Paper CPU 0'");
  // Options of a program whose header had no folder: it is not read.
  options.device_index = 1;
  options.struct_size = offsetof(edgesdk_options, cache_folder);
  CHECK_EQ(edgesdk_open_model_opencl(EDGESDK_ABI_VERSION, &options, &model), EDGESDK_OK);
  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "Paper CPU 0");
  CHECK_EQ(std::string(info.code_cache).rfind(world.cache.path, 0), 0u);
  edgesdk_model_close(model);
  options.device_index = 0;
  options.struct_size = sizeof(edgesdk_options);
  CHECK_EQ(edgesdk_open_model_opencl(EDGESDK_ABI_VERSION, &options, &model), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "Paper GPU 0");
  CHECK_EQ(std::string(info.code_cache).rfind(chosen.path, 0), 0u);
  CheckProgramRun(model);
  edgesdk_model_close(model);
}

}  // namespace

const edgert_accelerator& the_accelerator = edgert_opencl;
const edgert_image the_image = {kEdgertOpenclSource, 0, reinterpret_cast<const uint8_t*>(kSource),
                                sizeof(kSource)};

int main(int argc, char** argv) { return check::Main(argc, argv); }
