// metal.cc: Apple's GPUs as an accelerator: one handle's buffers and its queue.
//
// CPU and GPU have one memory: all buffers are seen by both, inputs and outputs are never copied
// unless the caller brings buffers of its own. A segment is one command buffer with one encoder,
// whose launches Metal executes one after the other; a copy between them waits for those before and
// is the CPU's work. For a profile each launch has a command buffer of its own, which knows when it
// began and ended; EDGESDK_METAL_SYNC=1 does the same, so that a failure names its kernel.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "accelerator.h"
#include "accelerator_common.h"
#include "metal_driver.h"
#include "metal_program.h"
#include "platform.h"

namespace edgert {
namespace metal {
namespace {

// An input or output.
struct Port {
  Object own;
  Object bound;  // the caller's, or nullptr
};

}  // namespace
}  // namespace metal
}  // namespace edgert

using namespace edgert::metal;  // NOLINT: edgert_device is C's, its parts are ours

struct edgert_device {
  const edgert_plan& plan;
  Program* program;
  Object queue;  // the caller's, or our own
  Object arena;
  Port* inputs;
  Port* outputs;
  uint64_t io_bytes;
  Object commands;       // a command buffer that is filled or executed, or nullptr
  Object encoder;        // of `commands`, while it is filled
  bool waits_each_time;  // EDGESDK_METAL_SYNC
  char error[edgert::kErrorBytes];

  edgert::Report report() { return {error, sizeof(error)}; }
};

namespace edgert {
namespace metal {
namespace {

void Release(Object* object) {
  if (*object != nullptr) TheDriver().objc_release(*object);
  *object = nullptr;
}

edgesdk_status AllocatePorts(edgert_device* device, Port* ports, const edgert_port* infos,
                             uint32_t count, const char* what) {
  for (uint32_t i = 0; i < count; ++i) {
    device->io_bytes += infos[i].size_bytes;
    edgesdk_status status = MakeBuffer(*device->program, infos[i].size_bytes, nullptr, what,
                                       &ports[i].own, device->report());
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

edgesdk_status OpenMemory(edgert_device* device, void* callers_queue) {
  const edgert_plan& plan = device->plan;
  const Driver& driver = TheDriver();
  Report report = device->report();
  device->inputs = AllocateArray<Port>(plan.num_inputs);
  device->outputs = AllocateArray<Port>(plan.num_outputs);
  if (device->inputs == nullptr || device->outputs == nullptr) {
    return report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  }
  device->queue = callers_queue != nullptr
                      ? driver.objc_retain(static_cast<Object>(callers_queue))
                      : driver.Send<Object>(device->program->device, driver.selectors.new_queue);
  if (device->queue == nullptr) {
    return report.Fail(EDGESDK_ERROR_DEVICE, "cannot make a command queue on %s",
                       device->program->name);
  }
  edgesdk_status status = MakeBuffer(*device->program, plan.device_arena_bytes, nullptr,
                                     "activations", &device->arena, report);
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->inputs, plan.inputs, plan.num_inputs, "inputs");
  }
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->outputs, plan.outputs, plan.num_outputs, "outputs");
  }
  return status;
}

void ReleasePorts(Port* ports, uint32_t count) {
  for (uint32_t i = 0; ports != nullptr && i < count; ++i) {
    Release(&ports[i].own);
    Release(&ports[i].bound);
  }
}

void Close(edgert_device* device) {
  char ignored[160];
  if (!IsForked(ignored, sizeof(ignored))) {
    AutoreleasePool pool(TheDriver());
    ReleasePorts(device->inputs, device->plan.num_inputs);
    ReleasePorts(device->outputs, device->plan.num_outputs);
    Release(&device->arena);
    Release(&device->queue);
  }
  ReleaseProgram(device->program);
  free(device->outputs);
  free(device->inputs);
  free(device);
}

edgesdk_status Open(const edgert_plan& plan, const DeviceOptions& options, uint32_t,
                    edgert_device** result, char* error, size_t error_bytes) {
  Program* program = nullptr;
  edgesdk_status status = AcquireProgram(plan, options, &program, error, error_bytes);
  if (status != EDGESDK_OK) return status;
  void* memory = calloc(1, sizeof(edgert_device));
  if (memory == nullptr) {
    ReleaseProgram(program);
    return EDGESDK_ERROR_OUT_OF_MEMORY;
  }
  edgert_device* device = new (memory) edgert_device{plan, program};
  device->waits_each_time = EnvironmentIs("EDGESDK_METAL_SYNC", "1");
  {
    AutoreleasePool pool(TheDriver());
    status = OpenMemory(device, options.stream);
  }
  if (status == EDGESDK_OK) {
    *result = device;
  } else {
    snprintf(error, error_bytes, "%s", device->error);
    Close(device);
  }
  return status;
}

const char* Error(const edgert_device* device) { return device->error; }

void* AllocateHost(edgert_device* device, uint64_t bytes) {
  return AllocatePlainHost(bytes, device->report());
}

void FreeHost(edgert_device*, void* memory) { FreeAligned(memory); }

Port& PortOf(edgert_device* device, edgert_storage storage, uint32_t index) {
  return storage == kEdgertDeviceInput ? device->inputs[index] : device->outputs[index];
}

void* ContentsOf(Object buffer) {
  return TheDriver().Send<void*>(buffer, TheDriver().selectors.contents);
}

// A buffer begins a page of memory, so the view is as aligned as any.
void* HostView(edgert_device* device, edgert_storage storage, uint32_t index) {
  return ContentsOf(PortOf(device, storage, index).own);
}

edgesdk_status CheckBuffer(edgert_device* device, Object buffer, uint64_t bytes) {
  const Driver& driver = TheDriver();
  Report report = device->report();
  if (!driver.Responds(buffer, driver.selectors.contents)) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "%p is no MTLBuffer",
                       static_cast<void*>(buffer));
  }
  if (driver.Send<Object>(buffer, driver.selectors.device) != device->program->device) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "the buffer is of another MTLDevice than %s",
                       device->program->name);
  }
  Uint length = driver.Send<Uint>(buffer, driver.selectors.length);
  if (length < bytes) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT, "the buffer has %llu bytes, %llu are needed",
                       static_cast<unsigned long long>(length),
                       static_cast<unsigned long long>(bytes));
  }
  if (ContentsOf(buffer) == nullptr) {
    return report.Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                       "the buffer is the GPU's alone: make it with MTLResourceStorageModeShared");
  }
  return EDGESDK_OK;
}

edgesdk_status Bind(edgert_device* device, edgert_storage storage, uint32_t index, void* address,
                    uint64_t bytes) {
  if (IsForked(device->error, sizeof(device->error))) return EDGESDK_ERROR_DEVICE;
  AutoreleasePool pool(TheDriver());
  Object buffer = static_cast<Object>(address);
  if (buffer != nullptr) {
    edgesdk_status status = CheckBuffer(device, buffer, bytes);
    if (status != EDGESDK_OK) return status;
    TheDriver().objc_retain(buffer);
  }
  Port& port = PortOf(device, storage, index);
  Release(&port.bound);
  port.bound = buffer;
  return EDGESDK_OK;
}

// The buffer that a storage of the device is.
Object BufferOf(edgert_device* device, edgert_storage storage, uint32_t index) {
  if (storage == kEdgertDeviceArena) return device->arena;
  if (storage == kEdgertDeviceWeight) return device->program->weights;
  const Port& port = PortOf(device, storage, index);
  return port.bound != nullptr ? port.bound : port.own;
}

void* Address(edgert_device* device, edgert_storage storage, uint32_t index) {
  return BufferOf(device, storage, index);
}

// Has something to put launches into.
edgesdk_status BeginCommands(edgert_device* device) {
  const Driver& driver = TheDriver();
  if (device->commands != nullptr) return EDGESDK_OK;
  device->commands =
      driver.objc_retain(driver.Send<Object>(device->queue, driver.selectors.command_buffer));
  if (device->commands != nullptr) {
    device->encoder =
        driver.objc_retain(driver.Send<Object>(device->commands, driver.selectors.encoder));
  }
  if (device->encoder != nullptr) return EDGESDK_OK;
  Release(&device->commands);
  return device->report().Fail(EDGESDK_ERROR_DEVICE, "%s takes no commands", device->program->name);
}

edgesdk_status PutLaunch(edgert_device* device, uint32_t step_index) {
  edgesdk_status status = BeginCommands(device);
  if (status != EDGESDK_OK) return status;
  const Driver& driver = TheDriver();
  const edgert_step& step = device->plan.steps[step_index];
  const edgert_launch& launch = *step.launch;
  driver.Send<void>(device->encoder, driver.selectors.set_pipeline,
                    device->program->pipelines[step_index]);
  for (uint32_t i = 0; i < step.num_args; ++i) {
    const edgert_tensor& tensor = device->plan.tensors[step.args[i]];
    // A tensor of no bytes may have no buffer, and Metal wants one for each argument.
    Object buffer =
        tensor.size_bytes == 0 ? device->arena : BufferOf(device, tensor.storage, tensor.index);
    Uint offset = tensor.size_bytes == 0 ? 0 : static_cast<Uint>(tensor.offset);
    driver.Send<void>(device->encoder, driver.selectors.set_buffer, buffer, offset, Uint{i});
  }
  driver.Send<void>(device->encoder, driver.selectors.dispatch,
                    Size{launch.grid[0], launch.grid[1], launch.grid[2]},
                    Size{launch.block[0], launch.block[1], launch.block[2]});
  return EDGESDK_OK;
}

// Has the GPU begin with what was put.
void Commit(edgert_device* device) {
  const Driver& driver = TheDriver();
  if (device->encoder == nullptr) return;
  driver.Send<void>(device->encoder, driver.selectors.end_encoding);
  Release(&device->encoder);
  driver.Send<void>(device->commands, driver.selectors.commit);
}

// Waits for it. `name`: of its only command, or nullptr; `duration_ns` may be nullptr.
edgesdk_status Finish(edgert_device* device, const char* name, uint64_t* duration_ns) {
  const Driver& driver = TheDriver();
  if (device->commands == nullptr) return EDGESDK_OK;
  driver.Send<void>(device->commands, driver.selectors.wait);
  edgesdk_status status = EDGESDK_OK;
  if (driver.Send<Uint>(device->commands, driver.selectors.status) != kCommandBufferCompleted) {
    Object error = driver.Send<Object>(device->commands, driver.selectors.error);
    Object text =
        error == nullptr ? nullptr : driver.Send<Object>(error, driver.selectors.description);
    const char* reason = text == nullptr ? "no reason is given" : driver.Text(text);
    Report report = device->report();
    status = name != nullptr
                 ? report.Fail(EDGESDK_ERROR_KERNEL, "%s: %.900s", name, reason)
                 : report.Fail(EDGESDK_ERROR_KERNEL,
                               "a kernel failed on %s: %.900s; EDGESDK_METAL_SYNC=1 tells which",
                               device->program->name, reason);
  } else if (duration_ns != nullptr) {
    double seconds = driver.Send<double>(device->commands, driver.selectors.end_time) -
                     driver.Send<double>(device->commands, driver.selectors.start_time);
    *duration_ns = seconds > 0 ? static_cast<uint64_t>(seconds * 1e9) : 0;
  }
  Release(&device->commands);
  return status;
}

// The CPU sees all memory; the GPU does nothing meanwhile.
void Copy(edgert_device* device, Command* command) {
  auto at = [device](const DevicePlace& place) {
    return static_cast<unsigned char*>(ContentsOf(BufferOf(device, place.storage, place.index))) +
           place.offset;
  };
  uint64_t start = NowNs();
  void* to = command->kind == CommandKind::kDownload ? command->host : at(command->to);
  const void* from = command->kind == CommandKind::kUpload ? command->host : at(command->from);
  memcpy(to, from, static_cast<size_t>(command->bytes));
  command->duration_ns = NowNs() - start;
}

edgesdk_status PutCommand(edgert_device* device, Command* command, bool profile) {
  if (command->kind != CommandKind::kLaunch) {
    Commit(device);
    edgesdk_status status = Finish(device, nullptr, nullptr);
    if (status == EDGESDK_OK) Copy(device, command);
    return status;
  }
  edgesdk_status status = PutLaunch(device, command->step);
  if (status != EDGESDK_OK || !(profile || device->waits_each_time)) return status;
  Commit(device);
  return Finish(device, NameOf(device->plan, *command), profile ? &command->duration_ns : nullptr);
}

edgesdk_status Enqueue(edgert_device* device, const Segment& segment, bool profile) {
  if (IsForked(device->error, sizeof(device->error))) return EDGESDK_ERROR_DEVICE;
  AutoreleasePool pool(TheDriver());
  edgesdk_status status = EDGESDK_OK;
  for (uint32_t i = 0; i < segment.num_commands && status == EDGESDK_OK; ++i) {
    status = PutCommand(device, &segment.commands[i], profile);
  }
  Commit(device);
  if (status != EDGESDK_OK && device->commands != nullptr) {
    // What was put before goes on, with memory that the caller may free after a failure.
    TheDriver().Send<void>(device->commands, TheDriver().selectors.wait);
    Release(&device->commands);
  }
  return status;
}

edgesdk_status Wait(edgert_device* device) {
  AutoreleasePool pool(TheDriver());
  return Finish(device, nullptr, nullptr);
}

void Info(const edgert_device* device, edgesdk_device_info* info) {
  const Driver& driver = TheDriver();
  const Program& program = *device->program;
  info->name = program.name;
  info->unified_memory = 1;
  info->replays_reason = "Metal does not record commands";
  if (driver.Responds(program.device, driver.selectors.working_set_size)) {  // iOS: since 16
    info->memory_bytes = static_cast<size_t>(
        driver.Send<uint64_t>(program.device, driver.selectors.working_set_size));
  }
  info->weights_bytes = static_cast<size_t>(program.weights_bytes);
  info->activations_bytes = static_cast<size_t>(device->plan.device_arena_bytes);
  info->io_bytes = static_cast<size_t>(device->io_bytes);
  info->load_ns = program.load_ns;
}

}  // namespace
}  // namespace metal
}  // namespace edgert

extern "C" const edgert_accelerator edgert_metal = {
    "metal",
    &edgert_run_on_device,
    edgert::metal::Open,
    edgert::metal::Close,
    edgert::metal::Error,
    edgert::metal::AllocateHost,
    edgert::metal::FreeHost,
    edgert::metal::HostView,
    edgert::metal::Bind,
    edgert::metal::Address,
    edgert::metal::Enqueue,
    edgert::metal::Wait,
    edgert::metal::Info,
};
