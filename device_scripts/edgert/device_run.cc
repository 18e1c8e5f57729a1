// device_run.cc: the half of an accelerated handle that all accelerators share.
//
// The plan's steps are cut into segments: consecutive steps of the device are one list of commands.
// The first of them begins with the inputs' way to the device, the last ends with the outputs' way
// back; what the caller keeps on the device takes no way. One more list before the steps brings
// inputs that are on the device to steps of the CPU, and one behind them does the opposite.
//
// Of inputs and outputs there are always both, a block on the device and one on the host. An
// output's values are where the first step that mentions it has it: that step writes it.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>
#include <new>

#include "accelerator.h"
#include "accelerator_common.h"

namespace edgert {
namespace {

// Where the caller keeps an input or output.
struct Binding {
  bool on_device;
  void* address;  // nullptr: in the device's own block

  bool operator==(const Binding& other) const {
    return on_device == other.on_device && address == other.address;
  }
};

// An input or output.
struct Block {
  unsigned char* host;
  bool host_is_view;     // `host` is the device's own block as the host sees it
  bool used_on_host;     // some step has it there
  bool used_on_device;   // some step has it there
  bool written_on_host;  // outputs: there they are complete after the last step
  Binding binding;
};

struct Part {
  Segment segment;
  uint32_t first_step;
  uint32_t end_step;
};

}  // namespace

struct DeviceRun {
  const edgert_plan& plan;
  const edgert_accelerator& accelerator;
  edgert_device* device;
  unsigned char* arena;
  Block* inputs;
  Block* outputs;
  Command* commands;
  Part* parts;         // of consecutive device steps, numbered from 0
  uint32_t num_parts;  // two segments more: `before` and `after`
  Segment before;
  Segment after;
  uint32_t next_part;    // of the run
  uint64_t transfer_ns;  // of inputs and outputs in the last profiled run
  bool stale;            // a binding has changed: the commands must be listed anew
  // The bindings that each slot's version stands for: those of all inputs, then of all outputs.
  Binding* bindings[kVersionSlots];
  uint32_t versions[kVersionSlots];  // 0: none yet
  uint32_t last_version;
};

namespace {

bool IsOnDevice(edgert_storage storage) { return storage >= kEdgertDeviceInput; }

const edgert_tensor& Tensor(const edgert_plan& plan, const edgert_step& step, uint32_t argument) {
  return plan.tensors[step.args[argument]];
}

bool IsDeviceStep(const edgert_plan& plan, const edgert_step& step) {
  if (step.launch != nullptr) return true;
  if (step.kernel != nullptr) return false;
  return IsOnDevice(Tensor(plan, step, 0).storage) || IsOnDevice(Tensor(plan, step, 1).storage);
}

uint32_t CountParts(const edgert_plan& plan) {
  uint32_t count = 0;
  bool previous = false;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    bool here = IsDeviceStep(plan, plan.steps[i]);
    if (here && !previous) ++count;
    previous = here;
  }
  return count;
}

Block& BlockOf(DeviceRun* run, edgert_storage storage, uint32_t index) {
  return storage == kEdgertInput ? run->inputs[index] : run->outputs[index];
}

const edgert_port& PortOf(const edgert_plan& plan, edgert_storage storage, uint32_t index) {
  return storage == kEdgertInput ? plan.inputs[index] : plan.outputs[index];
}

edgert_storage OnDevice(edgert_storage storage) {
  return storage == kEdgertInput ? kEdgertDeviceInput : kEdgertDeviceOutput;
}

// Which sides need which inputs and outputs.
void FindUses(DeviceRun* run) {
  const edgert_plan& plan = run->plan;
  for (uint32_t i = 0; i < plan.num_steps; ++i) {
    const edgert_step& step = plan.steps[i];
    for (uint32_t k = 0; k < step.num_args; ++k) {
      const edgert_tensor& tensor = Tensor(plan, step, k);
      bool is_input = tensor.storage == kEdgertInput || tensor.storage == kEdgertDeviceInput;
      bool is_output = tensor.storage == kEdgertOutput || tensor.storage == kEdgertDeviceOutput;
      if (!is_input && !is_output) continue;
      Block& block = is_input ? run->inputs[tensor.index] : run->outputs[tensor.index];
      bool on_device = IsOnDevice(tensor.storage);
      bool is_first = !block.used_on_host && !block.used_on_device;
      bool is_copy = step.launch == nullptr && step.kernel == nullptr && k == 1;
      if (is_output && !on_device &&
          (is_first || (is_copy && tensor.size_bytes == plan.outputs[tensor.index].size_bytes))) {
        block.written_on_host = true;
      }
      (on_device ? block.used_on_device : block.used_on_host) = true;
    }
  }
}

bool AllocateBlocks(DeviceRun* run, edgert_storage storage, uint32_t count) {
  const edgert_accelerator& accelerator = run->accelerator;
  for (uint32_t i = 0; i < count; ++i) {
    Block& block = BlockOf(run, storage, i);
    void* host = accelerator.host_view(run->device, OnDevice(storage), i);
    block.host_is_view = host != nullptr;
    if (host == nullptr) {
      host = accelerator.allocate_host(run->device, PortOf(run->plan, storage, i).size_bytes);
    }
    block.host = static_cast<unsigned char*>(host);
    if (host == nullptr) return false;
  }
  return true;
}

void Close(DeviceRun* run) {
  if (run == nullptr) return;
  const edgert_accelerator& accelerator = run->accelerator;
  if (run->device != nullptr) {
    for (edgert_storage storage : {kEdgertInput, kEdgertOutput}) {
      uint32_t count = storage == kEdgertInput ? run->plan.num_inputs : run->plan.num_outputs;
      bool exist = (storage == kEdgertInput ? run->inputs : run->outputs) != nullptr;
      for (uint32_t i = 0; exist && i < count; ++i) {
        const Block& block = BlockOf(run, storage, i);
        if (!block.host_is_view) accelerator.free_host(run->device, block.host);
      }
    }
    accelerator.free_host(run->device, run->arena);
    accelerator.close(run->device);
  }
  free(run->inputs);
  free(run->outputs);
  free(run->commands);
  free(run->parts);
  for (Binding* bindings : run->bindings) free(bindings);
  free(run);
}

edgesdk_status Open(const edgert_plan& plan, const DeviceOptions& options, DeviceRun** result,
                    char* error, size_t error_bytes) {
  void* memory = malloc(sizeof(DeviceRun));
  if (memory == nullptr) return EDGESDK_ERROR_OUT_OF_MEMORY;
  DeviceRun* run = new (memory) DeviceRun{plan, *plan.accelerator};
  run->num_parts = CountParts(plan);
  run->stale = true;
  run->inputs = AllocateArray<Block>(plan.num_inputs);
  run->outputs = AllocateArray<Block>(plan.num_outputs);
  run->parts = AllocateArray<Part>(run->num_parts);
  // Each step is one, each input may have a way in `before` or to the first part, each output a way
  // from the last or in `after`.
  run->commands = AllocateArray<Command>(size_t{plan.num_steps} + 2 * size_t{plan.num_inputs} +
                                         2 * size_t{plan.num_outputs});
  bool allocated = run->inputs && run->outputs && run->parts && run->commands;
  for (Binding*& bindings : run->bindings) {
    bindings = AllocateArray<Binding>(size_t{plan.num_inputs} + plan.num_outputs);
    allocated = allocated && bindings != nullptr;
  }
  edgesdk_status status = EDGESDK_ERROR_OUT_OF_MEMORY;
  if (allocated) {
    FindUses(run);
    status =
        run->accelerator.open(plan, options, run->num_parts + 2, &run->device, error, error_bytes);
  }
  if (status == EDGESDK_OK) {
    run->arena =
        static_cast<unsigned char*>(run->accelerator.allocate_host(run->device, plan.arena_bytes));
    if (run->arena == nullptr || !AllocateBlocks(run, kEdgertInput, plan.num_inputs) ||
        !AllocateBlocks(run, kEdgertOutput, plan.num_outputs)) {
      snprintf(error, error_bytes, "%s", run->accelerator.error(run->device));
      status = EDGESDK_ERROR_OUT_OF_MEMORY;
    }
  }
  if (status == EDGESDK_OK) {
    *result = run;
  } else {
    Close(run);
  }
  return status;
}

const char* Error(const DeviceRun* run) { return run->accelerator.error(run->device); }

void* HostMemory(DeviceRun* run, edgert_storage storage, uint32_t index) {
  return storage == kEdgertArena ? run->arena : BlockOf(run, storage, index).host;
}

edgesdk_status Bind(DeviceRun* run, edgert_storage storage, uint32_t index, bool on_device,
                    void* address) {
  Block& block = BlockOf(run, storage, index);
  Binding binding{on_device, address};
  if (block.binding == binding) return EDGESDK_OK;
  if (block.binding.address != address) {
    edgesdk_status status = run->accelerator.bind(run->device, OnDevice(storage), index, address,
                                                  PortOf(run->plan, storage, index).size_bytes);
    if (status != EDGESDK_OK) return status;
  }
  block.binding = binding;
  run->stale = true;
  return EDGESDK_OK;
}

void* Address(DeviceRun* run, edgert_storage storage, uint32_t index) {
  return run->accelerator.address(run->device, OnDevice(storage), index);
}

// Whether the host's block and the one that the device works on are the same bytes.
bool IsShared(const Block& block) { return block.host_is_view && block.binding.address == nullptr; }

// The way of a whole input or output from host to device, or back.
void Transfer(DeviceRun* run, Segment* segment, CommandKind kind, edgert_storage storage,
              uint32_t index) {
  const Block& block = BlockOf(run, storage, index);
  uint64_t bytes = PortOf(run->plan, storage, index).size_bytes;
  if (IsShared(block) || bytes == 0) return;
  DevicePlace place{OnDevice(storage), index, 0};
  segment->commands[segment->num_commands++] =
      Command{kind, kNoStep, place, place, block.host, bytes, 0};
}

unsigned char* HostAddress(DeviceRun* run, const edgert_tensor& tensor) {
  switch (tensor.storage) {
    case kEdgertInput:
      return run->inputs[tensor.index].host + tensor.offset;
    case kEdgertOutput:
      return run->outputs[tensor.index].host + tensor.offset;
    case kEdgertArena:
      return run->arena + tensor.offset;
    default:  // only read
      return const_cast<uint8_t*>(run->plan.weights) + tensor.offset;
  }
}

// Whether the tensor on the device is the very memory at `host`.
bool IsSameMemory(DeviceRun* run, const edgert_tensor& tensor, const unsigned char* host) {
  if (tensor.storage != kEdgertDeviceInput && tensor.storage != kEdgertDeviceOutput) return false;
  const Block& block =
      tensor.storage == kEdgertDeviceInput ? run->inputs[tensor.index] : run->outputs[tensor.index];
  return IsShared(block) && block.host + tensor.offset == host;
}

void AddStep(DeviceRun* run, Segment* segment, uint32_t index) {
  const edgert_step& step = run->plan.steps[index];
  Command command{CommandKind::kLaunch, index, {}, {}, nullptr, 0, 0};
  if (step.launch == nullptr) {
    const edgert_tensor& from = Tensor(run->plan, step, 0);
    const edgert_tensor& to = Tensor(run->plan, step, 1);
    command.from = DevicePlace{from.storage, from.index, from.offset};
    command.to = DevicePlace{to.storage, to.index, to.offset};
    command.bytes = to.size_bytes;
    if (!IsOnDevice(from.storage)) {
      command.kind = CommandKind::kUpload;
      command.host = HostAddress(run, from);
      if (IsSameMemory(run, to, HostAddress(run, from))) return;
    } else if (!IsOnDevice(to.storage)) {
      command.kind = CommandKind::kDownload;
      command.host = HostAddress(run, to);
      if (IsSameMemory(run, from, HostAddress(run, to))) return;
    } else {
      command.kind = CommandKind::kCopy;
    }
    if (command.bytes == 0) return;
  }
  segment->commands[segment->num_commands++] = command;
}

// The slot of the present bindings: one that has them already, or else the oldest, which they get.
uint32_t FindSlot(DeviceRun* run) {
  const edgert_plan& plan = run->plan;
  uint32_t num_inputs = plan.num_inputs;
  auto block = [&](uint32_t i) -> const Block& {
    return i < num_inputs ? run->inputs[i] : run->outputs[i - num_inputs];
  };
  uint32_t oldest = 0;
  for (uint32_t slot = 0; slot < kVersionSlots; ++slot) {
    const Binding* bindings = run->bindings[slot];
    bool same = run->versions[slot] != 0;
    for (uint32_t i = 0; same && i < num_inputs + plan.num_outputs; ++i) {
      same = bindings[i] == block(i).binding;
    }
    if (same) return slot;
    if (run->versions[slot] < run->versions[oldest]) oldest = slot;
  }
  for (uint32_t i = 0; i < num_inputs + plan.num_outputs; ++i) {
    run->bindings[oldest][i] = block(i).binding;
  }
  run->versions[oldest] = ++run->last_version;
  return oldest;
}

void ListCommands(DeviceRun* run) {
  const edgert_plan& plan = run->plan;
  Command* next = run->commands;
  uint32_t slot = FindSlot(run);
  uint32_t version = run->versions[slot];
  run->before = Segment{run->num_parts, version, slot, next, 0};
  for (uint32_t i = 0; i < plan.num_inputs; ++i) {
    const Block& block = run->inputs[i];
    if (block.binding.on_device && block.used_on_host) {
      Transfer(run, &run->before, CommandKind::kDownload, kEdgertInput, i);
    }
  }
  next += run->before.num_commands;
  uint32_t step = 0;
  for (uint32_t number = 0; number < run->num_parts; ++number) {
    Part& part = run->parts[number];
    part.segment = Segment{number, version, slot, next, 0};
    while (!IsDeviceStep(plan, plan.steps[step])) ++step;
    part.first_step = step;
    for (uint32_t i = 0; number == 0 && i < plan.num_inputs; ++i) {
      const Block& block = run->inputs[i];
      if (!block.binding.on_device && block.used_on_device) {
        Transfer(run, &part.segment, CommandKind::kUpload, kEdgertInput, i);
      }
    }
    for (; step < plan.num_steps && IsDeviceStep(plan, plan.steps[step]); ++step) {
      AddStep(run, &part.segment, step);
    }
    part.end_step = step;
    for (uint32_t i = 0; number + 1 == run->num_parts && i < plan.num_outputs; ++i) {
      const Block& block = run->outputs[i];
      if (!block.binding.on_device && block.used_on_device && !block.written_on_host) {
        Transfer(run, &part.segment, CommandKind::kDownload, kEdgertOutput, i);
      }
    }
    next += part.segment.num_commands;
  }
  run->after = Segment{run->num_parts + 1, version, slot, next, 0};
  for (uint32_t i = 0; i < plan.num_outputs; ++i) {
    const Block& block = run->outputs[i];
    if (block.binding.on_device && block.written_on_host && !block.used_on_device) {
      Transfer(run, &run->after, CommandKind::kUpload, kEdgertOutput, i);
    }
  }
  run->stale = false;
}

edgesdk_status Execute(DeviceRun* run, const Segment& segment, StepTime* times) {
  if (segment.num_commands == 0) return EDGESDK_OK;
  edgesdk_status status = run->accelerator.enqueue(run->device, segment, times != nullptr);
  if (status == EDGESDK_OK) status = run->accelerator.wait(run->device);
  for (uint32_t i = 0; status == EDGESDK_OK && times != nullptr && i < segment.num_commands; ++i) {
    const Command& command = segment.commands[i];
    if (command.step == kNoStep) {
      run->transfer_ns += command.duration_ns;
      continue;
    }
    times[command.step].last_ns = command.duration_ns;
    times[command.step].total_ns += command.duration_ns;
  }
  return status;
}

edgesdk_status Begin(DeviceRun* run, StepTime* times) {
  if (run->stale) ListCommands(run);
  run->next_part = 0;
  if (times != nullptr) run->transfer_ns = 0;
  return Execute(run, run->before, times);
}

edgesdk_status Steps(DeviceRun* run, uint32_t* step, StepTime* times) {
  if (run->next_part == run->num_parts || run->parts[run->next_part].first_step != *step) {
    return EDGESDK_OK;
  }
  const Part& part = run->parts[run->next_part++];
  *step = part.end_step;
  return Execute(run, part.segment, times);
}

edgesdk_status Finish(DeviceRun* run, StepTime* times) { return Execute(run, run->after, times); }

edgesdk_status Fetch(DeviceRun* run, uint32_t index) {
  const Block& block = run->outputs[index];
  if (!block.binding.on_device) return EDGESDK_OK;
  Command command;
  Segment segment{run->num_parts, 0, 0, &command, 0};
  Transfer(run, &segment, CommandKind::kDownload, kEdgertOutput, index);
  return Execute(run, segment, nullptr);
}

void Info(const DeviceRun* run, edgesdk_device_info* info) {
  run->accelerator.info(run->device, info);
  info->transfer_ns = run->transfer_ns;
}

}  // namespace
}  // namespace edgert

extern "C" const edgert_device_run edgert_run_on_device = {
    edgert::Open,  edgert::Close, edgert::Error, edgert::HostMemory, edgert::Bind, edgert::Address,
    edgert::Fetch, edgert::Begin, edgert::Steps, edgert::Finish,     edgert::Info,
};
