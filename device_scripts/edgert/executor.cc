#include "executor.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "kernel_error.h"
#include "platform.h"
#include "thread_pool.h"

namespace edgert {
namespace {

thread_local int current_max_threads = 0;

// The size of edgesdk_device_info at first.
constexpr size_t kFirstDeviceInfoBytes = offsetof(edgesdk_device_info, driver);

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

template <typename T>
T* AllocateArray(size_t count) {
  return static_cast<T*>(calloc(count == 0 ? 1 : count, sizeof(T)));
}

// memcpy must not be given NULL, not even for no bytes.
void Copy(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0) memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

int CurrentMaxThreads() { return current_max_threads; }

edgesdk_status Executor::Create(const edgert_plan& plan, int num_threads,
                                const DeviceOptions& device, Executor** executor, char* error,
                                size_t error_bytes, unsigned char* arena) {
  void* memory = malloc(sizeof(Executor));
  if (memory == nullptr) return EDGESDK_ERROR_OUT_OF_MEMORY;
  Executor* made = new (memory) Executor(plan);
  made->arena_ = arena;
  made->owns_arena_ = arena == nullptr;
  made->max_threads_ = num_threads;
  edgesdk_status status = EDGESDK_OK;
  if (plan.accelerator != nullptr) {
    status = plan.accelerator->run->open(plan, device, &made->device_, error, error_bytes);
  }
  if (status == EDGESDK_OK && !made->Allocate()) status = EDGESDK_ERROR_OUT_OF_MEMORY;
  if (status == EDGESDK_OK) {
    *executor = made;
  } else {
    Destroy(made);
  }
  return status;
}

void Executor::Destroy(Executor* executor) {
  if (executor == nullptr) return;
  const edgert_plan& plan = executor->plan_;
  if (executor->device_ != nullptr) {
    plan.accelerator->run->close(executor->device_);
  } else {
    for (uint32_t i = 0; executor->inputs_ != nullptr && i < plan.num_inputs; ++i) {
      FreeAligned(executor->inputs_[i].own);
    }
    for (uint32_t i = 0; executor->outputs_ != nullptr && i < plan.num_outputs; ++i) {
      FreeAligned(executor->outputs_[i].own);
    }
    if (executor->owns_arena_) FreeAligned(executor->arena_);
  }
  free(executor->inputs_);
  free(executor->outputs_);
  free(executor->times_);
  free(executor->first_argument_);
  free(executor->arguments_);
  free(executor->tensors_);
  executor->~Executor();
  free(executor);
}

bool Executor::Allocate() {
  size_t num_arguments = 0;
  for (uint32_t i = 0; i < plan_.num_steps; ++i) num_arguments += plan_.steps[i].num_args;
  if (owns_arena_) {
    arena_ = static_cast<unsigned char*>(AllocateBlock(kEdgertArena, 0, plan_.arena_bytes));
  }
  tensors_ = AllocateArray<DLTensor>(plan_.num_tensors);
  arguments_ = AllocateArray<TVMFFIAny>(num_arguments);
  first_argument_ = AllocateArray<uint32_t>(plan_.num_steps);
  inputs_ = AllocateArray<Port>(plan_.num_inputs);
  outputs_ = AllocateArray<Port>(plan_.num_outputs);
  times_ = AllocateArray<StepTime>(plan_.num_steps);
  if (!arena_ || !tensors_ || !arguments_ || !first_argument_ || !inputs_ || !outputs_ || !times_) {
    return false;
  }
  for (uint32_t i = 0; i < plan_.num_tensors; ++i) {
    const edgert_tensor& tensor = plan_.tensors[i];
    DLTensor& view = tensors_[i];
    view.device = DLDevice{kDLCPU, 0};
    view.ndim = tensor.ndim;
    view.dtype = DLDataType{tensor.dtype_code, tensor.dtype_bits, 1};
    view.shape = const_cast<int64_t*>(tensor.shape);
    view.byte_offset = 0;
    if (tensor.storage == kEdgertWeight) {
      view.data = const_cast<uint8_t*>(plan_.weights) + tensor.offset;
    } else if (tensor.storage == kEdgertArena) {
      view.data = arena_ + tensor.offset;
    }
  }
  uint32_t next = 0;
  for (uint32_t i = 0; i < plan_.num_steps; ++i) {
    first_argument_[i] = next;
    for (uint32_t k = 0; k < plan_.steps[i].num_args; ++k, ++next) {
      arguments_[next].type_index = kTVMFFIDLTensorPtr;
      arguments_[next].v_ptr = &tensors_[plan_.steps[i].args[k]];
    }
  }
  return AllocatePorts();
}

bool Executor::AllocatePorts() {
  for (uint32_t i = 0; i < plan_.num_outputs; ++i) {
    outputs_[i].own = AllocateBlock(kEdgertOutput, i, plan_.outputs[i].size_bytes);
    if (outputs_[i].own == nullptr) return false;
    io_bytes_ += static_cast<size_t>(plan_.outputs[i].size_bytes);
    Bind(kEdgertOutput, i, outputs_[i].own);
  }
  for (uint32_t i = 0; device_ != nullptr && i < plan_.num_inputs; ++i) {
    inputs_[i].own = AllocateBlock(kEdgertInput, i, plan_.inputs[i].size_bytes);
    io_bytes_ += static_cast<size_t>(plan_.inputs[i].size_bytes);
    Bind(kEdgertInput, i, inputs_[i].own);
  }
  return true;
}

void* Executor::AllocateBlock(edgert_storage storage, uint32_t index, uint64_t bytes) {
  return device_ == nullptr ? AllocateAligned(bytes)
                            : plan_.accelerator->run->host_memory(device_, storage, index);
}

void Executor::Bind(edgert_storage storage, uint32_t index, void* base) {
  for (uint32_t i = 0; i < plan_.num_tensors; ++i) {
    const edgert_tensor& tensor = plan_.tensors[i];
    if (tensor.storage == storage && tensor.index == index) {
      tensors_[i].data = static_cast<unsigned char*>(base) + tensor.offset;
    }
  }
}

edgesdk_status Executor::SetInput(int32_t index, const void* data, size_t size_bytes) {
  if (CheckIndex(kEdgertInput, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  const edgert_port& info = plan_.inputs[index];
  if ((data == nullptr && size_bytes > 0) || size_bytes != info.size_bytes) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "input '%s' needs %llu bytes, got %llu%s",
                info.name, static_cast<unsigned long long>(info.size_bytes),
                static_cast<unsigned long long>(size_bytes), data == nullptr ? " at NULL" : "");
  }
  Port& port = inputs_[index];
  if (device_ != nullptr) {
    edgesdk_status status = plan_.accelerator->run->bind(
        device_, kEdgertInput, static_cast<uint32_t>(index), false, nullptr);
    if (status != EDGESDK_OK) return DeviceFailed(status);
  }
  bool copy = data != port.own && (device_ != nullptr || !IsAligned(data));
  if (copy && port.own == nullptr) {
    port.own = AllocateAligned(size_bytes);
    if (port.own == nullptr) return Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
    io_bytes_ += size_bytes;
  }
  port.caller = const_cast<void*>(data);
  port.copy = copy;
  port.bound = true;
  // Kernels refuse tensors at NULL, even those of no elements.
  void* base = copy ? port.own : data != nullptr ? port.caller : arena_;
  Bind(kEdgertInput, static_cast<uint32_t>(index), base);
  return EDGESDK_OK;
}

edgesdk_status Executor::OwnInput(int32_t index, void** data, size_t* size_bytes) {
  if (CheckIndex(kEdgertInput, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  if (data == nullptr) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "own_input needs a place to write to");
  }
  size_t bytes = static_cast<size_t>(plan_.inputs[index].size_bytes);
  Port& port = inputs_[index];
  if (port.own == nullptr) {
    port.own = AllocateAligned(bytes);
    if (port.own == nullptr) return Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
    io_bytes_ += bytes;
  }
  *data = port.own;
  if (size_bytes != nullptr) *size_bytes = bytes;
  return SetInput(index, port.own, bytes);
}

edgesdk_status Executor::SetOutput(int32_t index, void* data, size_t size_bytes) {
  if (CheckIndex(kEdgertOutput, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  const edgert_port& info = plan_.outputs[index];
  if (size_bytes != (data == nullptr ? 0 : info.size_bytes)) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "output '%s' has %llu bytes, got room for %llu",
                info.name, static_cast<unsigned long long>(info.size_bytes),
                static_cast<unsigned long long>(size_bytes));
  }
  if (device_ != nullptr) {
    edgesdk_status status = plan_.accelerator->run->bind(
        device_, kEdgertOutput, static_cast<uint32_t>(index), false, nullptr);
    if (status != EDGESDK_OK) return DeviceFailed(status);
  }
  Port& port = outputs_[index];
  port.caller = data;
  port.copy = data != nullptr && (device_ != nullptr || !IsAligned(data));
  bool direct = data != nullptr && !port.copy;
  Bind(kEdgertOutput, static_cast<uint32_t>(index), direct ? data : port.own);
  return EDGESDK_OK;
}

edgesdk_status Executor::GetOutput(int32_t index, const void** data, size_t* size_bytes) {
  if (CheckIndex(kEdgertOutput, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  if (data == nullptr) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "get_output needs a place to write to");
  }
  if (device_ != nullptr) {
    edgesdk_status status = plan_.accelerator->run->fetch(device_, static_cast<uint32_t>(index));
    if (status != EDGESDK_OK) return DeviceFailed(status);
  }
  const Port& port = outputs_[index];
  *data = port.caller != nullptr ? port.caller : port.own;
  if (size_bytes != nullptr) *size_bytes = static_cast<size_t>(plan_.outputs[index].size_bytes);
  return EDGESDK_OK;
}

edgesdk_status Executor::Run() {
  for (uint32_t i = 0; i < plan_.num_inputs; ++i) {
    Port& port = inputs_[i];
    if (!port.bound) {
      return Fail(EDGESDK_ERROR_INPUT_MISSING, "input '%s' was never set", plan_.inputs[i].name);
    }
    if (port.copy) Copy(port.own, port.caller, plan_.inputs[i].size_bytes);
  }
  int outer_max_threads = current_max_threads;
  current_max_threads = max_threads_;
  edgesdk_status status = RunSteps();
  current_max_threads = outer_max_threads;
  if (status != EDGESDK_OK) return status;
  for (uint32_t i = 0; i < plan_.num_outputs; ++i) {
    const Port& port = outputs_[i];
    if (port.copy) Copy(port.caller, port.own, plan_.outputs[i].size_bytes);
  }
  return EDGESDK_OK;
}

edgesdk_status Executor::RunSteps() {
  const edgert_device_run* run = device_ != nullptr ? plan_.accelerator->run : nullptr;
  StepTime* times = profiling_ ? times_ : nullptr;
  edgesdk_status status = EDGESDK_OK;
  if (run != nullptr) status = run->begin(device_, times);
  uint32_t i = 0;
  while (status == EDGESDK_OK) {
    if (run != nullptr) status = run->steps(device_, &i, times);
    if (status != EDGESDK_OK || i >= plan_.num_steps) break;
    if (times != nullptr) {
      uint64_t start = NowNs();
      status = RunStep(i);
      times[i].last_ns = NowNs() - start;
      times[i].total_ns += times[i].last_ns;
    } else {
      status = RunStep(i);
    }
    ++i;
    if (status != EDGESDK_OK) return status;
  }
  if (status == EDGESDK_OK && run != nullptr) status = run->finish(device_, times);
  return status == EDGESDK_OK ? status : DeviceFailed(status);
}

edgesdk_status Executor::RunStep(uint32_t index) {
  const edgert_step& step = plan_.steps[index];
  const TVMFFIAny* arguments = arguments_ + first_argument_[index];
  if (step.kernel == nullptr) {
    const DLTensor* from = static_cast<const DLTensor*>(arguments[0].v_ptr);
    const DLTensor* to = static_cast<const DLTensor*>(arguments[1].v_ptr);
    Copy(to->data, from->data, plan_.tensors[step.args[1]].size_bytes);
    return EDGESDK_OK;
  }
  TVMFFIAny result;
  memset(&result, 0, sizeof(result));
  KernelError::Clear();
  int code = step.kernel(nullptr, arguments, static_cast<int32_t>(step.num_args), &result);
  if (code == 0) return EDGESDK_OK;
  const char* reason = KernelError::Message();
  if (reason[0] != '\0') {
    return Fail(EDGESDK_ERROR_KERNEL, "%s failed: %s", step.kernel_name, reason);
  }
  return Fail(EDGESDK_ERROR_KERNEL, "%s failed with code %d", step.kernel_name, code);
}

edgesdk_status Executor::BindDevice(edgert_storage storage, int32_t index, void* data,
                                    size_t size_bytes) {
  if (CheckIndex(storage, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  if (device_ == nullptr) {
    return Fail(EDGESDK_ERROR_DEVICE, "'%s' was built for '%s', which has no memory but the CPU's",
                plan_.name, plan_.target);
  }
  bool is_input = storage == kEdgertInput;
  const edgert_port& info = is_input ? plan_.inputs[index] : plan_.outputs[index];
  if (size_bytes != (data == nullptr ? 0 : info.size_bytes)) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "%s '%s' has %llu bytes, got %llu",
                is_input ? "input" : "output", info.name,
                static_cast<unsigned long long>(info.size_bytes),
                static_cast<unsigned long long>(size_bytes));
  }
  edgesdk_status status =
      plan_.accelerator->run->bind(device_, storage, static_cast<uint32_t>(index), true, data);
  if (status != EDGESDK_OK) return DeviceFailed(status);
  Port& port = is_input ? inputs_[index] : outputs_[index];
  port.caller = nullptr;
  port.copy = false;
  port.bound = true;
  return EDGESDK_OK;
}

edgesdk_status Executor::DeviceAddress(edgert_storage storage, int32_t index, void** data,
                                       size_t* size_bytes) {
  if (CheckIndex(storage, index) != EDGESDK_OK) return EDGESDK_ERROR_INVALID_ARGUMENT;
  if (device_ == nullptr) {
    return Fail(EDGESDK_ERROR_DEVICE, "'%s' was built for '%s', which has no memory but the CPU's",
                plan_.name, plan_.target);
  }
  bool is_input = storage == kEdgertInput;
  if (data == nullptr) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "get_%s_device needs a place to write to",
                is_input ? "input" : "output");
  }
  *data = plan_.accelerator->run->address(device_, storage, static_cast<uint32_t>(index));
  if (size_bytes != nullptr) {
    *size_bytes = static_cast<size_t>((is_input ? plan_.inputs : plan_.outputs)[index].size_bytes);
  }
  return EDGESDK_OK;
}

edgesdk_status Executor::DeviceInfo(edgesdk_device_info* info) {
  if (info == nullptr || info->struct_size < kFirstDeviceInfoBytes) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                "device_info needs a struct whose struct_size is set to %zu",
                sizeof(edgesdk_device_info));
  }
  edgesdk_device_info all = {};
  all.kind = plan_.accelerator == nullptr ? "cpu" : plan_.accelerator->kind;
  all.name = "";
  all.replays_reason = "";
  if (device_ != nullptr) plan_.accelerator->run->info(device_, &all);
  // A program of an older header has room for fewer fields.
  all.struct_size = info->struct_size < sizeof(all) ? info->struct_size : sizeof(all);
  memcpy(info, &all, all.struct_size);
  return EDGESDK_OK;
}

void Executor::SetProfiling(bool enabled) {
  profiling_ = enabled;
  if (enabled) memset(times_, 0, plan_.num_steps * sizeof(StepTime));
}

edgesdk_status Executor::LayerInfo(int32_t index, edgesdk_layer_info* info) {
  if (index < 0 || static_cast<uint32_t>(index) >= plan_.num_steps) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "there is no layer %d: the model has %u",
                static_cast<int>(index), plan_.num_steps);
  }
  if (info == nullptr) {
    return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "layer_info needs a place to write to");
  }
  const edgert_step& step = plan_.steps[index];
  *info = edgesdk_layer_info{step.layer_name, step.kernel_name, times_[index].last_ns,
                             times_[index].total_ns};
  return EDGESDK_OK;
}

edgesdk_memory_info Executor::Memory() const {
  return edgesdk_memory_info{static_cast<size_t>(plan_.weights_bytes),
                             static_cast<size_t>(plan_.arena_bytes), io_bytes_};
}

int Executor::NumThreads() const {
  int pool = ThreadPool::Shared().num_threads();
  return max_threads_ > 0 && max_threads_ < pool ? max_threads_ : pool;
}

edgesdk_status Executor::CheckIndex(edgert_storage storage, int32_t index) {
  bool is_input = storage == kEdgertInput;
  uint32_t count = is_input ? plan_.num_inputs : plan_.num_outputs;
  if (index >= 0 && static_cast<uint32_t>(index) < count) return EDGESDK_OK;
  return Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "there is no %s %d: the model has %u",
              is_input ? "input" : "output", static_cast<int>(index), count);
}

edgesdk_status Executor::DeviceFailed(edgesdk_status status) {
  return Fail(status, "%s", plan_.accelerator->run->error(device_));
}

edgesdk_status Executor::Fail(edgesdk_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_, sizeof(error_), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace edgert
