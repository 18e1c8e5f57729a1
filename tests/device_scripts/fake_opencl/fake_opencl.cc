#include "fake_opencl.h"

#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "opencl_driver.h"

using namespace edgert::opencl;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr Result kBuildProgramFailure = -11;
constexpr Result kMisalignedOffset = -13;
constexpr Result kInvalidValue = -30;
constexpr Result kInvalidBinary = -42;
constexpr Result kInvalidKernelName = -46;
constexpr Result kInvalidArgs = -52;
constexpr Result kInvalidOperation = -59;
constexpr uint64_t kCopyNs = 1000;
constexpr char kBinary[] = "fake binary\n";

struct Object {
  enum Kind { kContext, kQueue, kBuffer, kProgram, kKernel, kEvent } kind;
  int references = 1;
};

struct FakeContext : Object {
  Device device;
};

struct FakeBuffer : Object {
  FakeContext* context;
  FakeBuffer* parent = nullptr;
  size_t origin = 0;
  size_t size = 0;
  std::vector<unsigned char> own;  // without a parent
  unsigned char* view = nullptr;   // while it is mapped
  unsigned char* last_view = nullptr;

  unsigned char* data() { return parent != nullptr ? parent->data() + origin : own.data(); }
  FakeBuffer* root() { return parent != nullptr ? parent : this; }
};

struct FakeProgram : Object {
  std::string source;
  std::string log;
  bool is_built = false;
};

struct FakeKernel : Object {
  FakeClKernel known;
  std::vector<FakeBuffer*> arguments;
  std::vector<bool> is_set;
};

struct FakeEvent : Object {
  uint64_t start = 0;
  uint64_t end = 0;
  bool is_done = false;
};

using Work = std::function<Result(uint64_t* now)>;
struct Entry {
  Work work;
  FakeEvent* event;
};

struct FakeQueue : Object {
  FakeContext* context;
  Device device;
  Bitfield properties;
  std::vector<Entry> entries;
};

struct FakeDevice {
  int number;
  bool is_gpu;
};

struct World {
  std::recursive_mutex mutex;
  FakeClSettings settings;
  std::map<std::string, FakeClKernel> known;
  std::map<std::string, std::pair<int, Result>> failures;
  std::map<std::string, int> calls;
  std::string faults;
  std::set<Object*> live;
  uint64_t now = 0;
};

World& TheWorld() {
  static World* world = new World;
  return *world;
}

FakeDevice devices[2][8];
int the_platform;

Result Fault(const char* function, const std::string& what, Result result) {
  TheWorld().faults += std::string(function) + ": " + what + "\n";
  return result;
}

// What every call begins with: counts it and injects a failure.
struct Call {
  const char* name;
  std::lock_guard<std::recursive_mutex> lock;
  Result result = kSuccess;

  explicit Call(const char* the_name) : name(the_name), lock(TheWorld().mutex) {
    World& world = TheWorld();
    ++world.calls[name];
    auto failure = world.failures.find(name);
    if (failure == world.failures.end() || --failure->second.first != 0) return;
    result = failure->second.second;
    world.failures.erase(failure);
  }

  // The object behind a handle, or nullptr and a fault.
  template <typename T>
  T* Get(void* handle, Object::Kind kind) {
    Object* object = static_cast<Object*>(handle);
    if (TheWorld().live.count(object) == 0 || object->kind != kind) {
      result = Fault(name, "no such object", kInvalidValue);
      return nullptr;
    }
    return static_cast<T*>(object);
  }
};

template <typename T>
T* New(Object::Kind kind) {
  T* object = new T;
  object->kind = kind;
  TheWorld().live.insert(object);
  return object;
}

template <typename T>
void Release(T* object) {
  if (--object->references > 0) return;
  TheWorld().live.erase(object);
  delete object;
}

void ReleaseBuffer(FakeBuffer* buffer) {
  FakeBuffer* parent = buffer->references == 1 ? buffer->parent : nullptr;
  if (buffer->references == 1) free(buffer->last_view);
  Release(buffer);
  if (parent != nullptr) ReleaseBuffer(parent);
}

Result Give(const void* data, size_t bytes, size_t room, void* value, size_t* size) {
  if (size != nullptr) *size = bytes;
  if (value == nullptr) return kSuccess;
  if (room < bytes) return kInvalidValue;
  memcpy(value, data, bytes);
  return kSuccess;
}

Result GiveText(const std::string& text, size_t room, void* value, size_t* size) {
  return Give(text.c_str(), text.size() + 1, room, value, size);
}

template <typename T>
Result GiveNumber(T number, size_t room, void* value, size_t* size) {
  return Give(&number, sizeof(number), room, value, size);
}

Result Put(Call* call, FakeQueue* queue, Event* event, Work work) {
  if (queue == nullptr) return call->result;
  if (call->result != kSuccess) return call->result;
  FakeEvent* made = nullptr;
  if (event != nullptr) {
    made = New<FakeEvent>(Object::kEvent);
    made->references = 2;  // the queue's and the caller's
    *event = reinterpret_cast<Event>(made);
  }
  queue->entries.push_back({std::move(work), made});
  return kSuccess;
}

Result Run(FakeQueue* queue) {
  Result first = kSuccess;
  std::vector<Entry> entries;
  entries.swap(queue->entries);
  uint64_t& now = TheWorld().now;
  for (Entry& entry : entries) {
    uint64_t start = now;
    Result result = first == kSuccess ? entry.work(&now) : kSuccess;
    if (first == kSuccess) first = result;
    if (entry.event == nullptr) continue;
    entry.event->start = start;
    entry.event->end = now;
    entry.event->is_done = true;
    Release(entry.event);
  }
  return first;
}

bool IsInside(FakeBuffer* buffer, size_t offset, size_t bytes) {
  return offset <= buffer->size && bytes <= buffer->size - offset;
}

}  // namespace

EXPORT void fake_cl_reset() {
  World& world = TheWorld();
  std::lock_guard<std::recursive_mutex> lock(world.mutex);
  world.settings = FakeClSettings{1,
                                  1,
                                  0,
                                  1,
                                  512,
                                  uint64_t{1} << 28,
                                  uint64_t{1} << 30,
                                  32768,
                                  "7.1",
                                  "cl_khr_fp16 cl_khr_byte_addressable_store",
                                  false,
                                  false};
  world.known.clear();
  world.failures.clear();
  world.calls.clear();
  world.faults.clear();
}

EXPORT FakeClSettings* fake_cl_settings() { return &TheWorld().settings; }

EXPORT void fake_cl_register(const FakeClKernel& kernel) { TheWorld().known[kernel.name] = kernel; }

EXPORT void fake_cl_fail(const char* function, int nth, int result) {
  TheWorld().failures[function] = {nth, result};
}

EXPORT int fake_cl_calls(const char* function) { return TheWorld().calls[function]; }

EXPORT int fake_cl_live() { return static_cast<int>(TheWorld().live.size()); }

EXPORT const char* fake_cl_faults() { return TheWorld().faults.c_str(); }

EXPORT Result clGetPlatformIDs(Uint count, Platform* platforms, Uint* found) {
  Call call("clGetPlatformIDs");
  if (call.result != kSuccess) return call.result;
  if (TheWorld().settings.no_platforms) return kPlatformNotFound;
  if (found != nullptr) *found = 1;
  if (platforms != nullptr && count > 0) platforms[0] = reinterpret_cast<Platform>(&the_platform);
  return kSuccess;
}

EXPORT Result clGetPlatformInfo(Platform, Uint what, size_t room, void* value, size_t* size) {
  Call call("clGetPlatformInfo");
  if (call.result != kSuccess) return call.result;
  return GiveText(what == kPlatformName ? "Paper" : "OpenCL 1.2 Paper", room, value, size);
}

EXPORT Result clGetDeviceIDs(Platform, Bitfield, Uint count, Device* found, Uint* number) {
  Call call("clGetDeviceIDs");
  if (call.result != kSuccess) return call.result;
  Uint next = 0;
  const FakeClSettings& settings = TheWorld().settings;
  for (int is_gpu : {0, 1}) {
    for (int i = 0; i < (is_gpu ? settings.num_gpus : settings.num_cpus); ++i) {
      devices[is_gpu][i] = {i, is_gpu != 0};
      if (found != nullptr && next < count) {
        found[next] = reinterpret_cast<Device>(&devices[is_gpu][i]);
      }
      ++next;
    }
  }
  if (number != nullptr) *number = next;
  return next > 0 ? kSuccess : kDeviceNotFound;
}

EXPORT Result clGetDeviceInfo(Device handle, Uint what, size_t room, void* value, size_t* size) {
  Call call("clGetDeviceInfo");
  if (call.result != kSuccess) return call.result;
  const FakeClSettings& settings = TheWorld().settings;
  const FakeDevice& device = *reinterpret_cast<FakeDevice*>(handle);
  size_t items[3] = {1024, 1024, 64};
  switch (what) {
    case kDeviceType:
      return GiveNumber<Bitfield>(device.is_gpu ? kDeviceTypeGpu : 2, room, value, size);
    case kDeviceMaxWorkItemSizes:
      return Give(items, sizeof(items), room, value, size);
    case kDeviceMaxMemAllocSize:
      return GiveNumber<uint64_t>(settings.max_allocation, room, value, size);
    case kDeviceMemBaseAddrAlign:
      return GiveNumber<Uint>(settings.alignment_bits, room, value, size);
    case kDeviceGlobalMemSize:
      return GiveNumber<uint64_t>(settings.memory_bytes, room, value, size);
    case kDeviceLocalMemSize:
      return GiveNumber<uint64_t>(settings.local_bytes, room, value, size);
    case kDeviceAvailable:
      return GiveNumber<Uint>(1, room, value, size);
    case kDeviceCompilerAvailable:
      return GiveNumber<Uint>(settings.has_compiler, room, value, size);
    case kDeviceHostUnifiedMemory:
      return GiveNumber<Uint>(settings.unified, room, value, size);
    case kDevicePlatform:
      return GiveNumber<Platform>(reinterpret_cast<Platform>(&the_platform), room, value, size);
    case kDeviceName:
      return GiveText((device.is_gpu ? "Paper GPU " : "Paper CPU ") + std::to_string(device.number),
                      room, value, size);
    case kDriverVersion:
      return GiveText(settings.driver_version, room, value, size);
    case kDeviceVersion:
      return GiveText("OpenCL 1.2", room, value, size);
    case kDeviceExtensions:
      return GiveText(settings.extensions, room, value, size);
    default:
      return Fault("clGetDeviceInfo", std::to_string(what), kInvalidValue);
  }
}

EXPORT Context clCreateContext(const intptr_t*, Uint, const Device* device, Notify, void*,
                               Result* result) {
  Call call("clCreateContext");
  *result = call.result;
  if (call.result != kSuccess) return nullptr;
  FakeContext* context = New<FakeContext>(Object::kContext);
  context->device = *device;
  return reinterpret_cast<Context>(context);
}

EXPORT Result clRetainContext(Context handle) {
  Call call("clRetainContext");
  FakeContext* context = call.Get<FakeContext>(handle, Object::kContext);
  if (context != nullptr && call.result == kSuccess) ++context->references;
  return call.result;
}

EXPORT Result clReleaseContext(Context handle) {
  Call call("clReleaseContext");
  FakeContext* context = call.Get<FakeContext>(handle, Object::kContext);
  if (context != nullptr) Release(context);
  return call.result;
}

EXPORT Queue clCreateCommandQueue(Context handle, Device device, Bitfield properties,
                                  Result* result) {
  Call call("clCreateCommandQueue");
  FakeContext* context = call.Get<FakeContext>(handle, Object::kContext);
  *result = call.result;
  if (context == nullptr || call.result != kSuccess) return nullptr;
  FakeQueue* queue = New<FakeQueue>(Object::kQueue);
  queue->context = context;
  queue->device = device;
  queue->properties = properties;
  return reinterpret_cast<Queue>(queue);
}

EXPORT Result clRetainCommandQueue(Queue handle) {
  Call call("clRetainCommandQueue");
  FakeQueue* queue = call.Get<FakeQueue>(handle, Object::kQueue);
  if (queue != nullptr && call.result == kSuccess) ++queue->references;
  return call.result;
}

EXPORT Result clReleaseCommandQueue(Queue handle) {
  Call call("clReleaseCommandQueue");
  FakeQueue* queue = call.Get<FakeQueue>(handle, Object::kQueue);
  if (queue == nullptr) return call.result;
  if (queue->references == 1) Run(queue);
  Release(queue);
  return call.result;
}

EXPORT Result clGetCommandQueueInfo(Queue handle, Uint what, size_t room, void* value,
                                    size_t* size) {
  Call call("clGetCommandQueueInfo");
  FakeQueue* queue = call.Get<FakeQueue>(handle, Object::kQueue);
  if (queue == nullptr || call.result != kSuccess) return call.result;
  if (what == kQueueDevice) return GiveNumber(queue->device, room, value, size);
  if (what == kQueueProperties) return GiveNumber(queue->properties, room, value, size);
  return GiveNumber(reinterpret_cast<Context>(queue->context), room, value, size);
}

EXPORT Memory clCreateBuffer(Context handle, Bitfield, size_t bytes, void*, Result* result) {
  Call call("clCreateBuffer");
  FakeContext* context = call.Get<FakeContext>(handle, Object::kContext);
  if (call.result == kSuccess && (bytes == 0 || bytes > TheWorld().settings.max_allocation)) {
    call.result = Fault(call.name, "a size that is refused", kInvalidBufferSize);
  }
  *result = call.result;
  if (context == nullptr || call.result != kSuccess) return nullptr;
  FakeBuffer* buffer = New<FakeBuffer>(Object::kBuffer);
  buffer->context = context;
  buffer->size = bytes;
  buffer->own.assign(bytes, 0xEE);
  return reinterpret_cast<Memory>(buffer);
}

EXPORT Memory clCreateSubBuffer(Memory handle, Bitfield, Uint type, const void* info,
                                Result* result) {
  Call call("clCreateSubBuffer");
  FakeBuffer* parent = call.Get<FakeBuffer>(handle, Object::kBuffer);
  const BufferRegion& region = *static_cast<const BufferRegion*>(info);
  if (parent != nullptr && call.result == kSuccess) {
    if (type != kBufferCreateTypeRegion || parent->parent != nullptr || region.size == 0 ||
        !IsInside(parent, region.origin, region.size)) {
      call.result = Fault(call.name, "a wrong region", kInvalidValue);
    } else if (region.origin % (TheWorld().settings.alignment_bits / 8) != 0) {
      call.result = kMisalignedOffset;
    }
  }
  *result = call.result;
  if (parent == nullptr || call.result != kSuccess) return nullptr;
  FakeBuffer* buffer = New<FakeBuffer>(Object::kBuffer);
  buffer->context = parent->context;
  buffer->parent = parent;
  buffer->origin = region.origin;
  buffer->size = region.size;
  ++parent->references;
  return reinterpret_cast<Memory>(buffer);
}

EXPORT Result clReleaseMemObject(Memory handle) {
  Call call("clReleaseMemObject");
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (buffer == nullptr) return call.result;
  if (buffer->references == 1 && buffer->view != nullptr) {
    Fault(call.name, "a buffer that is mapped", kInvalidOperation);
  }
  ReleaseBuffer(buffer);
  return call.result;
}

EXPORT Result clGetMemObjectInfo(Memory handle, Uint what, size_t room, void* value, size_t* size) {
  Call call("clGetMemObjectInfo");
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (buffer == nullptr || call.result != kSuccess) return call.result;
  if (what == kMemSize) return GiveNumber(buffer->size, room, value, size);
  return GiveNumber(reinterpret_cast<Context>(buffer->context), room, value, size);
}

EXPORT Code clCreateProgramWithSource(Context handle, Uint, const char** source,
                                      const size_t* length, Result* result) {
  Call call("clCreateProgramWithSource");
  call.Get<FakeContext>(handle, Object::kContext);
  *result = call.result;
  if (call.result != kSuccess) return nullptr;
  FakeProgram* program = New<FakeProgram>(Object::kProgram);
  program->source.assign(source[0], length[0]);
  return reinterpret_cast<Code>(program);
}

EXPORT Code clCreateProgramWithBinary(Context handle, Uint, const Device*, const size_t* length,
                                      const unsigned char** data, Result* status, Result* result) {
  Call call("clCreateProgramWithBinary");
  call.Get<FakeContext>(handle, Object::kContext);
  std::string text(reinterpret_cast<const char*>(data[0]), length[0]);
  if (call.result == kSuccess && text.rfind(kBinary, 0) != 0) call.result = kInvalidBinary;
  *status = *result = call.result;
  if (call.result != kSuccess) return nullptr;
  FakeProgram* program = New<FakeProgram>(Object::kProgram);
  program->source = text.substr(strlen(kBinary));
  return reinterpret_cast<Code>(program);
}

EXPORT Result clBuildProgram(Code handle, Uint, const Device*, const char*, BuildNotify, void*) {
  Call call("clBuildProgram");
  FakeProgram* program = call.Get<FakeProgram>(handle, Object::kProgram);
  if (program == nullptr || call.result != kSuccess) return call.result;
  size_t at = program->source.find("#error");
  if (at != std::string::npos) {
    long line = 1;
    for (size_t i = 0; i < at; ++i) line += program->source[i] == '\n' ? 1 : 0;
    program->log = "warning: this is paper\n<source>:" + std::to_string(line) +
                   ":1: error: a register that paper has not\n";
    return kBuildProgramFailure;
  }
  program->is_built = true;
  return kSuccess;
}

EXPORT Result clReleaseProgram(Code handle) {
  Call call("clReleaseProgram");
  FakeProgram* program = call.Get<FakeProgram>(handle, Object::kProgram);
  if (program != nullptr) Release(program);
  return call.result;
}

EXPORT Result clGetProgramInfo(Code handle, Uint what, size_t room, void* value, size_t* size) {
  Call call("clGetProgramInfo");
  FakeProgram* program = call.Get<FakeProgram>(handle, Object::kProgram);
  if (program == nullptr || call.result != kSuccess) return call.result;
  std::string binary = kBinary + program->source;
  if (what == kProgramBinarySizes) return GiveNumber(binary.size(), room, value, size);
  memcpy(*static_cast<unsigned char**>(value), binary.data(), binary.size());
  return kSuccess;
}

EXPORT Result clGetProgramBuildInfo(Code handle, Device, Uint, size_t room, void* value,
                                    size_t* size) {
  Call call("clGetProgramBuildInfo");
  FakeProgram* program = call.Get<FakeProgram>(handle, Object::kProgram);
  if (program == nullptr || call.result != kSuccess) return call.result;
  return GiveText(program->log, room, value, size);
}

EXPORT Kernel clCreateKernel(Code handle, const char* name, Result* result) {
  Call call("clCreateKernel");
  FakeProgram* program = call.Get<FakeProgram>(handle, Object::kProgram);
  World& world = TheWorld();
  if (program != nullptr && call.result == kSuccess) {
    if (!program->is_built) call.result = Fault(call.name, "a program not built", -45);
    std::string head = std::string("__kernel void ") + name + "(";
    if (program->source.find(head) == std::string::npos || world.known.count(name) == 0) {
      call.result = kInvalidKernelName;
    }
  }
  *result = call.result;
  if (call.result != kSuccess) return nullptr;
  FakeKernel* kernel = New<FakeKernel>(Object::kKernel);
  kernel->known = world.known[name];
  kernel->arguments.resize(kernel->known.num_arguments);
  kernel->is_set.resize(kernel->known.num_arguments);
  return reinterpret_cast<Kernel>(kernel);
}

EXPORT Result clReleaseKernel(Kernel handle) {
  Call call("clReleaseKernel");
  FakeKernel* kernel = call.Get<FakeKernel>(handle, Object::kKernel);
  if (kernel != nullptr) Release(kernel);
  return call.result;
}

EXPORT Result clSetKernelArg(Kernel handle, Uint index, size_t size, const void* value) {
  Call call("clSetKernelArg");
  FakeKernel* kernel = call.Get<FakeKernel>(handle, Object::kKernel);
  if (kernel == nullptr || call.result != kSuccess) return call.result;
  if (index >= kernel->arguments.size()) return -49;
  if (size != sizeof(Memory)) return Fault(call.name, "a wrong size", -51);
  void* buffer = value == nullptr ? nullptr : *static_cast<void* const*>(value);
  kernel->arguments[index] =
      buffer == nullptr ? nullptr : call.Get<FakeBuffer>(buffer, Object::kBuffer);
  kernel->is_set[index] = true;
  return call.result;
}

EXPORT Result clGetKernelWorkGroupInfo(Kernel handle, Device, Uint what, size_t room, void* value,
                                       size_t* size) {
  Call call("clGetKernelWorkGroupInfo");
  FakeKernel* kernel = call.Get<FakeKernel>(handle, Object::kKernel);
  if (kernel == nullptr || call.result != kSuccess) return call.result;
  if (what == kKernelWorkGroupSize) return GiveNumber(kernel->known.max_group, room, value, size);
  return GiveNumber(kernel->known.local_bytes, room, value, size);
}

EXPORT Result clEnqueueNDRangeKernel(Queue queue_handle, Kernel handle, Uint dimensions,
                                     const size_t*, const size_t* global, const size_t* local, Uint,
                                     const Event*, Event* event) {
  Call call("clEnqueueNDRangeKernel");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeKernel* kernel = call.Get<FakeKernel>(handle, Object::kKernel);
  if (queue == nullptr || kernel == nullptr || call.result != kSuccess) return call.result;
  FakeClLaunch launch = {{1, 1, 1}, {1, 1, 1}, {}, {}};
  size_t group = 1;
  for (Uint axis = 0; axis < dimensions; ++axis) {
    launch.global[axis] = global[axis];
    launch.local[axis] = local[axis];
    group *= local[axis];
    if (global[axis] == 0 || global[axis] % local[axis] != 0) return -54;
  }
  if (group > kernel->known.max_group) return Fault(call.name, "too large a group", -54);
  for (size_t i = 0; i < kernel->arguments.size(); ++i) {
    if (!kernel->is_set[i]) return Fault(call.name, "an argument that was not set", kInvalidArgs);
  }
  std::vector<FakeBuffer*> arguments = kernel->arguments;
  FakeClKernel known = kernel->known;
  return Put(&call, queue, event, [arguments, known, launch](uint64_t* now) {
    FakeClLaunch filled = launch;
    for (size_t i = 0; i < arguments.size(); ++i) {
      FakeBuffer* buffer = arguments[i];
      if (buffer == nullptr) continue;
      if (TheWorld().live.count(buffer) == 0) return Fault(known.name, "a released buffer", -38);
      if (buffer->root()->view != nullptr) return Fault(known.name, "a mapped buffer", -59);
      filled.arguments[i] = buffer->data();
      filled.bytes[i] = buffer->size;
    }
    *now += known.duration_ns;
    return Result{known.function(filled)};
  });
}

namespace {

// The checks of a transfer between the host and `buffer`.
Result CheckTransfer(const char* name, FakeBuffer* buffer, size_t offset, size_t bytes) {
  if (bytes == 0 || !IsInside(buffer, offset, bytes)) {
    return Fault(name, "beyond the buffer", kInvalidValue);
  }
  if (buffer->root()->view != nullptr) return Fault(name, "a mapped buffer", kInvalidOperation);
  return kSuccess;
}

}  // namespace

EXPORT Result clEnqueueReadBuffer(Queue queue_handle, Memory handle, Uint blocking, size_t offset,
                                  size_t bytes, void* host, Uint, const Event*, Event* event) {
  Call call("clEnqueueReadBuffer");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (queue == nullptr || buffer == nullptr || call.result != kSuccess) return call.result;
  Result result = Put(&call, queue, event, [=](uint64_t* now) {
    Result checked = CheckTransfer("clEnqueueReadBuffer", buffer, offset, bytes);
    if (checked == kSuccess) memcpy(host, buffer->data() + offset, bytes);
    *now += kCopyNs;
    return checked;
  });
  return result == kSuccess && blocking != 0 ? Run(queue) : result;
}

EXPORT Result clEnqueueWriteBuffer(Queue queue_handle, Memory handle, Uint blocking, size_t offset,
                                   size_t bytes, const void* host, Uint, const Event*,
                                   Event* event) {
  Call call("clEnqueueWriteBuffer");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (queue == nullptr || buffer == nullptr || call.result != kSuccess) return call.result;
  Result result = Put(&call, queue, event, [=](uint64_t* now) {
    Result checked = CheckTransfer("clEnqueueWriteBuffer", buffer, offset, bytes);
    if (checked == kSuccess) memcpy(buffer->data() + offset, host, bytes);
    *now += kCopyNs;
    return checked;
  });
  return result == kSuccess && blocking != 0 ? Run(queue) : result;
}

EXPORT Result clEnqueueCopyBuffer(Queue queue_handle, Memory from_handle, Memory to_handle,
                                  size_t from_offset, size_t to_offset, size_t bytes, Uint,
                                  const Event*, Event* event) {
  Call call("clEnqueueCopyBuffer");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeBuffer* from = call.Get<FakeBuffer>(from_handle, Object::kBuffer);
  FakeBuffer* to = call.Get<FakeBuffer>(to_handle, Object::kBuffer);
  if (queue == nullptr || from == nullptr || to == nullptr || call.result != kSuccess) {
    return call.result;
  }
  return Put(&call, queue, event, [=](uint64_t* now) {
    Result checked = CheckTransfer("clEnqueueCopyBuffer", from, from_offset, bytes);
    if (checked == kSuccess) checked = CheckTransfer("clEnqueueCopyBuffer", to, to_offset, bytes);
    if (checked == kSuccess && from == to && from_offset < to_offset + bytes &&
        to_offset < from_offset + bytes) {
      checked = Fault("clEnqueueCopyBuffer", "an overlap", -8);
    }
    if (checked == kSuccess) memcpy(to->data() + to_offset, from->data() + from_offset, bytes);
    *now += kCopyNs;
    return checked;
  });
}

EXPORT void* clEnqueueMapBuffer(Queue queue_handle, Memory handle, Uint, Bitfield, size_t offset,
                                size_t bytes, Uint, const Event*, Event*, Result* result) {
  Call call("clEnqueueMapBuffer");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (queue != nullptr && call.result == kSuccess) call.result = Run(queue);  // all map and wait
  if (call.result == kSuccess &&
      (offset != 0 || bytes != buffer->size || buffer->view != nullptr)) {
    call.result = Fault(call.name, "mapped before, or in part", kInvalidValue);
  }
  *result = call.result;
  if (queue == nullptr || buffer == nullptr || call.result != kSuccess) return nullptr;
  if (TheWorld().settings.moves_views && buffer->last_view != nullptr) {
    void* next = nullptr;
    if (posix_memalign(&next, 64, bytes) != 0) abort();
    free(buffer->last_view);
    buffer->last_view = static_cast<unsigned char*>(next);
  } else if (buffer->last_view == nullptr) {
    void* next = nullptr;
    if (posix_memalign(&next, 64, bytes) != 0) abort();
    buffer->last_view = static_cast<unsigned char*>(next);
  }
  buffer->view = buffer->last_view;
  memcpy(buffer->view, buffer->data(), bytes);
  return buffer->view;
}

EXPORT Result clEnqueueUnmapMemObject(Queue queue_handle, Memory handle, void* view, Uint,
                                      const Event*, Event* event) {
  Call call("clEnqueueUnmapMemObject");
  FakeQueue* queue = call.Get<FakeQueue>(queue_handle, Object::kQueue);
  FakeBuffer* buffer = call.Get<FakeBuffer>(handle, Object::kBuffer);
  if (queue == nullptr || buffer == nullptr || call.result != kSuccess) return call.result;
  if (buffer->view != view) return Fault(call.name, "not mapped there", kInvalidValue);
  return Put(&call, queue, event, [buffer](uint64_t*) {
    memcpy(buffer->data(), buffer->view, buffer->size);
    memset(buffer->view, 0xEE, buffer->size);
    buffer->view = nullptr;
    return kSuccess;
  });
}

EXPORT Result clFlush(Queue handle) {
  Call call("clFlush");
  call.Get<FakeQueue>(handle, Object::kQueue);
  return call.result;
}

EXPORT Result clFinish(Queue handle) {
  Call call("clFinish");
  FakeQueue* queue = call.Get<FakeQueue>(handle, Object::kQueue);
  if (queue == nullptr) return call.result;
  Result result = Run(queue);
  return call.result == kSuccess ? result : call.result;
}

EXPORT Result clReleaseEvent(Event handle) {
  Call call("clReleaseEvent");
  FakeEvent* event = call.Get<FakeEvent>(handle, Object::kEvent);
  if (event != nullptr) Release(event);
  return call.result;
}

EXPORT Result clGetEventProfilingInfo(Event handle, Uint what, size_t room, void* value,
                                      size_t* size) {
  Call call("clGetEventProfilingInfo");
  FakeEvent* event = call.Get<FakeEvent>(handle, Object::kEvent);
  if (event == nullptr || call.result != kSuccess) return call.result;
  if (!event->is_done) return Fault(call.name, "a command that is not done", -7);
  return GiveNumber(what == kProfilingStart ? event->start : event->end, room, value, size);
}
