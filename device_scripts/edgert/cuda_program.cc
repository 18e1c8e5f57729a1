#include "cuda_program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "accelerator_common.h"
#include "platform.h"

namespace edgert {
namespace cuda {
namespace {

// Which target to compile for, by compute capability; others are cuda-sm_NN. Boards run machine
// code of exactly their own: NVIDIA promises binary compatibility between the minor versions of
// desktop GPUs only (CUDA C++ Programming Guide, "Binary Compatibility").
struct Board {
  int architecture;
  const char* target;
};
constexpr Board kBoards[] = {
    {53, "jetson-nano"},      {62, "jetson-tx2"},   {72, "jetson-xavier-nx"},
    {87, "jetson-orin-nano"}, {101, "jetson-thor"}, {110, "jetson-thor"},
};

Driver driver;
bool driver_is_loaded = false;
Program* programs = nullptr;

// In a child right after fork(): the driver's state is of no use there.
void Forget() { programs = nullptr; }

// Guards the three above.
using Guard = ForkAwareLock<Forget>;

edgesdk_status FailWith(const Report& report, Result result, const char* what) {
  char reason[256];
  Describe(result, reason, sizeof(reason));
  edgesdk_status status =
      result == kOutOfMemory ? EDGESDK_ERROR_OUT_OF_MEMORY : EDGESDK_ERROR_DEVICE;
  return report.Fail(status, "%s: %s", what, reason);
}

int Attribute(Device device, int attribute) {
  int value = 0;
  driver.DeviceGetAttribute(&value, attribute, device);
  return value;
}

const char* BoardOf(int architecture) {
  for (const Board& board : kBoards) {
    if (board.architecture == architecture) return board.target;
  }
  return nullptr;
}

edgesdk_status InitializeDriver(const Report& report) {
  if (!driver_is_loaded) {
    if (!LoadDriver(&driver, report.text, report.bytes)) return EDGESDK_ERROR_DEVICE;
    driver_is_loaded = true;
  }
  Result result = driver.Init(0);
  switch (result) {
    case kSuccess:
      return EDGESDK_OK;
    case kNoDevice:
      return report.Fail(EDGESDK_ERROR_DEVICE,
                         "the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES set?)");
    case kNotInitialized:
      return report.Fail(EDGESDK_ERROR_DEVICE,
                         "CUDA cannot be used in a child of fork() when the parent has used it");
    case kSystemDriverMismatch:
      return report.Fail(EDGESDK_ERROR_DEVICE,
                         "the NVIDIA driver's library and kernel module are of different versions: "
                         "restart the machine after an update of the driver");
    default:
      return FailWith(report, result, "the NVIDIA driver does not start");
  }
}

edgesdk_status FindDevice(Program* program, const Report& report) {
  int count = 0;
  Result result = driver.DeviceGetCount(&count);
  if (result == kSuccess && (program->index < 0 || program->index >= count)) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "there is no GPU %d: the driver finds %d",
                       program->index, count);
  }
  if (result == kSuccess) result = driver.DeviceGet(&program->device, program->index);
  if (result == kSuccess) {
    result = driver.DeviceGetName(program->name, sizeof(program->name), program->device);
  }
  if (result == kSuccess) result = driver.DriverGetVersion(&program->driver_version);
  if (result != kSuccess) return FailWith(report, result, "cannot ask the GPU what it is");
  program->architecture = 10 * Attribute(program->device, kComputeCapabilityMajor) +
                          Attribute(program->device, kComputeCapabilityMinor);
  program->unified = Attribute(program->device, kIntegrated) != 0 &&
                     Attribute(program->device, kCanMapHostMemory) != 0;
  result = driver.DevicePrimaryCtxRetain(&program->context, program->device);
  if (result == kSuccess) return EDGESDK_OK;
  program->context = nullptr;
  char what[320];
  snprintf(what, sizeof(what), "cannot use GPU %d (%s)", program->index, program->name);
  return FailWith(report, result, what);
}

bool Fits(const edgert_image& image, int architecture) {
  int built = static_cast<int>(image.architecture);
  if (image.format == kEdgertPtx) return built <= architecture;
  if (image.format != kEdgertCubin) return false;
  bool is_board = BoardOf(built) != nullptr || BoardOf(architecture) != nullptr;
  if (is_board) return built == architecture;
  return built / 10 == architecture / 10 && built <= architecture;
}

// The fitting image that is best after `previous` (nullptr: the best of all): machine code before
// PTX, newer architectures before older.
const edgert_image* NextImage(const edgert_plan& plan, int architecture,
                              const edgert_image* previous) {
  auto rank = [](const edgert_image& image) {
    return image.architecture + (image.format == kEdgertCubin ? 1000u : 0u);
  };
  const edgert_image* best = nullptr;
  for (uint32_t i = 0; i < plan.num_images; ++i) {
    const edgert_image& image = plan.images[i];
    if (!Fits(image, architecture)) continue;
    if (previous != nullptr && rank(image) >= rank(*previous)) continue;
    if (best == nullptr || rank(image) > rank(*best)) best = &image;
  }
  return best;
}

// "sm_86, sm_89 and PTX of compute_75".
void ListImages(const edgert_plan& plan, char* text, size_t bytes) {
  text[0] = '\0';
  for (uint32_t i = 0; i < plan.num_images; ++i) {
    const edgert_image& image = plan.images[i];
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s%u",
             i == 0                     ? ""
             : i + 1 == plan.num_images ? " and "
                                        : ", ",
             image.format == kEdgertCubin ? "sm_" : "PTX of compute_", image.architecture);
  }
}

// "8.4" from the directive `.version 8.4` at the head of PTX; "" if it has none.
void PtxVersion(const edgert_image& image, char* text, size_t bytes) {
  text[0] = '\0';
  const char* head = reinterpret_cast<const char*>(image.data);
  const char* found = strstr(head, ".version ");  // the text ends with a zero byte
  if (found == nullptr) return;
  size_t length = strspn(found + 9, "0123456789.");
  if (length < bytes) snprintf(text, bytes, "%.*s", static_cast<int>(length), found + 9);
}

edgesdk_status ExplainLoad(const Program& program, const edgert_image& image, Result result,
                           const char* log, const Report& report) {
  int major = program.driver_version / 1000;
  int minor = program.driver_version % 1000 / 10;
  if (result == kUnsupportedPtxVersion) {
    char version[16];
    PtxVersion(image, version, sizeof(version));
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "the library holds PTX %s, which is newer than this driver reads (CUDA "
                       "%d.%d): update the driver, or compile for sm_%d",
                       version, major, minor, program.architecture);
  }
  char reason[256];
  Describe(result, reason, sizeof(reason));
  return report.Fail(
      result == kOutOfMemory ? EDGESDK_ERROR_OUT_OF_MEMORY : EDGESDK_ERROR_DEVICE,
      "the driver (CUDA %d.%d) refuses the code for %s%u on GPU %d (%s, sm_%d): %s%s%s", major,
      minor, image.format == kEdgertCubin ? "sm_" : "PTX of compute_", image.architecture,
      program.index, program.name, program.architecture, reason, log[0] != '\0' ? ": " : "", log);
}

edgesdk_status LoadImage(Program* program, const edgert_image& image, const Report& report) {
  char log[512] = "";
  int options[] = {kJitErrorLogBuffer, kJitErrorLogBufferSizeBytes};
  void* values[] = {log, reinterpret_cast<void*>(uintptr_t{sizeof(log)})};
  Result result = driver.ModuleLoadDataEx(&program->module, image.data, 2, options, values);
  if (result == kSuccess) {
    program->image = &image;
    return EDGESDK_OK;
  }
  program->module = nullptr;
  log[sizeof(log) - 1] = '\0';
  log[strcspn(log, "\r\n")] = '\0';  // its first line
  return ExplainLoad(*program, image, result, log, report);
}

edgesdk_status LoadCode(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  if (plan.num_images == 0) return EDGESDK_OK;  // all steps stayed on the CPU
  const edgert_image* image = NextImage(plan, program->architecture, nullptr);
  if (image == nullptr) {
    char built[256];
    ListImages(plan, built, sizeof(built));
    const char* board = BoardOf(program->architecture);
    char target[32];
    snprintf(target, sizeof(target), "cuda-sm_%d", program->architecture);
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "built for %s, this GPU (%s) is sm_%d: compile with --target %s", built,
                       program->name, program->architecture, board != nullptr ? board : target);
  }
  edgesdk_status status = LoadImage(program, *image, report);
  // What explains most is why the best does not load: later failures are not told.
  char ignored[64];
  while (status != EDGESDK_OK && status != EDGESDK_ERROR_OUT_OF_MEMORY) {
    image = NextImage(plan, program->architecture, image);
    if (image == nullptr) break;
    edgesdk_status next = LoadImage(program, *image, Report{ignored, sizeof(ignored)});
    if (next == EDGESDK_OK) status = next;
  }
  return status;
}

// The device's limits, against what a launch asks for.
edgesdk_status CheckLaunch(const Program& program, const edgert_step& step, Function function,
                           const Report& report) {
  const edgert_launch& launch = *step.launch;
  int threads = 0;
  int fixed_shared = 0;
  Result result = driver.FuncGetAttribute(&threads, kFunctionMaxThreadsPerBlock, function);
  if (result == kSuccess) {
    result = driver.FuncGetAttribute(&fixed_shared, kFunctionSharedSizeBytes, function);
  }
  if (result != kSuccess) return FailWith(report, result, launch.function);
  uint64_t wanted = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  if (wanted > static_cast<uint64_t>(threads)) {
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "%s needs blocks of %llu threads; with its registers this GPU (%s) has room "
                       "for %d",
                       launch.function, static_cast<unsigned long long>(wanted), program.name,
                       threads);
  }
  for (int axis = 0; axis < 3; ++axis) {
    int most_threads = Attribute(program.device, kMaxBlockDimX + axis);
    int most_blocks = Attribute(program.device, kMaxGridDimX + axis);
    if (launch.block[axis] > static_cast<uint32_t>(most_threads) ||
        launch.grid[axis] > static_cast<uint32_t>(most_blocks)) {
      return report.Fail(EDGESDK_ERROR_DEVICE,
                         "%s needs a grid of %u and blocks of %u along %c; this GPU (%s) allows %d "
                         "and %d",
                         launch.function, launch.grid[axis], launch.block[axis], 'x' + axis,
                         program.name, most_blocks, most_threads);
    }
  }
  constexpr uint32_t kAlwaysAllowed = 48 * 1024;
  uint64_t shared = uint64_t{launch.shared_bytes} + static_cast<uint64_t>(fixed_shared);
  int most = Attribute(program.device, kMaxSharedMemoryPerBlockOptin);
  if (shared > kAlwaysAllowed && shared > static_cast<uint64_t>(most)) {
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "%s needs %llu bytes of shared memory; this GPU (%s) has %d per block",
                       launch.function, static_cast<unsigned long long>(shared), program.name,
                       most);
  }
  if (shared > kAlwaysAllowed) {
    // All there is: other steps may launch the same function with another size.
    result =
        driver.FuncSetAttribute(function, kFunctionMaxDynamicSharedSizeBytes, most - fixed_shared);
    if (result != kSuccess) return FailWith(report, result, launch.function);
  }
  return EDGESDK_OK;
}

edgesdk_status FindFunctions(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  program->functions = static_cast<Function*>(calloc(size_t{plan.num_steps} + 1, sizeof(Function)));
  if (program->functions == nullptr) {
    return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  }
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    const edgert_step& step = plan.steps[i];
    if (step.launch == nullptr) continue;
    if (program->module == nullptr) {
      return report.Fail(EDGESDK_ERROR_DEVICE, "the library has no code for the GPU");
    }
    Function& function = program->functions[i];
    Result result = driver.ModuleGetFunction(&function, program->module, step.launch->function);
    // Drivers load functions when they are first needed; the first run should not pay for it.
    if (result == kSuccess && driver.FuncLoad != nullptr) result = driver.FuncLoad(function);
    if (result != kSuccess) return FailWith(report, result, step.launch->function);
    edgesdk_status status = CheckLaunch(*program, step, function, report);
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

edgesdk_status UploadWeights(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  uint64_t end = DeviceWeightBytes(plan);
  if (end == 0) return EDGESDK_OK;
  size_t bytes = static_cast<size_t>(end);
  Result result = driver.MemAlloc(&program->weights, bytes);
  if (result != kSuccess) {
    program->weights = 0;
    char what[96];
    snprintf(what, sizeof(what), "no room for %llu bytes of weights on GPU %d",
             static_cast<unsigned long long>(end), program->index);
    return FailWith(report, result, what);
  }
  program->weights_bytes = end;
  // A copy from pageable memory may return before its end, and streams of ours do not wait for the
  // default one.
  result = driver.MemcpyHtoDAsync(program->weights, plan.weights, bytes, nullptr);
  if (result == kSuccess) result = driver.StreamSynchronize(nullptr);
  if (result != kSuccess) return FailWith(report, result, "cannot copy the weights to the GPU");
  return EDGESDK_OK;
}

void Free(Program* program) {
  if (program->context != nullptr) {
    {
      CurrentContext current(*program);
      if (program->weights != 0) driver.MemFree(program->weights);
      if (program->module != nullptr) driver.ModuleUnload(program->module);
    }
    driver.DevicePrimaryCtxRelease(program->device);
  }
  free(program->functions);
  free(program);
}

edgesdk_status Open(Program* program, const Report& report) {
  edgesdk_status status = FindDevice(program, report);
  if (status != EDGESDK_OK) return status;
  CurrentContext current(*program);
  if (current.result() != kSuccess) return FailWith(report, current.result(), "cannot use the GPU");
  status = LoadCode(program, report);
  if (status == EDGESDK_OK) status = FindFunctions(program, report);
  if (status == EDGESDK_OK) status = UploadWeights(program, report);
  return status;
}

}  // namespace

const Driver& TheDriver() { return driver; }

void Describe(Result result, char* text, size_t bytes) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  driver.GetErrorName(result, &name);
  driver.GetErrorString(result, &meaning);
  if (name == nullptr || meaning == nullptr) {
    snprintf(text, bytes, "CUDA error %d", result);
  } else {
    snprintf(text, bytes, "%s (%s)", meaning, name);
  }
}

edgesdk_status AcquireProgram(const edgert_plan& plan, int index, Program** result, char* error,
                              size_t error_bytes) {
  Report report{error, error_bytes};
  MutexLock lock(Guard::Get());
  edgesdk_status status = InitializeDriver(report);
  if (status != EDGESDK_OK) return status;
  for (Program* program = programs; program != nullptr; program = program->next) {
    if (program->plan == &plan && program->index == index) {
      ++program->handles;
      *result = program;
      return EDGESDK_OK;
    }
  }
  Program* program = static_cast<Program*>(calloc(1, sizeof(Program)));
  if (program == nullptr) return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  program->plan = &plan;
  program->index = index;
  program->handles = 1;
  status = Open(program, report);
  if (status != EDGESDK_OK) {
    Free(program);
    return status;
  }
  program->next = programs;
  programs = program;
  *result = program;
  return EDGESDK_OK;
}

void ReleaseProgram(Program* program) {
  MutexLock lock(Guard::Get());
  if (--program->handles > 0) return;
  Unlink(&programs, program);
  Free(program);
}

CurrentContext::CurrentContext(const Program& program)
    : result_(driver.CtxPushCurrent(program.context)) {}

CurrentContext::~CurrentContext() {
  Context popped = nullptr;
  if (result_ == kSuccess) driver.CtxPopCurrent(&popped);
}

}  // namespace cuda
}  // namespace edgert
