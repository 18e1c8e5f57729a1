// accelerator.h: a GPU or the like beside the CPU: what the executor asks of one, in two halves.
//
// `edgert_device_run` keeps what belongs to one handle and is the same for every accelerator: which
// memory inputs and outputs are in, and the lists of commands (device_run.cc). It asks the second
// half, `edgert_accelerator`, for memory, code and a queue of commands (cuda.cc, opencl.cc,
// metal.cc). A plan points to its accelerator's table, and nothing else does: a library for the CPU
// alone links none of this.
#ifndef EDGERT_ACCELERATOR_H_
#define EDGERT_ACCELERATOR_H_

#include <stddef.h>
#include <stdint.h>

#include "edgesdk_model.h"
#include "plan.h"

namespace edgert {

struct DeviceRun;  // device_run.cc

struct StepTime {
  uint64_t last_ns;
  uint64_t total_ns;
};

// Texts of failures are cut to this.
constexpr size_t kErrorBytes = 1280;

// What the user chose at open. `stream`: the caller's queue of commands, nullptr: one of our own.
// `cache_folder`: where code that the device's driver has compiled is kept, nullptr: the usual
// place.
struct DeviceOptions {
  int32_t index;
  void* stream;
  const char* cache_folder;
};

// A place in the accelerator's memory: one of the four kEdgertDevice storages.
struct DevicePlace {
  edgert_storage storage;
  uint32_t index;
  uint64_t offset;
};

constexpr uint32_t kNoStep = UINT32_MAX;

enum class CommandKind : uint8_t { kLaunch, kUpload, kDownload, kCopy };

// One command for the accelerator. A launch takes everything else from its step.
struct Command {
  CommandKind kind;
  uint32_t step;  // in the plan; kNoStep: an input's or output's way between host and device
  DevicePlace from;
  DevicePlace to;
  void* host;  // the host's end of an upload or download
  uint64_t bytes;
  uint64_t duration_ns;  // written after a profiled run
};

// Commands that follow each other without the CPU. Those of one `number` and `version` are always
// the same: they may be recorded once and replayed. Version 0: do not record. Versions come back,
// as programs do that take turns between a few buffers, and have the same `slot` then, one of
// kVersionSlots; a version whose slot another one got does not come back.
constexpr uint32_t kVersionSlots = 4;
struct Segment {
  uint32_t number;
  uint32_t version;
  uint32_t slot;
  Command* commands;
  uint32_t num_commands;
};

}  // namespace edgert

extern "C" {

// What an accelerator keeps for one handle. Each defines its own.
struct edgert_device;

// One handle's half of an accelerated model. Functions that return a status leave the reason where
// `error` tells it, `open` in the caller's buffer. Indices and sizes were checked by the caller.
struct edgert_device_run {
  // The first memory of the plan that does not fit ends it with EDGESDK_ERROR_OUT_OF_MEMORY.
  edgesdk_status (*open)(const edgert_plan& plan, const edgert::DeviceOptions& options,
                         edgert::DeviceRun** run, char* error, size_t error_bytes);
  void (*close)(edgert::DeviceRun* run);
  const char* (*error)(const edgert::DeviceRun* run);

  // The host's memory of kEdgertArena, kEdgertInput or kEdgertOutput, aligned to 64 bytes. It never
  // moves; the caller's own memory is copied from and to it.
  void* (*host_memory)(edgert::DeviceRun* run, edgert_storage storage, uint32_t index);

  // Has input or output (kEdgertInput, kEdgertOutput) `index` stay in device memory: at `address`,
  // or with nullptr in the handle's own. `on_device` false: back to the host.
  edgesdk_status (*bind)(edgert::DeviceRun* run, edgert_storage storage, uint32_t index,
                         bool on_device, void* address);
  void* (*address)(edgert::DeviceRun* run, edgert_storage storage, uint32_t index);
  // Copies an output that stays on the device to the host's memory, and waits.
  edgesdk_status (*fetch)(edgert::DeviceRun* run, uint32_t index);

  // A run: `begin`, then `steps` before each step of the CPU and at the end, then `finish`. `steps`
  // does the device's steps from *step on, if there are any, waits for them and moves *step behind
  // them: no function leaves work in the queue. `times` has one entry per step; nullptr: no
  // profile.
  edgesdk_status (*begin)(edgert::DeviceRun* run, edgert::StepTime* times);
  edgesdk_status (*steps)(edgert::DeviceRun* run, uint32_t* step, edgert::StepTime* times);
  edgesdk_status (*finish)(edgert::DeviceRun* run, edgert::StepTime* times);

  void (*info)(const edgert::DeviceRun* run, edgesdk_device_info* info);
};

// A kind of accelerator. Functions leave the reason of a failure where `error` tells it.
struct edgert_accelerator {
  const char* kind;
  const edgert_device_run* run;

  // Opens a device for the plan: driver, code, weights (shared by all handles), and this handle's
  // memory: the arena, and one block per input and output. `num_segments` bounds their numbers.
  edgesdk_status (*open)(const edgert_plan& plan, const edgert::DeviceOptions& options,
                         uint32_t num_segments, edgert_device** device, char* error,
                         size_t error_bytes);
  void (*close)(edgert_device* device);
  const char* (*error)(const edgert_device* device);

  // Memory of the host that the device copies from and to at full speed; nullptr when it is short.
  void* (*allocate_host)(edgert_device* device, uint64_t bytes);
  void (*free_host)(edgert_device* device, void* memory);
  // Where the host sees the device's own block of an input or output; nullptr where their memories
  // are apart.
  void* (*host_view)(edgert_device* device, edgert_storage storage, uint32_t index);

  // Uses the caller's block for kEdgertDeviceInput or kEdgertDeviceOutput `index`; nullptr: its
  // own.
  edgesdk_status (*bind)(edgert_device* device, edgert_storage storage, uint32_t index,
                         void* address, uint64_t bytes);
  void* (*address)(edgert_device* device, edgert_storage storage, uint32_t index);

  // Puts the commands into the queue, in order. `wait` returns when all are done; with `profile`,
  // it has then written their durations.
  edgesdk_status (*enqueue)(edgert_device* device, const edgert::Segment& segment, bool profile);
  edgesdk_status (*wait)(edgert_device* device);

  void (*info)(const edgert_device* device, edgesdk_device_info* info);
};

extern const edgert_device_run edgert_run_on_device;
extern const edgert_accelerator edgert_cuda;
extern const edgert_accelerator edgert_opencl;
extern const edgert_accelerator edgert_metal;

}  // extern "C"

#endif  // EDGERT_ACCELERATOR_H_
