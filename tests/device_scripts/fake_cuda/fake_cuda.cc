#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_driver.h"

using edgert::cuda::Device;
using edgert::cuda::DevicePointer;
using edgert::cuda::Result;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace edgert::cuda;

constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureInvalidated = 901;
constexpr uint64_t kCopyNs = 1000;

// Added to the host's addresses to make the device's: beyond what a process may use.
constexpr uint64_t kDeviceBit = uint64_t{1} << 48;

struct Block {
  uint64_t bytes;
  bool is_host;  // page-locked
  bool mapped;   // ... with an address on the device
};

// A command: does its work at the virtual time `now`, moves it on, returns a CUresult.
using Work = std::function<Result(uint64_t* now)>;

struct FakeStream {
  std::vector<Work> queue;
  std::vector<Work>* capture = nullptr;
  bool capture_is_broken = false;
};
struct FakeEvent {
  uint64_t time = 0;
  bool recorded = false;
};
struct FakeModule {
  std::set<std::string> functions;
};
struct FakeGraph {
  std::vector<Work> work;
};
struct LoadedFunction {
  FakeFunction function;
  int dynamic_shared_limit = 48 * 1024;
  FakeModule* module;
};

struct World {
  std::recursive_mutex mutex;
  FakeSettings settings;
  std::map<std::string, FakeFunction> known;
  std::map<std::string, std::pair<int, Result>> failures;
  std::map<std::string, int> calls;
  std::string faults;
  std::map<uint64_t, Block> blocks;  // by host address
  std::set<FakeStream*> streams;
  std::set<FakeEvent*> events;
  std::set<FakeModule*> modules;
  std::set<FakeGraph*> graphs;
  std::set<FakeGraph*> graph_execs;
  std::map<void*, std::unique_ptr<LoadedFunction>> functions;
  int retained = 0;
  uint64_t used_bytes = 0;
  uint64_t now = 0;
  Result sticky = kSuccess;
  FakeStream default_stream;
  std::set<FakeStream*> capturing_all;  // streams of captures that forbid things to all threads
};

World& TheWorld() {
  static World* world = new World;
  return *world;
}

thread_local std::vector<void*> contexts;
thread_local FakeStream* capturing = nullptr;  // the stream of this thread's capture
int the_context;

FakeSettings DefaultSettings() {
  return FakeSettings{1, 90, 0, 12040, 84, 227 * 1024, uint64_t{1} << 30};
}

Result Fault(const char* function, const std::string& what, Result result) {
  TheWorld().faults += std::string(function) + ": " + what + "\n";
  return result;
}

// What every call begins with: counts it, injects a failure, and checks for a context.
struct Call {
  const char* name;
  std::lock_guard<std::recursive_mutex> lock;
  Result result = kSuccess;

  Call(const char* the_name, bool needs_context, bool breaks_capture = false)
      : name(the_name), lock(TheWorld().mutex) {
    World& world = TheWorld();
    ++world.calls[name];
    auto failure = world.failures.find(name);
    if (failure != world.failures.end() && --failure->second.first == 0) {
      result = failure->second.second;
      world.failures.erase(failure);
      return;
    }
    if (needs_context && contexts.empty()) {
      result = Fault(name, "no current context", kInvalidContext);
    } else if (needs_context && world.sticky != kSuccess) {
      result = world.sticky;
    } else if (breaks_capture && (capturing != nullptr || !world.capturing_all.empty())) {
      if (capturing != nullptr) capturing->capture_is_broken = true;
      for (FakeStream* stream : world.capturing_all) stream->capture_is_broken = true;
      result = Fault(name, "forbidden during a capture", kCaptureUnsupported);
    }
  }
};

bool WillFail(const char* name) {
  World& world = TheWorld();
  std::lock_guard<std::recursive_mutex> lock(world.mutex);
  auto failure = world.failures.find(name);
  return failure != world.failures.end() && failure->second.first == 1;
}

#define BEGIN(name, needs_context, breaks_capture) \
  Call call(name, needs_context, breaks_capture);  \
  if (call.result != kSuccess) return call.result; \
  World& world = TheWorld();                       \
  (void)world

// The block around [address, address + bytes) in host addresses, or nullptr.
const Block* FindBlock(uint64_t host, uint64_t bytes) {
  World& world = TheWorld();
  auto next = world.blocks.upper_bound(host);
  if (next == world.blocks.begin()) return nullptr;
  auto found = std::prev(next);
  bool inside = host + bytes <= found->first + found->second.bytes;
  return inside ? &found->second : nullptr;
}

void* HostOf(const char* function, DevicePointer address, uint64_t bytes) {
  uint64_t host = address - kDeviceBit;
  const Block* block = (address & kDeviceBit) != 0 ? FindBlock(host, bytes) : nullptr;
  if (block == nullptr || (block->is_host && !block->mapped)) {
    Fault(function, "not an address of the device, or too few bytes", kInvalidValue);
    return nullptr;
  }
  return reinterpret_cast<void*>(host);
}

FakeStream* FindStream(const char* function, Stream stream) {
  World& world = TheWorld();
  if (stream == nullptr) return &world.default_stream;
  FakeStream* found = reinterpret_cast<FakeStream*>(stream);
  if (world.streams.count(found) > 0) return found;
  Fault(function, "unknown stream", kInvalidHandle);
  return nullptr;
}

Result Put(FakeStream* stream, Work work) {
  if (stream->capture != nullptr) {
    if (stream->capture_is_broken) return kCaptureInvalidated;
    stream->capture->push_back(std::move(work));
  } else {
    stream->queue.push_back(std::move(work));
  }
  return kSuccess;
}

Result CopyWork(const char* function, FakeStream* stream, std::function<void*()> to,
                std::function<const void*()> from, size_t bytes) {
  if (to() == nullptr || from() == nullptr) return kInvalidValue;
  (void)function;
  return Put(stream, [to, from, bytes](uint64_t* now) {
    void* target = to();
    const void* source = from();
    if (target == nullptr || source == nullptr) return Result{700};
    memcpy(target, source, bytes);
    *now += kCopyNs;
    return kSuccess;
  });
}

template <typename Set, typename Handle>
bool Erase(const char* function, Set& set, Handle* handle) {
  if (set.erase(handle) == 0) {
    Fault(function, "unknown handle, or freed before", kInvalidHandle);
    return false;
  }
  delete handle;
  return true;
}

Result AllocateBlock(const char* function, uint64_t bytes, bool is_host, bool mapped,
                     uint64_t* address) {
  World& world = TheWorld();
  if (bytes == 0) return Fault(function, "no bytes", kInvalidValue);
  if (!is_host && world.used_bytes + bytes > world.settings.memory_bytes) return kOutOfMemory;
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) return kOutOfMemory;
  memset(memory, 0xa5, bytes);
  *address = reinterpret_cast<uint64_t>(memory);
  world.blocks[*address] = Block{bytes, is_host, mapped};
  if (!is_host) world.used_bytes += bytes;
  return kSuccess;
}

Result FreeBlock(const char* function, uint64_t address, bool is_host) {
  World& world = TheWorld();
  auto found = world.blocks.find(address);
  if (found == world.blocks.end() || found->second.is_host != is_host) {
    return Fault(function, "not an allocation, or freed before", kInvalidValue);
  }
  if (!is_host) world.used_bytes -= found->second.bytes;
  world.blocks.erase(found);
  free(reinterpret_cast<void*>(address));
  return kSuccess;
}

}  // namespace

EXPORT void fake_cuda_reset() {
  World& world = TheWorld();
  std::lock_guard<std::recursive_mutex> lock(world.mutex);
  world.settings = DefaultSettings();
  world.known.clear();
  world.failures.clear();
  world.calls.clear();
  world.faults.clear();
}

EXPORT FakeSettings* fake_cuda_settings() { return &TheWorld().settings; }

EXPORT void fake_cuda_register(const FakeFunction& function) {
  TheWorld().known[function.name] = function;
}

EXPORT void fake_cuda_fail(const char* function, int nth, int result) {
  TheWorld().failures[function] = {nth, result};
}

EXPORT int fake_cuda_calls(const char* function) { return TheWorld().calls[function]; }

EXPORT void* fake_cuda_host(uint64_t address, uint64_t bytes) {
  return HostOf("a kernel", address, bytes);
}

EXPORT int fake_cuda_live() {
  const World& world = TheWorld();
  size_t count = world.blocks.size() + world.streams.size() + world.events.size() +
                 world.modules.size() + world.graphs.size() + world.graph_execs.size() +
                 contexts.size();
  return static_cast<int>(count) + world.retained;
}

EXPORT const char* fake_cuda_faults() { return TheWorld().faults.c_str(); }

// The driver -----------------------------------------------------------------------------------

EXPORT Result cuInit(unsigned) {
  BEGIN("cuInit", false, false);
  return world.settings.num_devices > 0 ? kSuccess : kNoDevice;
}

EXPORT Result cuDriverGetVersion(int* version) {
  BEGIN("cuDriverGetVersion", false, false);
  *version = world.settings.driver_version;
  return kSuccess;
}

EXPORT Result cuGetErrorName(Result result, const char** text) {
  static const std::map<Result, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  auto found = names.find(result);
  *text = found != names.end() ? found->second : nullptr;
  return *text != nullptr ? kSuccess : kInvalidValue;
}

EXPORT Result cuGetErrorString(Result result, const char** text) {
  static const std::map<Result, const char*> meanings = {
      {kInvalidValue, "invalid argument"},
      {kOutOfMemory, "out of memory"},
      {kNotInitialized, "initialization error"},
      {kInvalidImage, "device kernel image is invalid"},
      {kNotFound, "named symbol not found"},
      {700, "an illegal memory access was encountered"},
      {701, "too many resources requested for launch"},
      {kCaptureUnsupported, "operation not permitted when stream is capturing"}};
  auto found = meanings.find(result);
  *text = found != meanings.end() ? found->second : nullptr;
  return *text != nullptr ? kSuccess : kInvalidValue;
}

EXPORT Result cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount", false, false);
  *count = world.settings.num_devices;
  return kSuccess;
}

EXPORT Result cuDeviceGet(Device* device, int index) {
  BEGIN("cuDeviceGet", false, false);
  *device = index;
  return index >= 0 && index < world.settings.num_devices ? kSuccess : kInvalidDevice;
}

EXPORT Result cuDeviceGetName(char* name, int bytes, Device) {
  BEGIN("cuDeviceGetName", false, false);
  strncpy(name, "Paper GPU", static_cast<size_t>(bytes));
  return kSuccess;
}

EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  BEGIN("cuDeviceGetAttribute", false, false);
  const std::map<int, int> values = {
      {kMaxThreadsPerBlock, 1024},
      {kMaxBlockDimX, 1024},
      {kMaxBlockDimX + 1, 1024},
      {kMaxBlockDimX + 2, 64},
      {kMaxGridDimX, 2147483647},
      {kMaxGridDimX + 1, 65535},
      {kMaxGridDimX + 2, 65535},
      {kIntegrated, world.settings.integrated},
      {kCanMapHostMemory, 1},
      {kComputeCapabilityMajor, world.settings.capability / 10},
      {kComputeCapabilityMinor, world.settings.capability % 10},
      {kMaxSharedMemoryPerBlockOptin, world.settings.shared_per_block_optin}};
  auto found = values.find(attribute);
  if (found == values.end()) return Fault(call.name, "unknown attribute", kInvalidValue);
  *value = found->second;
  return kSuccess;
}

EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, Device) {
  BEGIN("cuDeviceTotalMem_v2", false, false);
  *bytes = world.settings.memory_bytes;
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device) {
  BEGIN("cuDevicePrimaryCtxRetain", false, false);
  ++world.retained;
  *context = reinterpret_cast<Context>(&the_context);
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRelease(Device) {
  BEGIN("cuDevicePrimaryCtxRelease", false, false);
  if (world.retained == 0) return Fault(call.name, "not retained", kInvalidContext);
  if (--world.retained == 0 && world.sticky != kSuccess) {
    // The context goes, and with it all that could not be freed after the error.
    world.sticky = kSuccess;
    for (const auto& block : world.blocks) free(reinterpret_cast<void*>(block.first));
    for (FakeStream* stream : world.streams) delete stream;
    for (FakeEvent* event : world.events) delete event;
    for (FakeModule* module : world.modules) delete module;
    for (FakeGraph* graph : world.graph_execs) delete graph;
    world.blocks.clear();
    world.streams.clear();
    world.events.clear();
    world.modules.clear();
    world.functions.clear();
    world.graph_execs.clear();
    world.used_bytes = 0;
  }
  return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(Context context) {
  BEGIN("cuCtxPushCurrent_v2", false, false);
  if (context != reinterpret_cast<Context>(&the_context) || world.retained == 0) {
    return Fault(call.name, "unknown context", kInvalidContext);
  }
  contexts.push_back(context);
  return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  BEGIN("cuCtxPopCurrent_v2", false, false);
  if (contexts.empty()) return Fault(call.name, "none is current", kInvalidContext);
  *context = static_cast<Context>(contexts.back());
  contexts.pop_back();
  return kSuccess;
}

// Machine code is "fake cubin sm_90\n" and PTX ".version 8.4\n.target sm_75\n"; then one line per
// function, "add\n", and a zero byte.
EXPORT Result cuModuleLoadDataEx(Module* module, const void* image, unsigned num_options,
                                 int* options, void** values) {
  BEGIN("cuModuleLoadDataEx", true, true);
  std::string text = static_cast<const char*>(image);
  size_t at = text.find('\n') + 1;
  auto log = [&](const char* message) {
    for (unsigned i = 0; i < num_options; ++i) {
      if (options[i] == kJitErrorLogBuffer) strcpy(static_cast<char*>(values[i]), message);
    }
  };
  if (text.rfind("fake cubin sm_", 0) == 0) {
    int built = atoi(text.c_str() + strlen("fake cubin sm_"));
    if (built / 10 != world.settings.capability / 10 || built > world.settings.capability) {
      return kNoBinaryForGpu;
    }
  } else if (text.rfind(".version ", 0) == 0) {
    int major = 0;
    int minor = 0;
    int target = 0;
    if (sscanf(text.c_str(), ".version %d.%d .target sm_%d", &major, &minor, &target) != 3) {
      log("ptxas fatal   : no target\nptxas fatal   : gave up\n");
      return 218;
    }
    if (10 * major + minor > world.settings.ptx_version) return kUnsupportedPtxVersion;
    if (target > world.settings.capability) return kNoBinaryForGpu;
    at = text.find('\n', at) + 1;
  } else {
    return kInvalidImage;
  }
  auto loaded = std::make_unique<FakeModule>();
  while (at < text.size()) {
    size_t end = text.find('\n', at);
    loaded->functions.insert(text.substr(at, end - at));
    at = end + 1;
  }
  world.modules.insert(loaded.get());
  *module = reinterpret_cast<Module>(loaded.release());
  return kSuccess;
}

EXPORT Result cuModuleUnload(Module module) {
  BEGIN("cuModuleUnload", true, true);
  FakeModule* found = reinterpret_cast<FakeModule*>(module);
  for (auto it = world.functions.begin(); it != world.functions.end();) {
    it = it->second->module == found ? world.functions.erase(it) : std::next(it);
  }
  return Erase(call.name, world.modules, found) ? kSuccess : kInvalidHandle;
}

EXPORT Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  BEGIN("cuModuleGetFunction", true, true);
  FakeModule* found = reinterpret_cast<FakeModule*>(module);
  if (world.modules.count(found) == 0) return Fault(call.name, "unknown module", kInvalidHandle);
  if (found->functions.count(name) == 0) return kNotFound;
  auto loaded = std::make_unique<LoadedFunction>();
  loaded->function = world.known.at(name);
  loaded->module = found;
  void* handle = loaded.get();
  world.functions[handle] = std::move(loaded);
  *function = static_cast<Function>(handle);
  return kSuccess;
}

EXPORT Result cuFuncGetAttribute(int* value, int attribute, Function function) {
  BEGIN("cuFuncGetAttribute", true, false);
  auto found = world.functions.find(function);
  if (found == world.functions.end()) return Fault(call.name, "unknown function", kInvalidHandle);
  *value = attribute == kFunctionMaxThreadsPerBlock ? found->second->function.max_threads
                                                    : found->second->function.shared_bytes;
  return kSuccess;
}

EXPORT Result cuFuncSetAttribute(Function function, int attribute, int value) {
  BEGIN("cuFuncSetAttribute", true, false);
  auto found = world.functions.find(function);
  if (found == world.functions.end()) return Fault(call.name, "unknown function", kInvalidHandle);
  if (attribute != kFunctionMaxDynamicSharedSizeBytes ||
      value + found->second->function.shared_bytes > world.settings.shared_per_block_optin) {
    return kInvalidValue;
  }
  found->second->dynamic_shared_limit = value;
  return kSuccess;
}

EXPORT Result cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  BEGIN("cuMemGetInfo_v2", true, false);
  *all_bytes = world.settings.memory_bytes;
  *free_bytes = world.settings.memory_bytes - world.used_bytes;
  return kSuccess;
}

EXPORT Result cuMemAlloc_v2(DevicePointer* address, size_t bytes) {
  BEGIN("cuMemAlloc_v2", true, true);
  uint64_t host = 0;
  Result result = AllocateBlock(call.name, bytes, false, true, &host);
  *address = host + kDeviceBit;
  return result;
}

EXPORT Result cuMemFree_v2(DevicePointer address) {
  BEGIN("cuMemFree_v2", true, true);
  return FreeBlock(call.name, address - kDeviceBit, false);
}

EXPORT Result cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  BEGIN("cuMemHostAlloc", true, true);
  uint64_t host = 0;
  Result result =
      AllocateBlock(call.name, bytes, true, (flags & kMemHostAllocDeviceMap) != 0, &host);
  *memory = reinterpret_cast<void*>(host);
  return result;
}

EXPORT Result cuMemFreeHost(void* memory) {
  BEGIN("cuMemFreeHost", true, true);
  return FreeBlock(call.name, reinterpret_cast<uint64_t>(memory), true);
}

EXPORT Result cuMemHostGetDevicePointer_v2(DevicePointer* address, void* memory, unsigned) {
  BEGIN("cuMemHostGetDevicePointer_v2", true, false);
  const Block* block = FindBlock(reinterpret_cast<uint64_t>(memory), 1);
  if (block == nullptr || !block->mapped) {
    return Fault(call.name, "not mapped host memory", kInvalidValue);
  }
  *address = reinterpret_cast<uint64_t>(memory) + kDeviceBit;
  return kSuccess;
}

EXPORT Result cuPointerGetAttribute(void* value, int attribute, DevicePointer address) {
  BEGIN("cuPointerGetAttribute", true, false);
  if (attribute != kPointerMemoryType) return Fault(call.name, "unknown attribute", kInvalidValue);
  const Block* block = (address & kDeviceBit) != 0 ? FindBlock(address - kDeviceBit, 1) : nullptr;
  if (block == nullptr) return kInvalidValue;  // a program may ask
  *static_cast<unsigned*>(value) = block->is_host ? kMemoryTypeHost : 2;
  return kSuccess;
}

EXPORT Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes,
                                   Stream stream) {
  BEGIN("cuMemcpyHtoDAsync_v2", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  if (queue == nullptr) return kInvalidHandle;
  return CopyWork(
      call.name, queue, [=] { return HostOf("cuMemcpyHtoDAsync_v2", to, bytes); },
      [=] { return from; }, bytes);
}

EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, Stream stream) {
  BEGIN("cuMemcpyDtoHAsync_v2", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  if (queue == nullptr) return kInvalidHandle;
  return CopyWork(
      call.name, queue, [=] { return to; },
      [=] { return HostOf("cuMemcpyDtoHAsync_v2", from, bytes); }, bytes);
}

EXPORT Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t bytes,
                                   Stream stream) {
  BEGIN("cuMemcpyDtoDAsync_v2", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  if (queue == nullptr) return kInvalidHandle;
  return CopyWork(
      call.name, queue, [=] { return HostOf("cuMemcpyDtoDAsync_v2", to, bytes); },
      [=] { return HostOf("cuMemcpyDtoDAsync_v2", from, bytes); }, bytes);
}

EXPORT Result cuStreamCreate(Stream* stream, unsigned) {
  BEGIN("cuStreamCreate", true, true);
  FakeStream* made = new FakeStream;
  world.streams.insert(made);
  *stream = reinterpret_cast<Stream>(made);
  return kSuccess;
}

EXPORT Result cuStreamDestroy_v2(Stream stream) {
  BEGIN("cuStreamDestroy_v2", true, true);
  FakeStream* found = reinterpret_cast<FakeStream*>(stream);
  if (world.streams.count(found) > 0 && !found->queue.empty()) {
    Fault(call.name, "the stream has commands left", kSuccess);
  }
  return Erase(call.name, world.streams, found) ? kSuccess : kInvalidHandle;
}

EXPORT Result cuStreamSynchronize(Stream stream) {
  if (WillFail("cuStreamSynchronize")) {  // as after an error of the GPU: nothing more is done
    FakeStream* queue = FindStream("cuStreamSynchronize", stream);
    if (queue != nullptr) queue->queue.clear();
  }
  BEGIN("cuStreamSynchronize", true, true);
  FakeStream* queue = FindStream(call.name, stream);
  if (queue == nullptr) return kInvalidHandle;
  std::vector<Work> work = std::move(queue->queue);
  queue->queue.clear();
  for (const Work& item : work) {
    if (world.sticky == kSuccess) world.sticky = item(&world.now);
  }
  return world.sticky;
}

EXPORT Result cuEventCreate(Event* event, unsigned) {
  BEGIN("cuEventCreate", true, true);
  FakeEvent* made = new FakeEvent;
  world.events.insert(made);
  *event = reinterpret_cast<Event>(made);
  return kSuccess;
}

EXPORT Result cuEventDestroy_v2(Event event) {
  BEGIN("cuEventDestroy_v2", true, true);
  FakeEvent* found = reinterpret_cast<FakeEvent*>(event);
  return Erase(call.name, world.events, found) ? kSuccess : kInvalidHandle;
}

static Result PutEvent(const char* name, Event event, Stream stream, bool external) {
  World& world = TheWorld();
  FakeStream* queue = FindStream(name, stream);
  FakeEvent* found = reinterpret_cast<FakeEvent*>(event);
  if (queue == nullptr || world.events.count(found) == 0) {
    return Fault(name, "unknown stream or event", kInvalidHandle);
  }
  if (queue->capture != nullptr && !external) {
    return Fault(name, "an event of a capture has no time", kInvalidValue);
  }
  return Put(queue, [found](uint64_t* now) {
    if (TheWorld().events.count(found) == 0) return Result{700};
    found->time = *now;
    found->recorded = true;
    return kSuccess;
  });
}

EXPORT Result cuEventRecord(Event event, Stream stream) {
  BEGIN("cuEventRecord", true, false);
  return PutEvent(call.name, event, stream, false);
}

EXPORT Result cuEventElapsedTime(float* ms, Event start, Event end) {
  BEGIN("cuEventElapsedTime", true, false);
  FakeEvent* first = reinterpret_cast<FakeEvent*>(start);
  FakeEvent* last = reinterpret_cast<FakeEvent*>(end);
  if (world.events.count(first) == 0 || world.events.count(last) == 0 || !first->recorded ||
      !last->recorded) {
    return Fault(call.name, "an event that was not recorded", kInvalidHandle);
  }
  *ms = static_cast<float>(last->time - first->time) * 1e-6f;
  return kSuccess;
}

EXPORT Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                             Stream stream, void** parameters, void** extra) {
  BEGIN("cuLaunchKernel", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  auto found = world.functions.find(function);
  if (queue == nullptr || found == world.functions.end() || extra != nullptr) {
    return Fault(call.name, "unknown stream or function", kInvalidHandle);
  }
  const LoadedFunction& loaded = *found->second;
  if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0 ||
      block_x * block_y * block_z > static_cast<unsigned>(loaded.function.max_threads)) {
    return kInvalidValue;
  }
  if (static_cast<int>(shared) > loaded.dynamic_shared_limit) return kInvalidValue;
  // As the driver does: the values are read now.
  std::vector<uint64_t> arguments;
  for (uint32_t i = 0; i < loaded.function.num_arguments; ++i) {
    arguments.push_back(*static_cast<const uint64_t*>(parameters[i]));
  }
  FakeFunction kernel = loaded.function;
  return Put(queue, [=](uint64_t* now) {
    FakeLaunch launch{{grid_x, grid_y, grid_z},
                      {block_x, block_y, block_z},
                      shared,
                      arguments.data(),
                      kernel.num_arguments};
    *now += kernel.duration_ns;
    return kernel.kernel(launch);
  });
}

// Of later drivers ----------------------------------------------------------------------------

EXPORT Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters,
                               void** extra) {
  {
    BEGIN("cuLaunchKernelEx", true, false);
    if (config->num_attributes != 1 ||
        config->attributes[0].id != kLaunchAttributeProgrammaticStreamSerialization ||
        config->attributes[0].value.programmatic_stream_serialization_allowed != 1) {
      return Fault(call.name, "an attribute that the stand-in does not know", kInvalidValue);
    }
    if (world.settings.capability < 90) return kInvalidValue;
  }
  return cuLaunchKernel(function, config->grid[0], config->grid[1], config->grid[2],
                        config->block[0], config->block[1], config->block[2], config->shared_bytes,
                        config->stream, parameters, extra);
}

EXPORT Result cuFuncLoad(Function function) {
  BEGIN("cuFuncLoad", true, true);
  return world.functions.count(function) > 0 ? kSuccess : kInvalidHandle;
}

EXPORT Result cuEventRecordWithFlags(Event event, Stream stream, unsigned flags) {
  BEGIN("cuEventRecordWithFlags", true, false);
  return PutEvent(call.name, event, stream, (flags & kEventRecordExternal) != 0);
}

EXPORT Result cuStreamBeginCapture_v2(Stream stream, int mode) {
  BEGIN("cuStreamBeginCapture_v2", true, true);
  FakeStream* queue = FindStream(call.name, stream);
  if (queue == nullptr || queue == &world.default_stream || queue->capture != nullptr) {
    return Fault(call.name, "this stream cannot begin a capture", kCaptureUnsupported);
  }
  queue->capture = new std::vector<Work>;
  queue->capture_is_broken = false;
  capturing = queue;
  if (mode != kCaptureThreadLocal) world.capturing_all.insert(queue);
  return kSuccess;
}

EXPORT Result cuStreamEndCapture(Stream stream, Graph* graph) {
  if (WillFail("cuStreamEndCapture")) {  // it ends, whatever comes of it
    FakeStream* queue = FindStream("cuStreamEndCapture", stream);
    if (queue != nullptr) delete queue->capture;
    if (queue != nullptr) queue->capture = nullptr;
    capturing = nullptr;
    TheWorld().capturing_all.erase(queue);
  }
  BEGIN("cuStreamEndCapture", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  *graph = nullptr;
  if (queue == nullptr || queue->capture == nullptr) {
    return Fault(call.name, "no capture", kInvalidValue);
  }
  std::unique_ptr<std::vector<Work>> work(queue->capture);
  queue->capture = nullptr;
  capturing = nullptr;
  world.capturing_all.erase(queue);
  if (queue->capture_is_broken) return kCaptureInvalidated;
  FakeGraph* made = new FakeGraph{std::move(*work)};
  world.graphs.insert(made);
  *graph = reinterpret_cast<Graph>(made);
  return kSuccess;
}

EXPORT Result cuGraphInstantiateWithFlags(GraphExec* exec, Graph graph, unsigned long long) {
  BEGIN("cuGraphInstantiateWithFlags", true, true);
  FakeGraph* found = reinterpret_cast<FakeGraph*>(graph);
  if (world.graphs.count(found) == 0) return Fault(call.name, "unknown graph", kInvalidHandle);
  FakeGraph* made = new FakeGraph(*found);
  world.graph_execs.insert(made);
  *exec = reinterpret_cast<GraphExec>(made);
  return kSuccess;
}

EXPORT Result cuGraphLaunch(GraphExec exec, Stream stream) {
  BEGIN("cuGraphLaunch", true, false);
  FakeStream* queue = FindStream(call.name, stream);
  FakeGraph* found = reinterpret_cast<FakeGraph*>(exec);
  if (queue == nullptr || world.graph_execs.count(found) == 0) {
    return Fault(call.name, "unknown stream or graph", kInvalidHandle);
  }
  for (const Work& work : found->work) {
    Result result = Put(queue, work);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

EXPORT Result cuGraphExecDestroy(GraphExec exec) {
  BEGIN("cuGraphExecDestroy", true, true);
  FakeGraph* found = reinterpret_cast<FakeGraph*>(exec);
  return Erase(call.name, world.graph_execs, found) ? kSuccess : kInvalidHandle;
}

EXPORT Result cuGraphDestroy(Graph graph) {
  BEGIN("cuGraphDestroy", true, true);
  FakeGraph* found = reinterpret_cast<FakeGraph*>(graph);
  return Erase(call.name, world.graphs, found) ? kSuccess : kInvalidHandle;
}
