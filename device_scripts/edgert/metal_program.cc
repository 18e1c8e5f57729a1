#include "metal_program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compiler_error.h"
#include "platform.h"

namespace edgert {
namespace metal {
namespace {

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

// "what: the error's own words".
edgesdk_status FailWith(const Report& report, edgesdk_status status, Object error,
                        const char* what) {
  Object text =
      error == nullptr ? nullptr : driver.Send<Object>(error, driver.selectors.description);
  const char* reason = driver.Text(text);
  return report.Fail(status, "%s: %.900s", what, reason[0] != '\0' ? reason : "no reason is given");
}

// The GPU, owned by the caller, or nullptr.
Object DefaultDevice() {
  Object device = driver.MTLCreateSystemDefaultDevice();
  if (device != nullptr || driver.MTLCopyAllDevices == nullptr) return device;
  // Programs of macOS without Core Graphics, as those of the command line, get none by default.
  Object all = driver.MTLCopyAllDevices();
  if (all == nullptr) return nullptr;
  if (driver.Send<Uint>(all, driver.selectors.count) > 0) {
    device = driver.objc_retain(driver.Send<Object>(all, driver.selectors.object_at, Uint{0}));
  }
  driver.objc_release(all);
  return device;
}

edgesdk_status ChooseDevice(const DeviceOptions& options, Program* program, const Report& report) {
  if (options.stream != nullptr) {
    Object queue = static_cast<Object>(options.stream);
    if (!driver.Responds(queue, driver.selectors.command_buffer)) {
      return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                         "device_stream is no MTLCommandQueue of Metal");
    }
    program->device = driver.objc_retain(driver.Send<Object>(queue, driver.selectors.device));
    return EDGESDK_OK;
  }
  if (options.index != 0) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                       "there is no GPU %d: Apple's devices have one", options.index);
  }
  program->device = DefaultDevice();
  if (program->device != nullptr) return EDGESDK_OK;
  return report.Fail(EDGESDK_ERROR_DEVICE, "Metal finds no GPU");
}

// The options that the code relies on.
Object MakeCompileOptions() {
  Object options_class = reinterpret_cast<Object>(driver.objc_getClass("MTLCompileOptions"));
  Object options = driver.Send<Object>(options_class, driver.selectors.new_object);
  if (options == nullptr) return nullptr;
  // The mathematics is that of the network: no reordering, and infinities are numbers.
  driver.Send<void>(options, driver.selectors.set_fast_math, false);
  driver.Send<void>(options, driver.selectors.set_language_version, Uint{kLanguageVersion2_2});
  return options;
}

edgesdk_status Compile(Program* program, const edgert_image& image, const Report& report) {
  const char* source = reinterpret_cast<const char*>(image.data);
  Object string_class = reinterpret_cast<Object>(driver.objc_getClass("NSString"));
  Object text = driver.Send<Object>(string_class, driver.selectors.string_with_utf8, source);
  Object options = MakeCompileOptions();
  if (text == nullptr || options == nullptr) {
    if (options != nullptr) driver.objc_release(options);
    return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  }
  Object error = nullptr;
  program->library =
      driver.Send<Object>(program->device, driver.selectors.new_library, text, options, &error);
  driver.objc_release(options);
  if (program->library != nullptr) return EDGESDK_OK;  // `error` may hold warnings
  CompilerError found;
  Object log =
      error == nullptr ? nullptr : driver.Send<Object>(error, driver.selectors.description);
  FindCompilerError(driver.Text(log), source, "kernel void ", &found);
  return report.Fail(EDGESDK_ERROR_DEVICE, "Metal refuses the code%s%s on %s%s%s",
                     found.kernel[0] != '\0' ? " of " : "", found.kernel, program->name,
                     found.line[0] != '\0' ? ": " : "", found.line);
}

edgesdk_status MakePipeline(const Program& program, const edgert_launch& launch, Object* pipeline,
                            const Report& report) {
  Object string_class = reinterpret_cast<Object>(driver.objc_getClass("NSString"));
  Object name =
      driver.Send<Object>(string_class, driver.selectors.string_with_utf8, launch.function);
  Object function = name == nullptr
                        ? nullptr
                        : driver.Send<Object>(program.library, driver.selectors.new_function, name);
  if (function == nullptr) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "%s is not in the library's code for the GPU",
                       launch.function);
  }
  Object error = nullptr;
  *pipeline = driver.Send<Object>(program.device, driver.selectors.new_pipeline, function, &error);
  driver.objc_release(function);
  if (*pipeline == nullptr) {
    return FailWith(report, EDGESDK_ERROR_DEVICE, error, launch.function);
  }
  Uint wanted = Uint{launch.block[0]} * launch.block[1] * launch.block[2];
  Uint most = driver.Send<Uint>(*pipeline, driver.selectors.max_threads);
  if (wanted <= most) return EDGESDK_OK;
  return report.Fail(EDGESDK_ERROR_DEVICE,
                     "%s needs %llu threads in a group; with its registers %s has room for %llu",
                     launch.function, static_cast<unsigned long long>(wanted), program.name,
                     static_cast<unsigned long long>(most));
}

edgesdk_status MakePipelines(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  program->pipelines = AllocateArray<Object>(plan.num_steps);
  if (program->pipelines == nullptr) {
    return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  }
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    if (plan.steps[i].launch == nullptr) continue;
    if (program->library == nullptr) {
      return report.Fail(EDGESDK_ERROR_DEVICE, "the library has no code for the GPU");
    }
    edgesdk_status status =
        MakePipeline(*program, *plan.steps[i].launch, &program->pipelines[i], report);
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

edgesdk_status LoadCode(Program* program, const Report& report) {
  const edgert_plan& plan = *program->plan;
  uint64_t start = NowNs();
  edgesdk_status status = EDGESDK_OK;
  for (uint32_t i = 0; i < plan.num_images && program->library == nullptr; ++i) {
    if (plan.images[i].format != kEdgertMetalSource) continue;
    status = Compile(program, plan.images[i], report);
    if (status != EDGESDK_OK) return status;
  }
  status = MakePipelines(program, report);
  if (program->library != nullptr) driver.objc_release(program->library);
  program->library = nullptr;
  program->load_ns = NowNs() - start;
  return status;
}

edgesdk_status UploadWeights(Program* program, const Report& report) {
  program->weights_bytes = DeviceWeightBytes(*program->plan);
  if (program->weights_bytes == 0) return EDGESDK_OK;
  return MakeBuffer(*program, program->weights_bytes, program->plan->weights, "weights",
                    &program->weights, report);
}

edgesdk_status Open(Program* program, const Report& report) {
  const char* name = driver.Text(driver.Send<Object>(program->device, driver.selectors.name));
  snprintf(program->name, sizeof(program->name), "%s", name);
  program->max_buffer = driver.Send<Uint>(program->device, driver.selectors.max_buffer_length);
  edgesdk_status status = LoadCode(program, report);
  return status == EDGESDK_OK ? UploadWeights(program, report) : status;
}

void Free(Program* program) {
  for (uint32_t i = 0; program->pipelines != nullptr && i < program->plan->num_steps; ++i) {
    if (program->pipelines[i] != nullptr) driver.objc_release(program->pipelines[i]);
  }
  free(program->pipelines);
  if (program->weights != nullptr) driver.objc_release(program->weights);
  if (program->library != nullptr) driver.objc_release(program->library);
  if (program->device != nullptr) driver.objc_release(program->device);
  free(program);
}

edgesdk_status Acquire(const edgert_plan& plan, const DeviceOptions& options, Program** result,
                       const Report& report) {
  if (IsForked(report.text, report.bytes)) return EDGESDK_ERROR_DEVICE;
  if (!driver_is_loaded) {
    if (!LoadDriver(&driver, report.text, report.bytes)) return EDGESDK_ERROR_DEVICE;
    driver_is_loaded = true;
  }
  AutoreleasePool pool(driver);
  Program* program = AllocateArray<Program>(1);
  if (program == nullptr) return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  program->plan = &plan;
  program->handles = 1;
  edgesdk_status status = ChooseDevice(options, program, report);
  for (Program* open = programs; status == EDGESDK_OK && open != nullptr; open = open->next) {
    if (open->plan == &plan && open->device == program->device) {
      Free(program);
      ++open->handles;
      *result = open;
      return EDGESDK_OK;
    }
  }
  if (status == EDGESDK_OK) status = Open(program, report);
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
  AutoreleasePool pool(driver);
  Free(program);
}

bool IsForked(char* error, size_t error_bytes) {
  if (!is_forked) return false;
  snprintf(error, error_bytes,
           "Metal cannot be used in a child of fork() when the parent has used it");
  return true;
}

edgesdk_status MakeBuffer(const Program& program, uint64_t bytes, const void* content,
                          const char* what, Object* buffer, const Report& report) {
  Uint length = static_cast<Uint>(bytes == 0 ? kAlignment : bytes);
  *buffer = nullptr;
  if (bytes <= program.max_buffer) {
    *buffer = content == nullptr
                  ? driver.Send<Object>(program.device, driver.selectors.new_buffer, length,
                                        Uint{kStorageModeShared})
                  : driver.Send<Object>(program.device, driver.selectors.new_buffer_with, content,
                                        length, Uint{kStorageModeShared});
  }
  if (*buffer != nullptr) return EDGESDK_OK;
  return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY,
                     "no room for %llu bytes of %s on %s (at most %llu at once)",
                     static_cast<unsigned long long>(bytes), what, program.name,
                     static_cast<unsigned long long>(program.max_buffer));
}

}  // namespace metal
}  // namespace edgert
