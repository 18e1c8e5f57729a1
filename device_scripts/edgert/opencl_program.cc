#include "opencl_program.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#include "accelerator_common.h"
#include "compiler_error.h"
#include "opencl_cache.h"
#include "platform.h"

namespace edgert {
namespace opencl {
namespace {

// OpenCL C 1.2 is what the generated code is written in; later compilers take it, too.
constexpr const char* kBuildOptions = "-cl-std=CL1.2";

// Enough for a workstation; more are not looked at.
constexpr Uint kMaxPlatforms = 16;
constexpr Uint kMaxDevices = 32;

Driver driver;
bool driver_is_loaded = false;
bool is_forked = false;
Program* programs = nullptr;

// In a child right after fork().
void Forget() {
  programs = nullptr;
  is_forked = driver_is_loaded;
}

// Guards the above.
using Guard = ForkAwareLock<Forget>;

edgesdk_status FailWith(const Report& report, Result result, const char* what) {
  char reason[96];
  Describe(result, reason, sizeof(reason));
  return report.Fail(IsOutOfMemory(result) ? EDGESDK_ERROR_OUT_OF_MEMORY : EDGESDK_ERROR_DEVICE,
                     "%s: %s", what, reason);
}

template <typename T>
T DeviceNumber(Device device, Uint what) {
  T value{};
  driver.GetDeviceInfo(device, what, sizeof(value), &value, nullptr);
  return value;
}

void DeviceText(Device device, Uint what, char* text, size_t bytes) {
  text[0] = '\0';
  if (driver.GetDeviceInfo(device, what, bytes, text, nullptr) != kSuccess) text[0] = '\0';
  text[bytes - 1] = '\0';
}

struct Devices {
  Device device[kMaxDevices];
  Uint count;
};

// All devices that can be used, GPUs first.
void ListDevices(Devices* devices) {
  Platform platforms[kMaxPlatforms];
  Uint num_platforms = 0;
  devices->count = 0;
  if (driver.GetPlatformIDs(kMaxPlatforms, platforms, &num_platforms) != kSuccess) return;
  if (num_platforms > kMaxPlatforms) num_platforms = kMaxPlatforms;
  for (bool wants_gpu : {true, false}) {
    for (Uint i = 0; i < num_platforms; ++i) {
      Device found[kMaxDevices];
      Uint count = 0;
      Result result = driver.GetDeviceIDs(platforms[i], kDeviceTypeAll, kMaxDevices, found, &count);
      if (result != kSuccess) continue;
      if (count > kMaxDevices) count = kMaxDevices;
      for (Uint k = 0; k < count && devices->count < kMaxDevices; ++k) {
        bool is_gpu = (DeviceNumber<Bitfield>(found[k], kDeviceType) & kDeviceTypeGpu) != 0;
        if (is_gpu != wants_gpu || DeviceNumber<Uint>(found[k], kDeviceAvailable) == 0) continue;
        devices->device[devices->count++] = found[k];
      }
    }
  }
}

bool Contains(const char* text, const char* part) {
  size_t length = strlen(part);
  for (; *text != '\0'; ++text) {
    size_t i = 0;
    while (i < length && tolower(static_cast<unsigned char>(text[i])) ==
                             tolower(static_cast<unsigned char>(part[i]))) {
      ++i;
    }
    if (i == length) return true;
  }
  return length == 0;
}

// "'Mali-G610', 'pthread-...'".
void ListNames(const Devices& devices, char* text, size_t bytes) {
  text[0] = '\0';
  for (Uint i = 0; i < devices.count; ++i) {
    char name[128];
    DeviceText(devices.device[i], kDeviceName, name, sizeof(name));
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s'%s'", i > 0 ? ", " : "", name);
  }
}

edgesdk_status ChooseDevice(const DeviceOptions& options, Program* program, const Report& report) {
  if (options.stream != nullptr) {
    Queue queue = static_cast<Queue>(options.stream);
    Bitfield properties = 0;
    Result result = driver.GetCommandQueueInfo(queue, kQueueDevice, sizeof(program->device),
                                               &program->device, nullptr);
    if (result == kSuccess) {
      result = driver.GetCommandQueueInfo(queue, kQueueContext, sizeof(program->callers),
                                          &program->callers, nullptr);
    }
    if (result == kSuccess) {
      result = driver.GetCommandQueueInfo(queue, kQueueProperties, sizeof(properties), &properties,
                                          nullptr);
    }
    if (result != kSuccess) return FailWith(report, result, "device_stream is no command queue");
    if ((properties & kQueueOutOfOrder) != 0) {
      return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                         "device_stream is a queue that executes out of order");
    }
    program->index = options.index;
    return EDGESDK_OK;
  }
  Devices devices;
  ListDevices(&devices);
  if (devices.count == 0) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "the OpenCL driver finds no device");
  }
  char buffer[256];
  const char* wanted = Environment("EDGESDK_OPENCL_DEVICE", buffer, sizeof(buffer));
  char names[600];
  if (options.index == 0 && wanted != nullptr && wanted[0] != '\0') {
    for (Uint i = 0; i < devices.count; ++i) {
      char name[128];
      DeviceText(devices.device[i], kDeviceName, name, sizeof(name));
      if (!Contains(name, wanted)) continue;
      program->index = static_cast<int>(i);
      program->device = devices.device[i];
      return EDGESDK_OK;
    }
    ListNames(devices, names, sizeof(names));
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "no OpenCL device is called '%s', as EDGESDK_OPENCL_DEVICE says; there are "
                       "%s",
                       wanted, names);
  }
  if (options.index < 0 || static_cast<Uint>(options.index) >= devices.count) {
    ListNames(devices, names, sizeof(names));
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "there is no device %d: OpenCL finds %s",
                       options.index, names);
  }
  program->index = options.index;
  program->device = devices.device[options.index];
  return EDGESDK_OK;
}

edgesdk_status OpenDevice(Program* program, const Report& report) {
  Device device = program->device;
  DeviceText(device, kDeviceName, program->name, sizeof(program->name));
  char version[128];
  char driver_version[96];
  DeviceText(device, kDeviceVersion, version, sizeof(version));
  DeviceText(device, kDriverVersion, driver_version, sizeof(driver_version));
  snprintf(program->versions, sizeof(program->versions), "%s, driver %s", version, driver_version);
  program->unified = DeviceNumber<Uint>(device, kDeviceHostUnifiedMemory) != 0;
  program->max_allocation = DeviceNumber<uint64_t>(device, kDeviceMaxMemAllocSize);
  program->local_bytes = DeviceNumber<uint64_t>(device, kDeviceLocalMemSize);
  program->alignment = DeviceNumber<Uint>(device, kDeviceMemBaseAddrAlign) / 8;
  if (program->alignment == 0) program->alignment = 1;
  driver.GetDeviceInfo(device, kDeviceMaxWorkItemSizes, sizeof(program->max_items),
                       program->max_items, nullptr);
  Result result = kSuccess;
  if (program->callers != nullptr) {
    result = driver.RetainContext(program->callers);
    if (result == kSuccess) program->context = program->callers;
  } else {
    program->context = driver.CreateContext(nullptr, 1, &device, nullptr, nullptr, &result);
  }
  if (result == kSuccess && program->context != nullptr) return EDGESDK_OK;
  program->context = nullptr;
  char what[200];
  snprintf(what, sizeof(what), "cannot use %s", program->name);
  return FailWith(report, result, what);
}

bool IsWordEnd(char c) { return !isalnum(static_cast<unsigned char>(c)) && c != '_'; }

// The first extension that the source switches on and the device has not, or "". The source
// names each in a line of its own: "#pragma OPENCL EXTENSION cl_khr_fp16 : enable".
void FindMissing(const Program& program, const char* source, char* missing, size_t bytes) {
  constexpr const char* kPragma = "#pragma OPENCL EXTENSION ";
  missing[0] = '\0';
  size_t size = 0;
  driver.GetDeviceInfo(program.device, kDeviceExtensions, 0, nullptr, &size);
  char* extensions = static_cast<char*>(calloc(size + 1, 1));
  if (extensions == nullptr) return;  // the driver's compiler will say it
  driver.GetDeviceInfo(program.device, kDeviceExtensions, size, extensions, nullptr);
  for (const char* at = strstr(source, kPragma); at != nullptr; at = strstr(at, kPragma)) {
    at += strlen(kPragma);
    char name[64];
    size_t length = strcspn(at, " :\n");
    if (length >= sizeof(name)) continue;
    snprintf(name, sizeof(name), "%.*s", static_cast<int>(length), at);
    bool found = false;
    for (const char* have = strstr(extensions, name); have != nullptr && !found;
         have = strstr(have + 1, name)) {
      found = IsWordEnd(have[length]) && (have == extensions || IsWordEnd(have[-1]));
    }
    if (!found) {
      snprintf(missing, bytes, "%s", name);
      break;
    }
  }
  free(extensions);
}

edgesdk_status ExplainBuild(const Program& program, Code code, const char* source, Result result,
                            const Report& report) {
  size_t size = 0;
  driver.GetProgramBuildInfo(code, program.device, kProgramBuildLog, 0, nullptr, &size);
  char* log = static_cast<char*>(calloc(size + 1, 1));
  if (log != nullptr && size > 0) {
    driver.GetProgramBuildInfo(code, program.device, kProgramBuildLog, size, log, nullptr);
  }
  CompilerError error;
  FindCompilerError(log != nullptr ? log : "", source, "__kernel void ", &error);
  char reason[96];
  Describe(result, reason, sizeof(reason));
  edgesdk_status status =
      report.Fail(IsOutOfMemory(result) ? EDGESDK_ERROR_OUT_OF_MEMORY : EDGESDK_ERROR_DEVICE,
                  "%s (%s) refuses the code%s%s: %s%s%s", program.name, program.versions,
                  error.kernel[0] != '\0' ? " of " : "", error.kernel, reason,
                  error.line[0] != '\0' ? ": " : "", error.line);
  free(log);
  return status;
}

bool BuildFromBinary(Program* program, const unsigned char* data, size_t bytes) {
  Result status = kSuccess;
  Result result = kSuccess;
  Code code = driver.CreateProgramWithBinary(program->context, 1, &program->device, &bytes, &data,
                                             &status, &result);
  if (result == kSuccess && code != nullptr) {
    result = status;
    if (result == kSuccess) {
      result = driver.BuildProgram(code, 1, &program->device, kBuildOptions, nullptr, nullptr);
    }
    if (result == kSuccess) {
      program->code = code;
      return true;
    }
    driver.ReleaseProgram(code);
  }
  return false;
}

edgesdk_status BuildFromSource(Program* program, const edgert_image& image, const Report& report) {
  const char* source = reinterpret_cast<const char*>(image.data);
  char missing[64];
  FindMissing(*program, source, missing, sizeof(missing));
  if (missing[0] != '\0') {
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "%s has no %s, which the library built for target '%s' uses", program->name,
                       missing, program->plan->target);
  }
  if (DeviceNumber<Uint>(program->device, kDeviceCompilerAvailable) == 0) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "the driver of %s has no compiler", program->name);
  }
  size_t length = strlen(source);
  Result result = kSuccess;
  Code code = driver.CreateProgramWithSource(program->context, 1, &source, &length, &result);
  if (result != kSuccess || code == nullptr)
    return FailWith(report, result, "cannot make a program");
  result = driver.BuildProgram(code, 1, &program->device, kBuildOptions, nullptr, nullptr);
  if (result == kSuccess) {
    program->code = code;
    return EDGESDK_OK;
  }
  edgesdk_status status = ExplainBuild(*program, code, source, result, report);
  driver.ReleaseProgram(code);
  return status;
}

Key KeyOf(const Program& program, const edgert_image& image) {
  Key key;
  char text[256];
  Platform platform = DeviceNumber<Platform>(program.device, kDevicePlatform);
  for (Uint what : {kPlatformName, kPlatformVersion}) {
    text[0] = '\0';
    driver.GetPlatformInfo(platform, what, sizeof(text), text, nullptr);
    text[sizeof(text) - 1] = '\0';
    key.Add(text);
  }
  key.Add(program.name);
  key.Add(program.versions);
  key.Add(kBuildOptions);
  uint8_t pointer_bytes = sizeof(void*);
  key.Add(&pointer_bytes, sizeof(pointer_bytes));
  key.Add(image.data, static_cast<size_t>(image.size_bytes));
  return key;
}

// Keeps the built code for the next process. What fails is told in `cache`, and no reason to stop.
void Keep(Program* program, const CachePlaces& places, const Key& key) {
  if (places.own[0] == '\0') {
    snprintf(program->cache, sizeof(program->cache), "not kept: %s", places.why_not);
    return;
  }
  size_t bytes = 0;
  Result result =
      driver.GetProgramInfo(program->code, kProgramBinarySizes, sizeof(bytes), &bytes, nullptr);
  unsigned char* data = nullptr;
  if (result == kSuccess && bytes > 0) {
    data = static_cast<unsigned char*>(malloc(bytes));
    if (data != nullptr) {
      result = driver.GetProgramInfo(program->code, kProgramBinaries, sizeof(data), &data, nullptr);
    }
  }
  char reason[900] = "the driver gives no binary";
  if (data != nullptr && result == kSuccess &&
      WriteCache(places.own, key, data, bytes, reason, sizeof(reason))) {
    snprintf(program->cache, sizeof(program->cache), "%s", places.own);
  } else {
    snprintf(program->cache, sizeof(program->cache), "not kept: %s", reason);
  }
  free(data);
}

bool LoadFrom(const char* path, const Key& key, Program* program) {
  if (path[0] == '\0') return false;
  size_t bytes = 0;
  unsigned char* data = ReadCache(path, key, &bytes);
  if (data == nullptr) return false;
  bool built = BuildFromBinary(program, data, bytes);
  free(data);
  if (!built) return false;
  program->from_cache = true;
  snprintf(program->cache, sizeof(program->cache), "%s", path);
  return true;
}

edgesdk_status LoadCode(Program* program, const DeviceOptions& options, const Report& report) {
  const edgert_plan& plan = *program->plan;
  const edgert_image* image = nullptr;
  for (uint32_t i = 0; i < plan.num_images; ++i) {
    if (plan.images[i].format == kEdgertOpenclSource) image = &plan.images[i];
  }
  if (image == nullptr) return EDGESDK_OK;  // all steps stayed on the CPU
  uint64_t start = NowNs();
  Key key = KeyOf(*program, *image);
  CachePlaces places;
  FindPlaces(plan.name, key, options.cache_folder, &places);
  edgesdk_status status = EDGESDK_OK;
  if (!LoadFrom(places.shipped, key, program) && !LoadFrom(places.own, key, program)) {
    status = BuildFromSource(program, *image, report);
    if (status == EDGESDK_OK) Keep(program, places, key);
  }
  program->load_ns = NowNs() - start;
  return status;
}

edgesdk_status UploadWeights(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  uint64_t end = DeviceWeightBytes(plan);
  if (end == 0) return EDGESDK_OK;
  char what[256];
  snprintf(what, sizeof(what), "no room for %llu bytes of weights on %s (at most %llu at once)",
           static_cast<unsigned long long>(end), program->name,
           static_cast<unsigned long long>(program->max_allocation));
  if (end > program->max_allocation) return FailWith(report, kInvalidBufferSize, what);
  size_t bytes = static_cast<size_t>(end);
  Result result = kSuccess;
  Bitfield flags = kMemReadOnly | (program->unified ? kMemAllocHostPtr : 0);
  program->weights = driver.CreateBuffer(program->context, flags, bytes, nullptr, &result);
  if (program->weights == nullptr || result != kSuccess) {
    program->weights = nullptr;
    return FailWith(report, result, what);
  }
  program->weights_bytes = end;
  Queue queue = driver.CreateCommandQueue(program->context, program->device, 0, &result);
  if (queue != nullptr && result == kSuccess) {
    result = driver.EnqueueWriteBuffer(queue, program->weights, 1, 0, bytes, plan.weights, 0,
                                       nullptr, nullptr);
    driver.ReleaseCommandQueue(queue);
  }
  if (result == kSuccess) return EDGESDK_OK;
  return IsOutOfMemory(result) ? FailWith(report, result, what)
                               : FailWith(report, result, "cannot copy the weights to the device");
}

void Free(Program* program) {
  if (program->weights != nullptr) driver.ReleaseMemObject(program->weights);
  if (program->code != nullptr) driver.ReleaseProgram(program->code);
  if (program->context != nullptr) driver.ReleaseContext(program->context);
  free(program);
}

// Offsets in the plan are multiples of what the target promises.
edgesdk_status CheckAlignment(const Program& program, const Report& report) {
  const edgert_plan& plan = *program.plan;
  for (uint32_t i = 0; i < plan.num_tensors; ++i) {
    const edgert_tensor& tensor = plan.tensors[i];
    if (tensor.storage >= kEdgertDeviceInput && tensor.offset % program.alignment != 0) {
      return report.Fail(
          EDGESDK_ERROR_DEVICE,
          "%s wants parts of buffers at multiples of %llu bytes, and the library has "
          "one at %llu: compile for a target whose [gpu] alignment-bytes is %llu",
          program.name, static_cast<unsigned long long>(program.alignment),
          static_cast<unsigned long long>(tensor.offset),
          static_cast<unsigned long long>(program.alignment));
    }
  }
  return EDGESDK_OK;
}

edgesdk_status Open(Program* program, const DeviceOptions& options, const Report& report) {
  edgesdk_status status = OpenDevice(program, report);
  if (status == EDGESDK_OK) status = CheckAlignment(*program, report);
  if (status == EDGESDK_OK) status = LoadCode(program, options, report);
  if (status == EDGESDK_OK) status = UploadWeights(program, report);
  return status;
}

edgesdk_status Acquire(const edgert_plan& plan, const DeviceOptions& options, Program** result,
                       const Report& report) {
  if (IsForked(report.text, report.bytes)) return EDGESDK_ERROR_DEVICE;
  if (!driver_is_loaded) {
    if (!LoadDriver(&driver, report.text, report.bytes)) return EDGESDK_ERROR_DEVICE;
    driver_is_loaded = true;
  }
  Program* program = static_cast<Program*>(calloc(1, sizeof(Program)));
  if (program == nullptr) return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  edgesdk_status status = ChooseDevice(options, program, report);
  for (Program* open = programs; status == EDGESDK_OK && open != nullptr; open = open->next) {
    if (open->plan == &plan && open->device == program->device &&
        open->callers == program->callers) {
      free(program);
      ++open->handles;
      *result = open;
      return EDGESDK_OK;
    }
  }
  program->plan = &plan;
  program->handles = 1;
  if (status == EDGESDK_OK) status = Open(program, options, report);
  if (status != EDGESDK_OK) {
    Free(program);
    return status;
  }
  program->next = programs;
  programs = program;
  *result = program;
  return EDGESDK_OK;
}

}  // namespace

const Driver& TheDriver() { return driver; }

edgesdk_status AcquireProgram(const edgert_plan& plan, const DeviceOptions& options,
                              Program** program, char* error, size_t error_bytes) {
  MutexLock lock(Guard::Get());
  return Acquire(plan, options, program, Report{error, error_bytes});
}

void ReleaseProgram(Program* program) {
  MutexLock lock(Guard::Get());
  if (--program->handles > 0) return;
  if (is_forked) return;  // the driver is not to be called there
  Unlink(&programs, program);
  Free(program);
}

bool IsForked(char* error, size_t error_bytes) {
  if (!is_forked) return false;
  snprintf(error, error_bytes,
           "OpenCL cannot be used in a child of fork() when the parent has used it");
  return true;
}

edgesdk_status MakeKernel(const Program& program, const edgert_step& step, Kernel* kernel,
                          char* error, size_t error_bytes) {
  Report report{error, error_bytes};
  const edgert_launch& launch = *step.launch;
  if (program.code == nullptr) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "the library has no code for the GPU");
  }
  Result result = kSuccess;
  *kernel = driver.CreateKernel(program.code, launch.function, &result);
  if (*kernel == nullptr || result != kSuccess) {
    *kernel = nullptr;
    return FailWith(report, result, launch.function);
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.block[axis] > program.max_items[axis]) {
      return report.Fail(EDGESDK_ERROR_DEVICE,
                         "%s needs work-groups of %u along %c; %s allows %llu", launch.function,
                         launch.block[axis], 'x' + axis, program.name,
                         static_cast<unsigned long long>(program.max_items[axis]));
    }
  }
  size_t most = 0;
  uint64_t local = 0;
  result = driver.GetKernelWorkGroupInfo(*kernel, program.device, kKernelWorkGroupSize,
                                         sizeof(most), &most, nullptr);
  if (result == kSuccess) {
    result = driver.GetKernelWorkGroupInfo(*kernel, program.device, kKernelLocalMemSize,
                                           sizeof(local), &local, nullptr);
  }
  if (result != kSuccess) return FailWith(report, result, launch.function);
  uint64_t wanted = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  if (wanted > most) {
    return report.Fail(EDGESDK_ERROR_DEVICE,
                       "%s needs work-groups of %llu; with its registers %s has room for %llu",
                       launch.function, static_cast<unsigned long long>(wanted), program.name,
                       static_cast<unsigned long long>(most));
  }
  if (local > program.local_bytes) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "%s needs %llu bytes of local memory; %s has %llu",
                       launch.function, static_cast<unsigned long long>(local), program.name,
                       static_cast<unsigned long long>(program.local_bytes));
  }
  return EDGESDK_OK;
}

}  // namespace opencl
}  // namespace edgert
