// cuda.cc: NVIDIA's GPUs as an accelerator: one handle's memory, stream, and recorded commands.
//
// A segment's commands are recorded into a CUDA graph when they run for the first time and replayed
// after that: one call of the driver in place of one per kernel, whose work on the CPU often takes
// longer than the kernel on the GPU. EDGESDK_CUDA_GRAPH=0 turns this off, for measuring;
// EDGESDK_CUDA_SYNC=1 waits after each command, so that a failure names its kernel.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "accelerator.h"
#include "accelerator_common.h"
#include "cuda_driver.h"
#include "cuda_program.h"
#include "platform.h"

namespace edgert {
namespace cuda {
namespace {

// An input or output in device memory.
struct Port {
  DevicePointer own;
  void* view;           // unified memory: where the host sees `own`
  DevicePointer bound;  // the caller's, or 0
};

struct Recording {
  GraphExec graph;
  uint32_t version;
};

// Capability 7.2 brought boards whose CPU caches see what the GPU writes. On older ones page-locked
// memory is not cached at all: good for blocks that are written once, bad for work of the CPU.
constexpr int kFirstCoherentBoard = 72;

// Code for older architectures has no way to wait; graphs of older drivers do not know of it.
constexpr uint32_t kFirstToStartEarly = 90;
constexpr int kGraphsStartEarly = 12030;  // CUDA 12.3

// TVM's generated code loads vectors of up to 16 bytes.
constexpr uintptr_t kPointerAlignment = 16;

}  // namespace
}  // namespace cuda
}  // namespace edgert

using namespace edgert::cuda;  // NOLINT: edgert_device is C's, its parts are ours

struct edgert_device {
  const edgert_plan& plan;
  Program* program;
  Stream stream;      // the caller's, or own_stream
  Stream own_stream;  // records, too
  DevicePointer arena;
  Port* inputs;
  Port* outputs;
  uint64_t io_bytes;

  // Of all launches, one after the other: addresses, and where each is, as cuLaunchKernel wants it.
  DevicePointer* addresses;
  void** parameters;
  uint32_t* first_parameter;  // per step

  Recording* recordings;  // per segment and slot: a plain one, and one with events for a profile
  uint32_t num_segments;
  Event* events;  // of profiles: one before each command, and one behind the last
  uint32_t num_events;
  const edgert::Segment* profiled;  // its events are in the queue
  char no_graphs[160];              // why commands are not recorded; "": they are
  bool waits_each_time;             // EDGESDK_CUDA_SYNC
  bool can_start_early;             // kernels, see kEdgertStartsEarly
  bool lost;                        // an error after which the context does nothing more
  bool lost_is_told;                // `error` says so
  char error[edgert::kErrorBytes];

  edgert::Report report() { return {error, sizeof(error)}; }
};

namespace edgert {
namespace cuda {
namespace {

// Errors that stay: every later call of the context gets them, too. The manual says of each that
// "the process must be terminated and relaunched"; 709 is a context that is gone.
bool IsSticky(Result result) {
  switch (result) {
    case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 709:  // CUDA_ERROR_CONTEXT_IS_DESTROYED
    case 710:  // CUDA_ERROR_ASSERT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
    case 999:  // CUDA_ERROR_UNKNOWN
      return true;
    default:
      return false;
  }
}

edgesdk_status FailWith(edgert_device* device, Result result, const char* what) {
  char reason[256];
  Describe(result, reason, sizeof(reason));
  if (IsSticky(result)) device->lost = true;
  if (result == kNotInitialized) {
    device->lost = true;
    return device->report().Fail(
        EDGESDK_ERROR_DEVICE,
        "%s: CUDA cannot be used in a child of fork() when the parent has used it", what);
  }
  edgesdk_status status = result == kOutOfMemory ? EDGESDK_ERROR_OUT_OF_MEMORY
                          : device->lost         ? EDGESDK_ERROR_KERNEL
                                                 : EDGESDK_ERROR_DEVICE;
  return device->report().Fail(status, "%s: %s", what, reason);
}

edgesdk_status CheckLost(edgert_device* device) {
  if (!device->lost) return EDGESDK_OK;
  if (device->lost_is_told) return EDGESDK_ERROR_DEVICE;
  device->lost_is_told = true;
  char first[kErrorBytes];
  memcpy(first, device->error, sizeof(first));
  return device->report().Fail(
      EDGESDK_ERROR_DEVICE,
      "GPU %d does nothing more for this process until all its handles are closed; it "
      "failed earlier: %.1000s",
      device->program->index, first);
}

edgesdk_status Allocate(edgert_device* device, DevicePointer* memory, uint64_t bytes,
                        const char* what) {
  Result result = bytes > SIZE_MAX
                      ? kOutOfMemory
                      : TheDriver().MemAlloc(memory, bytes == 0 ? 1 : static_cast<size_t>(bytes));
  if (result == kSuccess) return EDGESDK_OK;
  *memory = 0;
  char text[160];
  snprintf(text, sizeof(text), "no room for %llu bytes of %s on GPU %d",
           static_cast<unsigned long long>(bytes), what, device->program->index);
  return FailWith(device, result, text);
}

edgesdk_status AllocatePorts(edgert_device* device, Port* ports, const edgert_port* infos,
                             uint32_t count, const char* what) {
  const Driver& driver = TheDriver();
  for (uint32_t i = 0; i < count; ++i) {
    Port& port = ports[i];
    uint64_t bytes = infos[i].size_bytes;
    device->io_bytes += bytes;
    if (!device->program->unified) {
      edgesdk_status status = Allocate(device, &port.own, bytes, what);
      if (status != EDGESDK_OK) return status;
      continue;
    }
    Result result = bytes > SIZE_MAX ? kOutOfMemory
                                     : driver.MemHostAlloc(
                                           &port.view, bytes == 0 ? 1 : static_cast<size_t>(bytes),
                                           kMemHostAllocPortable | kMemHostAllocDeviceMap);
    if (result == kSuccess) result = driver.MemHostGetDevicePointer(&port.own, port.view, 0);
    if (result != kSuccess) return FailWith(device, result, "no room for inputs and outputs");
  }
  return EDGESDK_OK;
}

// Where a storage of the device begins.
DevicePointer Base(const edgert_device* device, edgert_storage storage, uint32_t index) {
  if (storage == kEdgertDeviceArena) return device->arena;
  if (storage == kEdgertDeviceWeight) return device->program->weights;
  const Port& port = storage == kEdgertDeviceInput ? device->inputs[index] : device->outputs[index];
  return port.bound != 0 ? port.bound : port.own;
}

void FillAddresses(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    const edgert_step& step = plan.steps[i];
    if (step.launch == nullptr) continue;
    for (uint32_t k = 0; k < step.num_args; ++k) {
      const edgert_tensor& tensor = plan.tensors[step.args[k]];
      device->addresses[device->first_parameter[i] + k] =
          Base(device, tensor.storage, tensor.index) + tensor.offset;
    }
  }
}

size_t NumRecordings(const edgert_device* device) {
  return 2 * size_t{kVersionSlots} * device->num_segments;
}

bool AllocateTables(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  size_t num_parameters = 0;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    if (plan.steps[i].launch != nullptr) num_parameters += plan.steps[i].num_args;
  }
  device->inputs = AllocateArray<Port>(plan.num_inputs);
  device->outputs = AllocateArray<Port>(plan.num_outputs);
  device->addresses = AllocateArray<DevicePointer>(num_parameters);
  device->parameters = AllocateArray<void*>(num_parameters);
  device->first_parameter = AllocateArray<uint32_t>(plan.num_steps);
  device->recordings = AllocateArray<Recording>(NumRecordings(device));
  if (!device->inputs || !device->outputs || !device->addresses || !device->parameters ||
      !device->first_parameter || !device->recordings) {
    return false;
  }
  uint32_t next = 0;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    device->first_parameter[i] = next;
    if (plan.steps[i].launch != nullptr) next += plan.steps[i].num_args;
  }
  for (uint32_t i = 0; i < next; ++i) device->parameters[i] = &device->addresses[i];
  return true;
}

void ChooseReplay(edgert_device* device) {
  const Driver& driver = TheDriver();
  device->waits_each_time = EnvironmentIs("EDGESDK_CUDA_SYNC", "1");
  const char* reason = "";
  if (device->waits_each_time) {
    reason = "EDGESDK_CUDA_SYNC=1";
  } else if (EnvironmentIs("EDGESDK_CUDA_GRAPH", "0")) {
    reason = "EDGESDK_CUDA_GRAPH=0";
  } else if (!driver.StreamBeginCapture || !driver.StreamEndCapture || !driver.GraphLaunch ||
             !driver.GraphExecDestroy || !driver.GraphDestroy ||
             (!driver.GraphInstantiate && !driver.GraphInstantiateWithFlags)) {
    reason = "this driver has no CUDA graphs: it is older than CUDA 10.1";
  }
  snprintf(device->no_graphs, sizeof(device->no_graphs), "%s", reason);
  const Program& program = *device->program;
  device->can_start_early = driver.LaunchKernelEx != nullptr && program.image != nullptr &&
                            program.image->architecture >= kFirstToStartEarly &&
                            program.driver_version >= kGraphsStartEarly;
}

edgesdk_status OpenMemory(edgert_device* device) {
  const edgert_plan& plan = device->plan;
  Result result = TheDriver().StreamCreate(&device->own_stream, kStreamNonBlocking);
  if (result != kSuccess) {
    device->own_stream = nullptr;
    return FailWith(device, result, "cannot make a stream on the GPU");
  }
  if (device->stream == nullptr) device->stream = device->own_stream;
  edgesdk_status status = EDGESDK_OK;
  if (plan.device_arena_bytes > 0) {
    status = Allocate(device, &device->arena, plan.device_arena_bytes, "activations");
  }
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->inputs, plan.inputs, plan.num_inputs, "inputs");
  }
  if (status == EDGESDK_OK) {
    status = AllocatePorts(device, device->outputs, plan.outputs, plan.num_outputs, "outputs");
  }
  return status;
}

void FreePorts(const Port* ports, uint32_t count) {
  const Driver& driver = TheDriver();
  for (uint32_t i = 0; ports != nullptr && i < count; ++i) {
    if (ports[i].view != nullptr) {
      driver.MemFreeHost(ports[i].view);
    } else if (ports[i].own != 0) {
      driver.MemFree(ports[i].own);
    }
  }
}

// Results are not looked at: after an error, or at the end of the process, all of these may fail.
void Close(edgert_device* device) {
  const Driver& driver = TheDriver();
  {
    CurrentContext current(*device->program);
    for (size_t i = 0; device->recordings != nullptr && i < NumRecordings(device); ++i) {
      if (device->recordings[i].graph != nullptr) {
        driver.GraphExecDestroy(device->recordings[i].graph);
      }
    }
    for (uint32_t i = 0; i < device->num_events; ++i) driver.EventDestroy(device->events[i]);
    FreePorts(device->inputs, device->plan.num_inputs);
    FreePorts(device->outputs, device->plan.num_outputs);
    if (device->arena != 0) driver.MemFree(device->arena);
    if (device->own_stream != nullptr) driver.StreamDestroy(device->own_stream);
  }
  ReleaseProgram(device->program);
  free(device->events);
  free(device->recordings);
  free(device->first_parameter);
  free(device->parameters);
  free(device->addresses);
  free(device->outputs);
  free(device->inputs);
  free(device);
}

edgesdk_status Open(const edgert_plan& plan, const DeviceOptions& options, uint32_t num_segments,
                    edgert_device** result, char* error, size_t error_bytes) {
  Program* program = nullptr;
  edgesdk_status status = AcquireProgram(plan, options.index, &program, error, error_bytes);
  if (status != EDGESDK_OK) return status;
  void* memory = calloc(1, sizeof(edgert_device));
  if (memory == nullptr) {
    ReleaseProgram(program);
    return EDGESDK_ERROR_OUT_OF_MEMORY;
  }
  edgert_device* device = new (memory) edgert_device{plan, program};
  device->stream = static_cast<Stream>(options.stream);
  device->num_segments = num_segments;
  ChooseReplay(device);
  status = EDGESDK_ERROR_OUT_OF_MEMORY;
  if (AllocateTables(device)) {
    CurrentContext current(*program);
    status = current.result() == kSuccess
                 ? OpenMemory(device)
                 : FailWith(device, current.result(), "cannot use the GPU");
    if (status == EDGESDK_OK) FillAddresses(device);
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

bool IsPageLocked(const edgert_device* device) {
  return !device->program->unified || device->program->architecture >= kFirstCoherentBoard;
}

void* AllocateHost(edgert_device* device, uint64_t bytes) {
  void* memory = nullptr;
  if (!IsPageLocked(device)) {
    memory = AllocateAligned(bytes);
  } else if (bytes <= SIZE_MAX) {
    CurrentContext current(*device->program);
    size_t size = bytes == 0 ? kAlignment : static_cast<size_t>(bytes);
    Result result = current.result();
    if (result == kSuccess) {
      result = TheDriver().MemHostAlloc(&memory, size, kMemHostAllocPortable);
    }
    if (result != kSuccess) memory = nullptr;
  }
  if (memory == nullptr) {
    device->report().Fail(
        EDGESDK_ERROR_OUT_OF_MEMORY,
        "out of memory: no room for %llu page-locked bytes, which the GPU copies from and to",
        static_cast<unsigned long long>(bytes));
  }
  return memory;
}

void FreeHost(edgert_device* device, void* memory) {
  if (memory == nullptr) return;
  if (!IsPageLocked(device)) return FreeAligned(memory);
  CurrentContext current(*device->program);
  TheDriver().MemFreeHost(memory);
}

Port& PortOf(edgert_device* device, edgert_storage storage, uint32_t index) {
  return storage == kEdgertDeviceInput ? device->inputs[index] : device->outputs[index];
}

void* HostView(edgert_device* device, edgert_storage storage, uint32_t index) {
  return PortOf(device, storage, index).view;
}

edgesdk_status Bind(edgert_device* device, edgert_storage storage, uint32_t index, void* address,
                    uint64_t bytes) {
  if (address != nullptr) {
    edgesdk_status status = CheckLost(device);
    if (status != EDGESDK_OK) return status;
    uintptr_t number = reinterpret_cast<uintptr_t>(address);
    if (number % kPointerAlignment != 0) {
      return device->report().Fail(
          EDGESDK_ERROR_INVALID_ARGUMENT,
          "the address %p is no multiple of %u, which the GPU's code relies on", address,
          static_cast<unsigned>(kPointerAlignment));
    }
    CurrentContext current(*device->program);
    unsigned type = 0;
    Result result =
        bytes == 0 ? kSuccess : TheDriver().PointerGetAttribute(&type, kPointerMemoryType, number);
    if (result != kSuccess) {
      return device->report().Fail(EDGESDK_ERROR_INVALID_ARGUMENT,
                                   "%p is no address that GPU %d (%s) can use", address,
                                   device->program->index, device->program->name);
    }
  }
  PortOf(device, storage, index).bound = reinterpret_cast<uintptr_t>(address);
  FillAddresses(device);
  return EDGESDK_OK;
}

void* Address(edgert_device* device, edgert_storage storage, uint32_t index) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(Base(device, storage, index)));
}

// Starts a kernel that waits by itself for the one in front of it (PTX ISA, "griddepcontrol"),
// whose last blocks then hide the start of this one.
Result LaunchEarly(Function function, const edgert_launch& launch, Stream stream,
                   void** parameters) {
  LaunchAttribute attribute;
  memset(&attribute, 0, sizeof(attribute));
  attribute.id = kLaunchAttributeProgrammaticStreamSerialization;
  attribute.value.programmatic_stream_serialization_allowed = 1;
  LaunchConfig config{{launch.grid[0], launch.grid[1], launch.grid[2]},
                      {launch.block[0], launch.block[1], launch.block[2]},
                      launch.shared_bytes,
                      stream,
                      &attribute,
                      1};
  return TheDriver().LaunchKernelEx(&config, function, parameters, nullptr);
}

// `previous` is the command in front, or nullptr.
Result PutCommand(edgert_device* device, Stream stream, const Command& command,
                  const Command* previous) {
  const Driver& driver = TheDriver();
  size_t bytes = static_cast<size_t>(command.bytes);
  auto at = [device](const DevicePlace& place) {
    return Base(device, place.storage, place.index) + place.offset;
  };
  switch (command.kind) {
    case CommandKind::kUpload:
      return driver.MemcpyHtoDAsync(at(command.to), command.host, bytes, stream);
    case CommandKind::kDownload:
      return driver.MemcpyDtoHAsync(command.host, at(command.from), bytes, stream);
    case CommandKind::kCopy:
      return driver.MemcpyDtoDAsync(at(command.to), at(command.from), bytes, stream);
    case CommandKind::kLaunch:
      break;
  }
  const edgert_launch& launch = *device->plan.steps[command.step].launch;
  Function function = device->program->functions[command.step];
  void** parameters = device->parameters + device->first_parameter[command.step];
  bool follows_launch = previous != nullptr && previous->kind == CommandKind::kLaunch;
  if ((launch.flags & kEdgertStartsEarly) != 0 && follows_launch && device->can_start_early) {
    return LaunchEarly(function, launch, stream, parameters);
  }
  return driver.LaunchKernel(function, launch.grid[0], launch.grid[1], launch.grid[2],
                             launch.block[0], launch.block[1], launch.block[2], launch.shared_bytes,
                             stream, parameters, nullptr);
}

Result RecordEvent(Event event, Stream stream, bool capturing) {
  const Driver& driver = TheDriver();
  return capturing ? driver.EventRecordWithFlags(event, stream, kEventRecordExternal)
                   : driver.EventRecord(event, stream);
}

// Puts a segment's commands into a stream that executes or records them. On failure *failed is the
// name of what was refused.
Result PutCommands(edgert_device* device, Stream stream, const Segment& segment, bool profile,
                   bool capturing, const char** failed) {
  for (uint32_t i = 0; i < segment.num_commands; ++i) {
    const Command& command = segment.commands[i];
    *failed = NameOf(device->plan, command);
    Result result = profile ? RecordEvent(device->events[i], stream, capturing) : kSuccess;
    // Events between kernels would not let one start early, and would measure two at once.
    const Command* previous = i > 0 && !profile ? &segment.commands[i - 1] : nullptr;
    if (result == kSuccess) result = PutCommand(device, stream, command, previous);
    if (result == kSuccess && device->waits_each_time) {
      result = TheDriver().StreamSynchronize(stream);
    }
    if (result != kSuccess) return result;
  }
  *failed = "the end of a profile";
  return profile ? RecordEvent(device->events[segment.num_commands], stream, capturing) : kSuccess;
}

// Makes a graph of a segment, or turns recording off for this handle and says why.
bool Record(edgert_device* device, const Segment& segment, bool profile, GraphExec* graph_exec) {
  const Driver& driver = TheDriver();
  const char* failed = "the start of a recording";
  Graph graph = nullptr;
  // Other threads of the program may go on with what a capture of all threads would forbid.
  Result result = driver.StreamBeginCapture(device->own_stream, kCaptureThreadLocal);
  if (result == kSuccess) {
    result = PutCommands(device, device->own_stream, segment, profile, true, &failed);
    Result ended = driver.StreamEndCapture(device->own_stream, &graph);
    if (result == kSuccess) result = ended;
  }
  if (result == kSuccess) {
    failed = "a graph";
    result = driver.GraphInstantiateWithFlags != nullptr
                 ? driver.GraphInstantiateWithFlags(graph_exec, graph, 0)
                 : driver.GraphInstantiate(graph_exec, graph, nullptr, nullptr, 0);
  }
  if (graph != nullptr) driver.GraphDestroy(graph);
  if (result == kSuccess) return true;
  *graph_exec = nullptr;
  char reason[96];
  Describe(result, reason, sizeof(reason));
  snprintf(device->no_graphs, sizeof(device->no_graphs), "%s: %s", failed, reason);
  return false;
}

// The segment's recording that is up to date, or nullptr where commands are better put one by one.
GraphExec FindRecording(edgert_device* device, const Segment& segment, bool profile) {
  bool can_record =
      device->no_graphs[0] == '\0' && (!profile || TheDriver().EventRecordWithFlags != nullptr);
  if (!can_record || segment.version == 0 || segment.num_commands < 2) return nullptr;
  Recording& recording =
      device->recordings[2 * (kVersionSlots * segment.number + segment.slot) + (profile ? 1 : 0)];
  if (recording.graph != nullptr && recording.version != segment.version) {
    TheDriver().GraphExecDestroy(recording.graph);
    recording.graph = nullptr;
  }
  if (recording.graph == nullptr) Record(device, segment, profile, &recording.graph);
  recording.version = segment.version;
  return recording.graph;
}

edgesdk_status MakeEvents(edgert_device* device, uint32_t count) {
  if (count <= device->num_events) return EDGESDK_OK;
  // Recordings know the events that they were made with, so there is room for all from the start.
  if (device->events == nullptr) {
    size_t most =
        size_t{device->plan.num_steps} + device->plan.num_inputs + device->plan.num_outputs + 1;
    device->events = AllocateArray<Event>(most);
    if (device->events == nullptr) {
      return device->report().Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory");
    }
  }
  while (device->num_events < count) {
    Result result = TheDriver().EventCreate(&device->events[device->num_events], 0);
    if (result != kSuccess) return FailWith(device, result, "cannot make an event on the GPU");
    ++device->num_events;
  }
  return EDGESDK_OK;
}

edgesdk_status Enqueue(edgert_device* device, const Segment& segment, bool profile) {
  const Driver& driver = TheDriver();
  edgesdk_status status = CheckLost(device);
  if (status != EDGESDK_OK) return status;
  CurrentContext current(*device->program);
  if (current.result() != kSuccess) {
    return FailWith(device, current.result(), "cannot use the GPU");
  }
  if (profile) status = MakeEvents(device, segment.num_commands + 1);
  if (status != EDGESDK_OK) return status;
  device->profiled = profile ? &segment : nullptr;
  const char* failed = "the recorded commands";
  GraphExec graph = FindRecording(device, segment, profile);
  Result result = graph != nullptr
                      ? driver.GraphLaunch(graph, device->stream)
                      : PutCommands(device, device->stream, segment, profile, false, &failed);
  if (result == kSuccess) return EDGESDK_OK;
  status = FailWith(device, result, failed);
  // What was put before goes on, with memory that the caller may free after a failure.
  if (!device->lost) driver.StreamSynchronize(device->stream);
  return status == EDGESDK_ERROR_DEVICE && !device->lost ? EDGESDK_ERROR_KERNEL : status;
}

edgesdk_status ReadTimes(edgert_device* device) {
  const Segment& segment = *device->profiled;
  device->profiled = nullptr;
  for (uint32_t i = 0; i < segment.num_commands; ++i) {
    float ms = 0;
    Result result = TheDriver().EventElapsedTime(&ms, device->events[i], device->events[i + 1]);
    if (result != kSuccess) return FailWith(device, result, "cannot read a time of the GPU");
    segment.commands[i].duration_ns = static_cast<uint64_t>(static_cast<double>(ms) * 1e6);
  }
  return EDGESDK_OK;
}

edgesdk_status Wait(edgert_device* device) {
  CurrentContext current(*device->program);
  Result result = current.result();
  if (result == kSuccess) result = TheDriver().StreamSynchronize(device->stream);
  if (result != kSuccess) {
    device->lost = true;
    char reason[256];
    Describe(result, reason, sizeof(reason));
    return device->report().Fail(EDGESDK_ERROR_KERNEL,
                                 "a kernel failed on GPU %d: %s; EDGESDK_CUDA_SYNC=1 tells which",
                                 device->program->index, reason);
  }
  return device->profiled != nullptr ? ReadTimes(device) : EDGESDK_OK;
}

void Info(const edgert_device* device, edgesdk_device_info* info) {
  const Driver& driver = TheDriver();
  const Program& program = *device->program;
  info->name = program.name;
  info->index = program.index;
  info->compute_capability = program.architecture;
  info->driver_version = program.driver_version;
  if (program.image != nullptr) {
    info->code_architecture = static_cast<int32_t>(program.image->architecture);
    info->code_is_intermediate = program.image->format == kEdgertPtx ? 1 : 0;
  }
  info->unified_memory = program.unified ? 1 : 0;
  info->replays = device->no_graphs[0] == '\0' ? 1 : 0;
  info->replays_reason = device->no_graphs;
  CurrentContext current(program);
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  if (driver.MemGetInfo(&free_bytes, &all_bytes) == kSuccess) info->free_bytes = free_bytes;
  if (driver.DeviceTotalMem(&all_bytes, program.device) == kSuccess) {
    info->memory_bytes = all_bytes;
  }
  info->weights_bytes = static_cast<size_t>(program.weights_bytes);
  info->activations_bytes = static_cast<size_t>(device->plan.device_arena_bytes);
  info->io_bytes = static_cast<size_t>(device->io_bytes);
}

}  // namespace
}  // namespace cuda
}  // namespace edgert

extern "C" const edgert_accelerator edgert_cuda = {
    "cuda",
    &edgert_run_on_device,
    edgert::cuda::Open,
    edgert::cuda::Close,
    edgert::cuda::Error,
    edgert::cuda::AllocateHost,
    edgert::cuda::FreeHost,
    edgert::cuda::HostView,
    edgert::cuda::Bind,
    edgert::cuda::Address,
    edgert::cuda::Enqueue,
    edgert::cuda::Wait,
    edgert::cuda::Info,
};
