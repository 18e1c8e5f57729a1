// opencl.cc: OpenCL's devices as an accelerator: one handle's memory, kernels and queue.
//
// Tensors are parts of a few buffers, as the plan has placed them, and a kernel's arguments never
// change unless the caller binds others: each step has a kernel object of its own, whose arguments
// are set when the handle opens, so that a run only puts launches into the queue.
//
// Where host and device share one memory, the host sees the blocks of inputs and outputs mapped.
// OpenCL wants them unmapped while the device works: they are given to the device before a segment
// and taken back behind it, at the same address. EDGESDK_OPENCL_COPY=1 turns this off.
// EDGESDK_OPENCL_SYNC=1 waits after each command, so that a failure names its kernel.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "accelerator.h"
#include "accelerator_common.h"
#include "opencl_driver.h"
#include "opencl_program.h"
#include "platform.h"

namespace edgert {
namespace opencl {
namespace {

// An input or output in device memory.
struct Port {
  Memory own;
  Memory bound;    // the caller's, or nullptr
  void* view;      // where the host sees `own`, or nullptr
  bool is_mapped;  // the host may use `view`
  bool is_used;    // by a step of the device
  uint64_t bytes;
};

// Commands that are put before the device is told to begin.
constexpr uint32_t kCommandsOfFlush = 16;

}  // namespace
}  // namespace opencl
}  // namespace edgert

using namespace edgert::opencl;  // NOLINT: edgert_device is C's, its parts are ours

struct edgert_device {
  const edgert_plan& plan;
  Program* program;
  Queue queue;      // the caller's, or our own
  Queue profiling;  // made for the first profile: some drivers are slower with times
  bool queue_is_ours;
  Memory arena;
  Port* inputs;
  Port* outputs;
  uint64_t io_bytes;
  Memory* parts;    // per tensor that a launch takes: of `arena` or the weights; else nullptr
  Kernel* kernels;  // per step; nullptr for steps that launch nothing
  Event* events;    // of profiles: one per command
  Queue busy;       // has commands of the present segment
  const edgert::Segment* profiled;  // its events are in the queue
  bool waits_each_time;             // EDGESDK_OPENCL_SYNC
  bool lost;                        // an error after which the handle does nothing more
  char error[edgert::kErrorBytes];

  edgert::Report report() { return {error, sizeof(error)}; }
};

namespace edgert {
namespace opencl {
namespace {

edgesdk_status FailWith(edgert_device* device, Result result, const char* what) {
  char reason[96];
  Describe(result, reason, sizeof(reason));
  return device->report().Fail(
      IsOutOfMemory(result) ? EDGESDK_ERROR_OUT_OF_MEMORY : EDGESDK_ERROR_DEVICE, "%s: %s", what,
      reason);
}

edgesdk_status Allocate(edgert_device* device, Memory* memory, uint64_t bytes, const char* what) {
  const Program& program = *device->program;
  Result result = kInvalidBufferSize;
  if (bytes <= program.max_allocation && bytes <= SIZE_MAX) {
    Bitfield flags = kMemReadWrite | (program.unified ? kMemAllocHostPtr : 0);
    *memory = TheDriver().CreateBuffer(
        program.context, flags, bytes == 0 ? 1 : static_cast<size_t>(bytes), nullptr, &result);
  }
  if (result == kSuccess && *memory != nullptr) return EDGESDK_OK;
  *memory = nullptr;
  char text[256];
  snprintf(text, sizeof(text), "no room for %llu bytes of %s on %s (at most %llu at once)",
           static_cast<unsigned long long>(bytes), what, program.name,
           static_cast<unsigned long long>(program.max_allocation));
  return FailWith(device, result, text);
}

// Lets the host see an input or output, and waits.
Result Map(Queue queue, Port* port) {
  Result result = kSuccess;
  void* view =
      TheDriver().EnqueueMapBuffer(queue, port->own, 1, kMapRead | kMapWrite, 0,
                                   static_cast<size_t>(port->bytes), 0, nullptr, nullptr, &result);
  if (result == kSuccess && view == nullptr) result = kMapFailure;
  if (result != kSuccess) return result;
  port->view = view;
  port->is_mapped = true;
  return kSuccess;
}

Result UnmapPort(Queue queue, Port* port) {
  Result result =
      TheDriver().EnqueueUnmapMemObject(queue, port->own, port->view, 0, nullptr, nullptr);
  if (result == kSuccess) port->is_mapped = false;
  return result;
}

// Gives `port` a view if it is always at the same place; most drivers see to that, but the
// specification does not promise it.
edgesdk_status MakeView(edgert_device* device, Port* port) {
  Result result = Map(device->queue, port);
  void* first = port->view;
  if (result == kSuccess) result = UnmapPort(device->queue, port);
  if (result == kSuccess) result = Map(device->queue, port);
  bool is_aligned = reinterpret_cast<uintptr_t>(port->view) % kAlignment == 0;
  if (result == kSuccess && (port->view != first || !is_aligned)) {
    result = UnmapPort(device->queue, port);
    if (result == kSuccess) port->view = nullptr;
  }
  if (result == kSuccess) return EDGESDK_OK;
  return FailWith(device, result, "cannot see inputs and outputs in the device's memory");
}

edgesdk_status AllocatePorts(edgert_device* device, Port* ports, const edgert_port* infos,
                             uint32_t count, const char* what) {
  bool wants_views = device->program->unified && !EnvironmentIs("EDGESDK_OPENCL_COPY", "1");
  for (uint32_t i = 0; i < count; ++i) {
    Port& port = ports[i];
    port.bytes = infos[i].size_bytes;
    device->io_bytes += port.bytes;
    edgesdk_status status = Allocate(device, &port.own, port.bytes, what);
    if (status == EDGESDK_OK && wants_views && port.bytes > 0) status = MakeView(device, &port);
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

Port& PortOf(edgert_device* device, edgert_storage storage, uint32_t index) {
  return storage == kEdgertDeviceInput ? device->inputs[index] : device->outputs[index];
}

// The buffer that a storage of the device is.
Memory BufferOf(edgert_device* device, const DevicePlace& place) {
  if (place.storage == kEdgertDeviceArena) return device->arena;
  if (place.storage == kEdgertDeviceWeight) return device->program->weights;
  const Port& port = PortOf(device, place.storage, place.index);
  return port.bound != nullptr ? port.bound : port.own;
}

// What a launch is given for tensor `index`.
edgesdk_status FindArgument(edgert_device* device, uint32_t index, Memory* argument) {
  const edgert_tensor& tensor = device->plan.tensors[index];
  *argument = nullptr;
  if (tensor.size_bytes == 0) return EDGESDK_OK;
  bool is_port = tensor.storage == kEdgertDeviceInput || tensor.storage == kEdgertDeviceOutput;
  Memory buffer = BufferOf(device, DevicePlace{tensor.storage, tensor.index, 0});
  if (is_port && tensor.offset == 0) {
    PortOf(device, tensor.storage, tensor.index).is_used = true;
    *argument = buffer;
    return EDGESDK_OK;
  }
  edgert::Report report = device->report();
  if (is_port) return report.Fail(EDGESDK_ERROR_DEVICE, "a kernel takes a part of an input");
  Memory& part = device->parts[index];
  if (part == nullptr) {
    BufferRegion region{static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.size_bytes)};
    Result result = kSuccess;
    part = TheDriver().CreateSubBuffer(buffer, 0, kBufferCreateTypeRegion, &region, &result);
    if (part == nullptr || result != kSuccess) {
      part = nullptr;
      return FailWith(device, result, "cannot make a part of a buffer");
    }
  }
  *argument = part;
  return EDGESDK_OK;
}

edgesdk_status SetArguments(edgert_device* device, uint32_t step_index) {
  const edgert_step& step = device->plan.steps[step_index];
  for (uint32_t i = 0; i < step.num_args; ++i) {
    Memory argument;
    edgesdk_status status = FindArgument(device, step.args[i], &argument);
    if (status != EDGESDK_OK) return status;
    Result result = TheDriver().SetKernelArg(device->kernels[step_index], i, sizeof(argument),
                                             argument == nullptr ? nullptr : &argument);
    if (result != kSuccess) return FailWith(device, result, step.launch->function);
  }
  return EDGESDK_OK;
}

edgesdk_status MakeKernels(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    if (plan.steps[i].launch == nullptr) continue;
    edgesdk_status status = MakeKernel(*device->program, plan.steps[i], &device->kernels[i],
                                       device->error, sizeof(device->error));
    if (status == EDGESDK_OK) status = SetArguments(device, i);
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

bool AllocateTables(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  device->inputs = AllocateArray<Port>(plan.num_inputs);
  device->outputs = AllocateArray<Port>(plan.num_outputs);
  device->parts = AllocateArray<Memory>(plan.num_tensors);
  device->kernels = AllocateArray<Kernel>(plan.num_steps);
  return device->inputs && device->outputs && device->parts && device->kernels;
}

edgesdk_status MakeQueue(edgert_device* device, Bitfield properties, Queue* queue) {
  Result result = kSuccess;
  const Program& program = *device->program;
  *queue = TheDriver().CreateCommandQueue(program.context, program.device, properties, &result);
  if (*queue != nullptr && result == kSuccess) return EDGESDK_OK;
  *queue = nullptr;
  return FailWith(device, result, "cannot make a command queue");
}

edgesdk_status OpenMemory(edgert_device* device, void* callers_queue) {
  const edgert_plan& plan = device->plan;
  edgesdk_status status = EDGESDK_OK;
  device->queue = static_cast<Queue>(callers_queue);
  if (callers_queue == nullptr) {
    status = MakeQueue(device, 0, &device->queue);
    device->queue_is_ours = status == EDGESDK_OK;
  }
  if (status == EDGESDK_OK && plan.device_arena_bytes > 0) {
    status = Allocate(device, &device->arena, plan.device_arena_bytes, "activations");
  }
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->inputs, plan.inputs, plan.num_inputs, "inputs");
  }
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->outputs, plan.outputs, plan.num_outputs, "outputs");
  }
  return status == EDGESDK_OK ? MakeKernels(device) : status;
}

// Results are not looked at: after an error all of these may fail.
void FreePorts(edgert_device* device, Port* ports, uint32_t count) {
  const Driver& driver = TheDriver();
  for (uint32_t i = 0; ports != nullptr && i < count; ++i) {
    if (ports[i].is_mapped) UnmapPort(device->queue, &ports[i]);
    if (device->queue != nullptr) driver.Finish(device->queue);
    if (ports[i].own != nullptr) driver.ReleaseMemObject(ports[i].own);
  }
}

void FreeOnDevice(edgert_device* device) {
  const Driver& driver = TheDriver();
  const edgert_plan& plan = device->plan;
  for (uint32_t i = 0; device->kernels != nullptr && i < plan.num_steps; ++i) {
    if (device->kernels[i] != nullptr) driver.ReleaseKernel(device->kernels[i]);
  }
  for (uint32_t i = 0; device->parts != nullptr && i < plan.num_tensors; ++i) {
    if (device->parts[i] != nullptr) driver.ReleaseMemObject(device->parts[i]);
  }
  FreePorts(device, device->inputs, plan.num_inputs);
  FreePorts(device, device->outputs, plan.num_outputs);
  if (device->arena != nullptr) driver.ReleaseMemObject(device->arena);
  if (device->profiling != nullptr) driver.ReleaseCommandQueue(device->profiling);
  if (device->queue_is_ours) driver.ReleaseCommandQueue(device->queue);
}

void Close(edgert_device* device) {
  char ignored[160];
  if (!IsForked(ignored, sizeof(ignored))) FreeOnDevice(device);
  ReleaseProgram(device->program);
  free(device->events);
  free(device->kernels);
  free(device->parts);
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
  device->waits_each_time = EnvironmentIs("EDGESDK_OPENCL_SYNC", "1");
  status =
      AllocateTables(device) ? OpenMemory(device, options.stream) : EDGESDK_ERROR_OUT_OF_MEMORY;
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

void* HostView(edgert_device* device, edgert_storage storage, uint32_t index) {
  return PortOf(device, storage, index).view;
}

// Whether the caller's buffer can be used in this handle's commands.
edgesdk_status CheckBuffer(edgert_device* device, Memory memory, uint64_t bytes) {
  size_t size = 0;
  Context context = nullptr;
  Result result = TheDriver().GetMemObjectInfo(memory, kMemSize, sizeof(size), &size, nullptr);
  if (result == kSuccess) {
    result = TheDriver().GetMemObjectInfo(memory, kMemContext, sizeof(context), &context, nullptr);
  }
  if (result != kSuccess) {
    return device->report().Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                                 "%p is no buffer (cl_mem) of OpenCL", static_cast<void*>(memory));
  }
  if (size < bytes) {
    return device->report().Fail(
        EDGESDK_ERROR_INVALID_ARGUMENT, "the buffer has %llu bytes, %llu are needed",
        static_cast<unsigned long long>(size), static_cast<unsigned long long>(bytes));
  }
  if (context != device->program->context) {
    return device->report().Fail(
        EDGESDK_ERROR_INVALID_ARGUMENT,
        "the buffer belongs to another context: open the model with a queue of that one "
        "as device_stream");
  }
  return EDGESDK_OK;
}

edgesdk_status Bind(edgert_device* device, edgert_storage storage, uint32_t index, void* address,
                    uint64_t bytes) {
  if (IsForked(device->error, sizeof(device->error))) return EDGESDK_ERROR_DEVICE;
  Memory memory = static_cast<Memory>(address);
  if (memory != nullptr) {
    edgesdk_status status = CheckBuffer(device, memory, bytes);
    if (status != EDGESDK_OK) return status;
  }
  PortOf(device, storage, index).bound = memory;
  const edgert_plan& plan = device->plan;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    const edgert_step& step = plan.steps[i];
    bool takes = false;
    for (uint32_t k = 0; step.launch != nullptr && k < step.num_args; ++k) {
      const edgert_tensor& tensor = plan.tensors[step.args[k]];
      takes = takes || (tensor.storage == storage && tensor.index == index);
    }
    edgesdk_status status = takes ? SetArguments(device, i) : EDGESDK_OK;
    if (status != EDGESDK_OK) return status;
  }
  return EDGESDK_OK;
}

void* Address(edgert_device* device, edgert_storage storage, uint32_t index) {
  return BufferOf(device, DevicePlace{storage, index, 0});
}

template <typename F>
void ForEachPort(edgert_device* device, F function) {
  for (uint32_t i = 0; i < device->plan.num_inputs; ++i) function(&device->inputs[i]);
  for (uint32_t i = 0; i < device->plan.num_outputs; ++i) function(&device->outputs[i]);
}

// Gives the device the inputs and outputs that it works on.
Result Unmap(edgert_device* device, Queue queue) {
  Result result = kSuccess;
  ForEachPort(device, [&](Port* port) {
    if (!port->is_mapped || !port->is_used || port->bound != nullptr || result != kSuccess) return;
    result = UnmapPort(queue, port);
  });
  return result;
}

// Takes them back, when all before is done.
edgesdk_status MapAgain(edgert_device* device, Queue queue) {
  edgesdk_status status = EDGESDK_OK;
  ForEachPort(device, [&](Port* port) {
    if (port->view == nullptr || port->is_mapped || status != EDGESDK_OK) return;
    void* before = port->view;
    Result result = Map(queue, port);
    if (result != kSuccess) {
      status = FailWith(device, result, "cannot see inputs and outputs in the device's memory");
    } else if (port->view != before) {
      status = device->report().Fail(
          EDGESDK_ERROR_DEVICE, "the driver of %s moves mapped memory: set EDGESDK_OPENCL_COPY=1",
          device->program->name);
    }
    if (status != EDGESDK_OK) device->lost = true;
  });
  return status;
}

// The input or output whose view, which is unmapped now, holds `host`; else nullptr.
const Port* HiddenPort(edgert_device* device, const void* host) {
  const Port* found = nullptr;
  uintptr_t at = reinterpret_cast<uintptr_t>(host);
  ForEachPort(device, [&](Port* port) {
    uintptr_t start = reinterpret_cast<uintptr_t>(port->view);
    if (port->view != nullptr && !port->is_mapped && at >= start && at - start < port->bytes) {
      found = port;
    }
  });
  return found;
}

Result PutCommand(edgert_device* device, Queue queue, const Command& command, Event* event) {
  const Driver& driver = TheDriver();
  size_t bytes = static_cast<size_t>(command.bytes);
  if (command.kind == CommandKind::kLaunch) {
    const edgert_launch& launch = *device->plan.steps[command.step].launch;
    size_t global[3];
    size_t local[3];
    Uint dimensions = 1;
    for (Uint axis = 0; axis < 3; ++axis) {
      local[axis] = launch.block[axis];
      global[axis] = size_t{launch.grid[axis]} * launch.block[axis];
      if (global[axis] > 1) dimensions = axis + 1;
    }
    return driver.EnqueueNDRangeKernel(queue, device->kernels[command.step], dimensions, nullptr,
                                       global, local, 0, nullptr, event);
  }
  Memory from = nullptr;
  Memory to = nullptr;
  size_t from_offset = static_cast<size_t>(command.from.offset);
  size_t to_offset = static_cast<size_t>(command.to.offset);
  const Port* hidden =
      command.kind == CommandKind::kCopy ? nullptr : HiddenPort(device, command.host);
  size_t hidden_offset = hidden == nullptr
                             ? 0
                             : static_cast<size_t>(static_cast<unsigned char*>(command.host) -
                                                   static_cast<unsigned char*>(hidden->view));
  if (command.kind != CommandKind::kUpload) from = BufferOf(device, command.from);
  if (command.kind != CommandKind::kDownload) to = BufferOf(device, command.to);
  if (command.kind == CommandKind::kUpload) {
    if (hidden == nullptr) {
      return driver.EnqueueWriteBuffer(queue, to, 0, to_offset, bytes, command.host, 0, nullptr,
                                       event);
    }
    from = hidden->own;
    from_offset = hidden_offset;
  } else if (command.kind == CommandKind::kDownload) {
    if (hidden == nullptr) {
      return driver.EnqueueReadBuffer(queue, from, 0, from_offset, bytes, command.host, 0, nullptr,
                                      event);
    }
    to = hidden->own;
    to_offset = hidden_offset;
  }
  return driver.EnqueueCopyBuffer(queue, from, to, from_offset, to_offset, bytes, 0, nullptr,
                                  event);
}

// Puts a segment's commands into the queue. On failure *failed is the name of what was refused.
Result PutCommands(edgert_device* device, Queue queue, const Segment& segment, bool profile,
                   const char** failed) {
  const Driver& driver = TheDriver();
  *failed = "giving inputs and outputs to the GPU";
  Result result = Unmap(device, queue);
  for (uint32_t i = 0; i < segment.num_commands && result == kSuccess; ++i) {
    *failed = NameOf(device->plan, segment.commands[i]);
    result = PutCommand(device, queue, segment.commands[i], profile ? &device->events[i] : nullptr);
    if (result == kSuccess && device->waits_each_time) {
      result = driver.Finish(queue);
    } else if (result == kSuccess && i % kCommandsOfFlush == kCommandsOfFlush - 1) {
      result = driver.Flush(queue);
    }
  }
  return result;
}

void ReleaseEvents(edgert_device* device, uint32_t count) {
  for (uint32_t i = 0; device->events != nullptr && i < count; ++i) {
    if (device->events[i] != nullptr) TheDriver().ReleaseEvent(device->events[i]);
    device->events[i] = nullptr;
  }
}

edgesdk_status PrepareProfile(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  if (device->events == nullptr) {
    device->events =
        AllocateArray<Event>(size_t{plan.num_steps} + plan.num_inputs + plan.num_outputs);
  }
  if (device->events == nullptr)
    return device->report().Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
  if (device->profiling == nullptr) {
    edgesdk_status status = MakeQueue(device, kQueueProfiling, &device->profiling);
    if (status != EDGESDK_OK) return status;
  }
  // What the caller has put into a queue of its own comes first.
  Result result = device->queue_is_ours ? kSuccess : TheDriver().Finish(device->queue);
  return result == kSuccess ? EDGESDK_OK : FailWith(device, result, "the caller's queue");
}

edgesdk_status Enqueue(edgert_device* device, const Segment& segment, bool profile) {
  if (IsForked(device->error, sizeof(device->error))) return EDGESDK_ERROR_DEVICE;
  if (device->lost) return EDGESDK_ERROR_DEVICE;  // `error` still says why
  edgesdk_status status = profile ? PrepareProfile(device) : EDGESDK_OK;
  if (status != EDGESDK_OK) return status;
  device->busy = profile ? device->profiling : device->queue;
  device->profiled = profile ? &segment : nullptr;
  const char* failed = nullptr;
  Result result = PutCommands(device, device->busy, segment, profile, &failed);
  if (result == kSuccess) return EDGESDK_OK;
  // What was put before goes on, with memory that the caller may free after a failure.
  TheDriver().Finish(device->busy);
  MapAgain(device, device->busy);
  ReleaseEvents(device, profile ? segment.num_commands : 0);
  status = FailWith(device, result, failed);
  return status == EDGESDK_ERROR_DEVICE ? EDGESDK_ERROR_KERNEL : status;
}

edgesdk_status ReadTimes(edgert_device* device) {
  const Segment& segment = *device->profiled;
  const Driver& driver = TheDriver();
  device->profiled = nullptr;
  Result result = kSuccess;
  for (uint32_t i = 0; i < segment.num_commands && result == kSuccess; ++i) {
    uint64_t start = 0;
    uint64_t end = 0;
    result = driver.GetEventProfilingInfo(device->events[i], kProfilingStart, sizeof(start), &start,
                                          nullptr);
    if (result == kSuccess) {
      result = driver.GetEventProfilingInfo(device->events[i], kProfilingEnd, sizeof(end), &end,
                                            nullptr);
    }
    segment.commands[i].duration_ns = end > start ? end - start : 0;
  }
  ReleaseEvents(device, segment.num_commands);
  return result == kSuccess ? EDGESDK_OK
                            : FailWith(device, result, "cannot read a time of the GPU");
}

edgesdk_status Wait(edgert_device* device) {
  Result result = TheDriver().Finish(device->busy);
  edgesdk_status status = EDGESDK_OK;
  if (result == kSuccess) {
    status = MapAgain(device, device->busy);
    if (device->profiled == nullptr) return status;
    edgesdk_status read = ReadTimes(device);
    return status == EDGESDK_OK ? read : status;
  }
  device->lost = true;
  if (device->profiled != nullptr) ReleaseEvents(device, device->profiled->num_commands);
  device->profiled = nullptr;
  char reason[96];
  Describe(result, reason, sizeof(reason));
  return device->report().Fail(EDGESDK_ERROR_KERNEL,
                               "a kernel failed on %s: %s; EDGESDK_OPENCL_SYNC=1 tells which",
                               device->program->name, reason);
}

void Info(const edgert_device* device, edgesdk_device_info* info) {
  const Program& program = *device->program;
  info->name = program.name;
  info->index = program.index;
  for (uint32_t i = 0; i < device->plan.num_inputs; ++i) {
    if (device->inputs[i].view != nullptr) info->unified_memory = 1;
  }
  info->replays_reason = "OpenCL does not record commands";
  uint64_t bytes = 0;
  if (TheDriver().GetDeviceInfo(program.device, kDeviceGlobalMemSize, sizeof(bytes), &bytes,
                                nullptr) == kSuccess) {
    info->memory_bytes = static_cast<size_t>(bytes);
  }
  info->weights_bytes = static_cast<size_t>(program.weights_bytes);
  info->activations_bytes = static_cast<size_t>(device->plan.device_arena_bytes);
  info->io_bytes = static_cast<size_t>(device->io_bytes);
  info->driver = program.versions;
  info->load_ns = program.load_ns;
  info->code_from_cache = program.from_cache ? 1 : 0;
  info->code_cache = program.cache;
}

}  // namespace
}  // namespace opencl
}  // namespace edgert

extern "C" const edgert_accelerator edgert_opencl = {
    "opencl",
    &edgert_run_on_device,
    edgert::opencl::Open,
    edgert::opencl::Close,
    edgert::opencl::Error,
    edgert::opencl::AllocateHost,
    edgert::opencl::FreeHost,
    edgert::opencl::HostView,
    edgert::opencl::Bind,
    edgert::opencl::Address,
    edgert::opencl::Enqueue,
    edgert::opencl::Wait,
    edgert::opencl::Info,
};
