// model_api.cc: the C API of edgesdk_model.h over Executor.
//
// A handle begins with a pointer to the table of the library that opened it, and every public
// function goes through that table: when several model libraries are linked into one program the
// dynamic linker gives all callers the first library's functions, and this makes that harmless.

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "accelerator.h"
#include "cpu_features.h"
#include "edgesdk_model.h"
#include "executor.h"
#include "plan.h"
#include "platform.h"

struct edgesdk_model {
  const edgesdk_api* api;
  edgert::Executor* executor;    // that of the variant in use
  edgert::Executor** executors;  // one for each variant, nullptr until it is used
  int32_t variant;
  int num_threads;
  edgert::DeviceOptions device;
  unsigned char* arena;  // of the largest variant; nullptr: each executor has its own
};

namespace edgert {
namespace {

extern const edgesdk_api kApi;

thread_local char open_error[kErrorBytes];

// The sizes that edgesdk_options has had; the fields behind are not read.
constexpr size_t kFirstOptionsBytes = offsetof(edgesdk_options, device_index);
constexpr size_t kDeviceOptionsBytes = offsetof(edgesdk_options, cache_folder);

edgesdk_status FailOpen(const edgesdk_options* options, edgesdk_status status, const char* format,
                        ...) __attribute__((format(printf, 3, 4)));

edgesdk_status FailOpen(const edgesdk_options* options, edgesdk_status status, const char* format,
                        ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(open_error, sizeof(open_error), format, arguments);
  va_end(arguments);
  if (options != nullptr && options->struct_size >= kFirstOptionsBytes &&
      options->error_buffer != nullptr && options->error_buffer_size > 0) {
    snprintf(options->error_buffer, options->error_buffer_size, "%s", open_error);
  }
  return status;
}

// For the functions that may be handed NULL by mistake.
edgesdk_status NoHandle() {
  return FailOpen(nullptr, EDGESDK_ERROR_INVALID_ARGUMENT, "the model handle is NULL");
}

int32_t CountVariants() { return static_cast<int32_t>(edgert_model_plan.num_others) + 1; }

const edgert_plan& VariantPlan(int32_t variant) {
  return variant == 0 ? edgert_model_plan : edgert_model_plan.others[variant - 1];
}

bool AllocateVariants(edgesdk_model* model) {
  int32_t count = CountVariants();
  model->executors = static_cast<Executor**>(calloc(static_cast<size_t>(count), sizeof(Executor*)));
  if (model->executors == nullptr) return false;
  if (count == 1 || edgert_model_plan.accelerator != nullptr) return true;
  uint64_t largest = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (VariantPlan(i).arena_bytes > largest) largest = VariantPlan(i).arena_bytes;
  }
  model->arena = static_cast<unsigned char*>(AllocateAligned(largest));
  return model->arena != nullptr;
}

// Has the handle use a variant, which must be one. `reason` has kErrorBytes.
edgesdk_status UseVariant(edgesdk_model* model, int32_t variant, char* reason) {
  Executor** executor = &model->executors[variant];
  if (*executor == nullptr) {
    edgesdk_status status =
        Executor::Create(VariantPlan(variant), model->num_threads, model->device, executor, reason,
                         kErrorBytes, model->arena);
    if (status != EDGESDK_OK) return status;
  }
  model->executor = *executor;
  model->variant = variant;
  return EDGESDK_OK;
}

void Close(edgesdk_model* model) {
  if (model == nullptr) return;
  for (int32_t i = 0; model->executors != nullptr && i < CountVariants(); ++i) {
    Executor::Destroy(model->executors[i]);
  }
  FreeAligned(model->arena);
  free(model->executors);
  free(model);
}

edgesdk_status Open(uint32_t abi_version, const edgesdk_options* options, edgesdk_model** model) {
  const edgert_plan& plan = edgert_model_plan;
  if (model == nullptr) {
    return FailOpen(options, EDGESDK_ERROR_INVALID_ARGUMENT, "open needs a place for the handle");
  }
  *model = nullptr;
  if (abi_version != EDGESDK_ABI_VERSION) {
    return FailOpen(
        options, EDGESDK_ERROR_ABI,
        "the program was built for ABI version %u of edgesdk_model.h, this library for %u",
        abi_version, EDGESDK_ABI_VERSION);
  }
  if (options != nullptr && options->struct_size != kFirstOptionsBytes &&
      options->struct_size != kDeviceOptionsBytes &&
      options->struct_size < sizeof(edgesdk_options)) {
    return FailOpen(options, EDGESDK_ERROR_INVALID_ARGUMENT,
                    "options.struct_size is %zu, should be %zu: sizeof(edgesdk_options)",
                    options->struct_size, sizeof(edgesdk_options));
  }
  // A name that edgert has no test for is not refused: the profile may know more than it.
  for (const char* const* name = plan.cpu_features; *name != nullptr; ++name) {
    if (CpuFeature(*name) == Feature::kAbsent) {
      return FailOpen(options, EDGESDK_ERROR_DEVICE,
                      "this CPU lacks '%s', which the library built for target '%s' uses", *name,
                      plan.target);
    }
  }
  int num_threads = options != nullptr ? options->num_threads : 0;
  if (num_threads < 0) {
    return FailOpen(options, EDGESDK_ERROR_INVALID_ARGUMENT, "num_threads is %d", num_threads);
  }
  bool has_device = options != nullptr && options->struct_size >= kDeviceOptionsBytes;
  bool has_cache = options != nullptr && options->struct_size >= sizeof(edgesdk_options);
  DeviceOptions device{has_device ? options->device_index : 0,
                       has_device ? options->device_stream : nullptr,
                       has_cache ? options->cache_folder : nullptr};
  edgesdk_model* handle = static_cast<edgesdk_model*>(calloc(1, sizeof(edgesdk_model)));
  char reason[kErrorBytes] = "";
  edgesdk_status status = EDGESDK_ERROR_OUT_OF_MEMORY;
  if (handle != nullptr) {
    handle->num_threads = num_threads;
    handle->device = device;
    if (AllocateVariants(handle)) status = UseVariant(handle, 0, reason);
  }
  if (status != EDGESDK_OK) {
    Close(handle);
    if (reason[0] != '\0') return FailOpen(options, status, "%s", reason);
    return FailOpen(options, status, "out of memory: '%s' needs %llu bytes", plan.name,
                    static_cast<unsigned long long>(plan.arena_bytes));
  }
  handle->api = &kApi;
  *model = handle;
  return EDGESDK_OK;
}

const char* LastError(const edgesdk_model* model) {
  return model == nullptr ? open_error : model->executor->last_error();
}

const char* Name(const edgesdk_model* model) {
  return model == nullptr ? "" : model->executor->plan().name;
}

const char* Target(const edgesdk_model* model) {
  return model == nullptr ? "" : model->executor->plan().target;
}

const char* BuildId(const edgesdk_model* model) {
  return model == nullptr ? "" : model->executor->plan().build_id;
}

int32_t NumInputs(const edgesdk_model* model) {
  return model == nullptr ? 0 : static_cast<int32_t>(model->executor->plan().num_inputs);
}

int32_t NumOutputs(const edgesdk_model* model) {
  return model == nullptr ? 0 : static_cast<int32_t>(model->executor->plan().num_outputs);
}

edgesdk_status PortInfo(edgesdk_model* model, const edgert_port* ports, uint32_t count,
                        const char* what, int32_t index, edgesdk_tensor_info* info) {
  if (index < 0 || static_cast<uint32_t>(index) >= count) {
    return model->executor->Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                                 "there is no %s %d: the model has %u", what,
                                 static_cast<int>(index), count);
  }
  if (info == nullptr) {
    return model->executor->Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                                 "%s_info needs a place to write to", what);
  }
  const edgert_port& port = ports[index];
  *info = edgesdk_tensor_info{port.name, static_cast<edgesdk_dtype>(port.dtype), port.ndim,
                              port.shape, static_cast<size_t>(port.size_bytes)};
  return EDGESDK_OK;
}

edgesdk_status InputInfo(edgesdk_model* model, int32_t index, edgesdk_tensor_info* info) {
  if (model == nullptr) return NoHandle();
  const edgert_plan& plan = model->executor->plan();
  return PortInfo(model, plan.inputs, plan.num_inputs, "input", index, info);
}

edgesdk_status OutputInfo(edgesdk_model* model, int32_t index, edgesdk_tensor_info* info) {
  if (model == nullptr) return NoHandle();
  const edgert_plan& plan = model->executor->plan();
  return PortInfo(model, plan.outputs, plan.num_outputs, "output", index, info);
}

edgesdk_status SetInput(edgesdk_model* model, int32_t index, const void* data, size_t size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->SetInput(index, data, size_bytes);
}

edgesdk_status SetOutput(edgesdk_model* model, int32_t index, void* data, size_t size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->SetOutput(index, data, size_bytes);
}

edgesdk_status Run(edgesdk_model* model) {
  if (model == nullptr) return NoHandle();
  return model->executor->Run();
}

edgesdk_status GetOutput(edgesdk_model* model, int32_t index, const void** data,
                         size_t* size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->GetOutput(index, data, size_bytes);
}

void SetProfiling(edgesdk_model* model, int32_t enabled) {
  if (model == nullptr) return;
  model->executor->SetProfiling(enabled != 0);
}

int32_t NumLayers(const edgesdk_model* model) {
  return model == nullptr ? 0 : static_cast<int32_t>(model->executor->plan().num_steps);
}

edgesdk_status LayerInfo(edgesdk_model* model, int32_t index, edgesdk_layer_info* info) {
  if (model == nullptr) return NoHandle();
  return model->executor->LayerInfo(index, info);
}

edgesdk_status Memory(edgesdk_model* model, edgesdk_memory_info* info) {
  if (model == nullptr) return NoHandle();
  if (info == nullptr) {
    return model->executor->Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                                 "memory needs a place to write to");
  }
  *info = model->executor->Memory();
  return EDGESDK_OK;
}

int32_t NumThreads(const edgesdk_model* model) {
  return model == nullptr ? 0 : model->executor->NumThreads();
}

edgesdk_status SetInputDevice(edgesdk_model* model, int32_t index, void* data, size_t size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->BindDevice(kEdgertInput, index, data, size_bytes);
}

edgesdk_status SetOutputDevice(edgesdk_model* model, int32_t index, void* data, size_t size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->BindDevice(kEdgertOutput, index, data, size_bytes);
}

edgesdk_status GetInputDevice(edgesdk_model* model, int32_t index, void** data,
                              size_t* size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->DeviceAddress(kEdgertInput, index, data, size_bytes);
}

edgesdk_status GetOutputDevice(edgesdk_model* model, int32_t index, void** data,
                               size_t* size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->DeviceAddress(kEdgertOutput, index, data, size_bytes);
}

edgesdk_status DeviceInfo(edgesdk_model* model, edgesdk_device_info* info) {
  if (model == nullptr) return NoHandle();
  return model->executor->DeviceInfo(info);
}

edgesdk_status OwnInput(edgesdk_model* model, int32_t index, void** data, size_t* size_bytes) {
  if (model == nullptr) return NoHandle();
  return model->executor->OwnInput(index, data, size_bytes);
}

int32_t NumVariants(const edgesdk_model* model) { return model == nullptr ? 0 : CountVariants(); }

int32_t Variant(const edgesdk_model* model) { return model == nullptr ? 0 : model->variant; }

edgesdk_status CheckVariant(edgesdk_model* model, int32_t variant) {
  if (variant >= 0 && variant < CountVariants()) return EDGESDK_OK;
  return model->executor->Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                               "there is no variant %d: the model has %d",
                               static_cast<int>(variant), static_cast<int>(CountVariants()));
}

edgesdk_status VariantInputInfo(edgesdk_model* model, int32_t variant, int32_t index,
                                edgesdk_tensor_info* info) {
  if (model == nullptr) return NoHandle();
  edgesdk_status status = CheckVariant(model, variant);
  if (status != EDGESDK_OK) return status;
  const edgert_plan& plan = VariantPlan(variant);
  return PortInfo(model, plan.inputs, plan.num_inputs, "input", index, info);
}

edgesdk_status VariantOutputInfo(edgesdk_model* model, int32_t variant, int32_t index,
                                 edgesdk_tensor_info* info) {
  if (model == nullptr) return NoHandle();
  edgesdk_status status = CheckVariant(model, variant);
  if (status != EDGESDK_OK) return status;
  const edgert_plan& plan = VariantPlan(variant);
  return PortInfo(model, plan.outputs, plan.num_outputs, "output", index, info);
}

edgesdk_status SelectVariant(edgesdk_model* model, int32_t variant) {
  if (model == nullptr) return NoHandle();
  edgesdk_status status = CheckVariant(model, variant);
  if (status != EDGESDK_OK) return status;
  char reason[kErrorBytes] = "";
  status = UseVariant(model, variant, reason);
  if (status == EDGESDK_OK) return status;
  return model->executor->Fail(status, "%s", reason[0] != '\0' ? reason : "out of memory");
}

const edgesdk_api kApi = {
    EDGESDK_ABI_VERSION,
    sizeof(edgesdk_api),
    Open,
    Close,
    LastError,
    Name,
    Target,
    BuildId,
    NumInputs,
    NumOutputs,
    InputInfo,
    OutputInfo,
    SetInput,
    SetOutput,
    Run,
    GetOutput,
    SetProfiling,
    NumLayers,
    LayerInfo,
    Memory,
    NumThreads,
    SetInputDevice,
    SetOutputDevice,
    GetInputDevice,
    GetOutputDevice,
    DeviceInfo,
    OwnInput,
    NumVariants,
    Variant,
    VariantInputInfo,
    VariantOutputInfo,
    SelectVariant,
};

}  // namespace
}  // namespace edgert

// The table of the library that opened the handle; of this library for NULL.
static const edgesdk_api* Api(const edgesdk_model* model) {
  return model != nullptr ? model->api : &edgert::kApi;
}

extern "C" {

edgesdk_status edgert_open(uint32_t abi_version, const edgesdk_options* options,
                           edgesdk_model** model) {
  return edgert::Open(abi_version, options, model);
}

const edgesdk_api* edgesdk_get_api(uint32_t abi_version) {
  return abi_version == EDGESDK_ABI_VERSION ? &edgert::kApi : nullptr;
}

edgesdk_status edgesdk_model_open(uint32_t abi_version, const edgesdk_options* options,
                                  edgesdk_model** model) {
  return edgert::Open(abi_version, options, model);
}

void edgesdk_model_close(edgesdk_model* model) { Api(model)->close(model); }

const char* edgesdk_model_last_error(const edgesdk_model* model) {
  return Api(model)->last_error(model);
}

const char* edgesdk_model_name(const edgesdk_model* model) { return Api(model)->name(model); }
const char* edgesdk_model_target(const edgesdk_model* model) { return Api(model)->target(model); }

const char* edgesdk_model_build_id(const edgesdk_model* model) {
  return Api(model)->build_id(model);
}

int32_t edgesdk_model_num_inputs(const edgesdk_model* model) {
  return Api(model)->num_inputs(model);
}

int32_t edgesdk_model_num_outputs(const edgesdk_model* model) {
  return Api(model)->num_outputs(model);
}

edgesdk_status edgesdk_model_input_info(edgesdk_model* model, int32_t index,
                                        edgesdk_tensor_info* info) {
  return Api(model)->input_info(model, index, info);
}

edgesdk_status edgesdk_model_output_info(edgesdk_model* model, int32_t index,
                                         edgesdk_tensor_info* info) {
  return Api(model)->output_info(model, index, info);
}

edgesdk_status edgesdk_model_set_input(edgesdk_model* model, int32_t index, const void* data,
                                       size_t size_bytes) {
  return Api(model)->set_input(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_set_output(edgesdk_model* model, int32_t index, void* data,
                                        size_t size_bytes) {
  return Api(model)->set_output(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_run(edgesdk_model* model) { return Api(model)->run(model); }

edgesdk_status edgesdk_model_get_output(edgesdk_model* model, int32_t index, const void** data,
                                        size_t* size_bytes) {
  return Api(model)->get_output(model, index, data, size_bytes);
}

void edgesdk_model_set_profiling(edgesdk_model* model, int32_t enabled) {
  Api(model)->set_profiling(model, enabled);
}

int32_t edgesdk_model_num_layers(const edgesdk_model* model) {
  return Api(model)->num_layers(model);
}

edgesdk_status edgesdk_model_layer_info(edgesdk_model* model, int32_t index,
                                        edgesdk_layer_info* info) {
  return Api(model)->layer_info(model, index, info);
}

edgesdk_status edgesdk_model_memory(edgesdk_model* model, edgesdk_memory_info* info) {
  return Api(model)->memory(model, info);
}

int32_t edgesdk_model_num_threads(const edgesdk_model* model) {
  return Api(model)->num_threads(model);
}

edgesdk_status edgesdk_model_set_input_device(edgesdk_model* model, int32_t index, void* data,
                                              size_t size_bytes) {
  return Api(model)->set_input_device(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_set_output_device(edgesdk_model* model, int32_t index, void* data,
                                               size_t size_bytes) {
  return Api(model)->set_output_device(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_get_input_device(edgesdk_model* model, int32_t index, void** data,
                                              size_t* size_bytes) {
  return Api(model)->get_input_device(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_get_output_device(edgesdk_model* model, int32_t index, void** data,
                                               size_t* size_bytes) {
  return Api(model)->get_output_device(model, index, data, size_bytes);
}

edgesdk_status edgesdk_model_device_info(edgesdk_model* model, edgesdk_device_info* info) {
  return Api(model)->device_info(model, info);
}

edgesdk_status edgesdk_model_own_input(edgesdk_model* model, int32_t index, void** data,
                                       size_t* size_bytes) {
  return Api(model)->own_input(model, index, data, size_bytes);
}

int32_t edgesdk_model_num_variants(const edgesdk_model* model) {
  return Api(model)->num_variants(model);
}

int32_t edgesdk_model_variant(const edgesdk_model* model) { return Api(model)->variant(model); }

edgesdk_status edgesdk_model_variant_input_info(edgesdk_model* model, int32_t variant,
                                                int32_t index, edgesdk_tensor_info* info) {
  return Api(model)->variant_input_info(model, variant, index, info);
}

edgesdk_status edgesdk_model_variant_output_info(edgesdk_model* model, int32_t variant,
                                                 int32_t index, edgesdk_tensor_info* info) {
  return Api(model)->variant_output_info(model, variant, index, info);
}

edgesdk_status edgesdk_model_select_variant(edgesdk_model* model, int32_t variant) {
  return Api(model)->select_variant(model, variant);
}

}  // extern "C"
