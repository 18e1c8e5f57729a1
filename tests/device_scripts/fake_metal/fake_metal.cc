#include "fake_metal.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Method = void (*)();
using Uint = size_t;

struct Size {
  Uint width, height, depth;
};

struct ClassObject;

struct Object {
  ClassObject* isa = nullptr;
  int references = 1;
  virtual ~Object() = default;
};

// A class is an object whose class is itself: its methods are found among its objects'.
struct ClassObject : Object {
  std::string name;
  std::map<std::string, Method> methods;
};

struct String : Object {
  std::string text;
};

struct Array : Object {
  std::vector<Object*> items;
  ~Array() override;
};

struct Device : Object {};

struct Options : Object {
  bool fast_math = true;
  Uint version = 0;
};

struct Queue : Object {
  Device* device;
  ~Queue() override;
};

struct Buffer : Object {
  Device* device;
  unsigned char* memory = nullptr;
  Uint bytes;
  bool is_private;
  ~Buffer() override;
};

struct Library : Object {
  std::string source;
  void* handle = nullptr;  // of FAKE_METAL_COMPILER's library
};

struct Function : Object {
  FakeMetalKernel known;
  // Of FAKE_METAL_COMPILER's library: the kernel with its grid, block and arguments.
  void (*compiled)(const Uint*, const Uint*, void* const*) = nullptr;
};

struct Pipeline : Object {
  FakeMetalKernel known;
  void (*compiled)(const Uint*, const Uint*, void* const*) = nullptr;
};

using Work = std::function<const char*(uint64_t* now)>;

struct Commands : Object {
  std::vector<Work> work;
  std::vector<Object*> held;
  bool is_encoding = false;
  bool is_committed = false;
  bool is_done = false;
  std::string failure;
  uint64_t start = 0;
  uint64_t end = 0;
  ~Commands() override;
};

struct Encoder : Object {
  Commands* commands;
  Pipeline* pipeline = nullptr;
  std::map<Uint, std::pair<Buffer*, Uint>> arguments;
  bool is_ended = false;
  ~Encoder() override;
};

struct World {
  std::recursive_mutex mutex;
  FakeMetalSettings settings{true, true, uint64_t{1} << 28, uint64_t{1} << 30};
  std::map<std::string, FakeMetalKernel> known;
  std::map<std::string, int> failures;
  std::map<std::string, int> calls;
  std::string faults;
  std::set<Object*> live;
  std::map<std::string, ClassObject*> classes;
  std::set<std::string> selectors;
  Device* device = nullptr;
  uint64_t now = 0;
  bool fast_math = true;
  Uint version = 0;
};

World& TheWorld() {
  static World* world = new World;
  return *world;
}

// The autoreleased objects of this thread, and where its pools begin.
thread_local std::vector<Object*> autoreleased;
thread_local std::vector<size_t> pools;

void Fault(const std::string& what) { TheWorld().faults += what + "\n"; }

// What every call begins with: counts it, and says whether it is to fail.
struct Call {
  std::lock_guard<std::recursive_mutex> lock;
  bool fails = false;

  explicit Call(const char* name) : lock(TheWorld().mutex) {
    World& world = TheWorld();
    ++world.calls[name];
    auto failure = world.failures.find(name);
    if (failure == world.failures.end() || --failure->second != 0) return;
    fails = true;
    world.failures.erase(failure);
  }
};

ClassObject* ClassNamed(const char* name) {
  World& world = TheWorld();
  ClassObject*& found = world.classes[name];
  if (found == nullptr) {
    found = new ClassObject;
    found->isa = found;
    found->name = name;
  }
  return found;
}

template <typename T>
T* New(const char* class_name) {
  T* object = new T;
  object->isa = ClassNamed(class_name);
  TheWorld().live.insert(object);
  return object;
}

bool IsLive(Object* object) {
  if (TheWorld().live.count(object) != 0) return true;
  for (const auto& [name, known] : TheWorld().classes) {
    if (known == object) return true;
  }
  return false;
}

Object* Retain(Object* object) {
  if (object == nullptr) return nullptr;
  if (!IsLive(object)) {
    Fault("retain: a released object");
  } else {
    ++object->references;
  }
  return object;
}

void Release(Object* object) {
  if (object == nullptr) return;
  if (!IsLive(object)) return Fault("release: a released object");
  if (--object->references > 0) return;
  TheWorld().live.erase(object);
  if (object == TheWorld().device) TheWorld().device = nullptr;
  delete object;
}

template <typename T>
T* Autorelease(T* object) {
  if (pools.empty()) Fault(object->isa->name + ": autoreleased without a pool");
  autoreleased.push_back(object);
  return object;
}

Array::~Array() {
  for (Object* item : items) Release(item);
}

Queue::~Queue() { Release(device); }
Buffer::~Buffer() {
  free(memory);
  Release(device);
}

Commands::~Commands() {
  if (is_committed && !is_done) Fault("a command buffer is released while it runs");
  for (Object* object : held) Release(object);
}

Encoder::~Encoder() {
  if (!is_ended) Fault("an encoder is released without endEncoding");
  Release(commands);
}

String* NewString(const std::string& text) {
  String* string = New<String>("NSString");
  string->text = text;
  return string;
}

String* NewError(const std::string& text) {
  String* error = New<String>("NSError");
  error->text = text;
  return error;
}

Device* TheDevice() {
  World& world = TheWorld();
  if (world.device != nullptr) {
    Retain(world.device);
  } else {
    world.device = New<Device>("MTLDevice");
  }
  return world.device;
}

Buffer* NewBuffer(Device* device, Uint bytes, bool is_private) {
  Buffer* buffer = New<Buffer>("MTLBuffer");
  Retain(device);
  buffer->device = device;
  buffer->bytes = bytes;
  buffer->is_private = is_private;
  // Whole pages in Metal; here no more than was asked for, so that sanitizers see what goes beyond.
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) abort();
  buffer->memory = static_cast<unsigned char*>(memory);
  memset(memory, 0xEE, bytes);
  return buffer;
}

// The methods. Each takes the object, the selector, and what Apple's takes.

const char* Utf8(String* self, void*) { return self->text.c_str(); }

String* StringWithUtf8(Object*, void*, const char* text) {
  Call call("stringWithUTF8String:");
  return call.fails ? nullptr : Autorelease(NewString(text));
}

String* Description(String* self, void*) {
  Call call("localizedDescription");
  return Autorelease(NewString(self->text));
}

Uint Count(Array* self, void*) { return self->items.size(); }
Object* ObjectAt(Array* self, void*, Uint index) { return self->items.at(index); }

String* DeviceName(Device*, void*) {
  Call call("name");
  return Autorelease(NewString("Paper M1"));
}
Uint MaxBufferLength(Device*, void*) { return TheWorld().settings.max_buffer; }
uint64_t WorkingSetSize(Device*, void*) { return TheWorld().settings.memory_bytes; }

Options* NewOptions(Object*, void*) {
  Call call("new");
  return call.fails ? nullptr : New<Options>("MTLCompileOptions");
}
void SetFastMath(Options* self, void*, bool value) { self->fast_math = value; }
void SetVersion(Options* self, void*, Uint value) { self->version = value; }

// Builds the source with FAKE_METAL_COMPILER. Returns the library's handle, or nullptr.
void* CompileOnHost(const char* compiler, const std::string& source, std::string* failure) {
  char folder[] = "/tmp/fake-metal-XXXXXX";
  if (mkdtemp(folder) == nullptr) abort();
  std::string base = folder;
  std::ofstream(base + "/code.metal") << source;
  std::string command = std::string(compiler) + " " + base + "/code.metal " + base + "/code.so";
  void* handle = nullptr;
  if (system(command.c_str()) == 0) {
    handle = dlopen((base + "/code.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) *failure = dlerror();
  } else {
    *failure = "error: " + command;
  }
  unlink((base + "/code.metal").c_str());
  unlink((base + "/code.so").c_str());
  rmdir(folder);
  return handle;
}

Library* NewLibrary(Device*, void*, String* source, Options* options, Object** error) {
  Call call("newLibraryWithSource:options:error:");
  TheWorld().fast_math = options->fast_math;
  TheWorld().version = options->version;
  std::string failure;
  if (call.fails) failure = "program_source:1:1: error: no";
  void* handle = nullptr;
  size_t at = source->text.find("#error");
  if (at != std::string::npos) {
    size_t line = 1;
    for (size_t i = 0; i < at; ++i) line += source->text[i] == '\n';
    failure = "program_source:1:1: warning: all is well\nprogram_source:" + std::to_string(line) +
              ":3: error: a register that paper has not\n#error\n";
  } else if (const char* compiler = getenv("FAKE_METAL_COMPILER")) {
    handle = CompileOnHost(compiler, source->text, &failure);
  }
  if (!failure.empty()) {
    *error = Autorelease(NewError(failure));
    return nullptr;
  }
  Library* library = New<Library>("MTLLibrary");
  library->source = source->text;
  library->handle = handle;
  return library;
}

Function* NewFunction(Library* self, void*, String* name) {
  Call call("newFunctionWithName:");
  if (call.fails) return nullptr;
  if (self->source.find("kernel void " + name->text + "(") == std::string::npos) return nullptr;
  auto known = TheWorld().known.find(name->text);
  Function* function = New<Function>("MTLFunction");
  if (self->handle != nullptr) {
    void* address = dlsym(self->handle, ("run_" + name->text).c_str());
    if (address == nullptr) abort();
    memcpy(&function->compiled, &address, sizeof(address));
    function->known = {"compiled", nullptr, 0, 1, 1024};
  } else if (known != TheWorld().known.end()) {
    function->known = known->second;
  } else {
    abort();
  }
  return function;
}

Pipeline* NewPipeline(Device*, void*, Function* function, Object** error) {
  Call call("newComputePipelineStateWithFunction:error:");
  if (call.fails) {
    *error = Autorelease(NewError("Compiler encountered an internal error"));
    return nullptr;
  }
  Pipeline* pipeline = New<Pipeline>("MTLComputePipelineState");
  pipeline->known = function->known;
  pipeline->compiled = function->compiled;
  return pipeline;
}

Uint MaxThreads(Pipeline* self, void*) { return self->known.max_threads; }

Buffer* NewBufferWithLength(Device* self, void*, Uint length, Uint options) {
  Call call("newBufferWithLength:options:");
  if (length == 0 || options != 0) Fault("newBufferWithLength: a size or an option");
  return call.fails ? nullptr : NewBuffer(self, length, false);
}

Buffer* NewBufferWithBytes(Device* self, void*, const void* bytes, Uint length, Uint options) {
  Call call("newBufferWithBytes:length:options:");
  if (length == 0 || options != 0) Fault("newBufferWithBytes: a size or an option");
  if (call.fails) return nullptr;
  Buffer* buffer = NewBuffer(self, length, false);
  memcpy(buffer->memory, bytes, length);
  return buffer;
}

void* Contents(Buffer* self, void*) { return self->is_private ? nullptr : self->memory; }
Uint Length(Buffer* self, void*) { return self->bytes; }
Device* DeviceOfBuffer(Buffer* self, void*) { return self->device; }

Queue* NewQueue(Device* self, void*) {
  Call call("newCommandQueue");
  if (call.fails) return nullptr;
  Queue* queue = New<Queue>("MTLCommandQueue");
  Retain(self);
  queue->device = self;
  return queue;
}
Device* DeviceOfQueue(Queue* self, void*) { return self->device; }

Commands* NewCommands(Queue*, void*) {
  Call call("commandBuffer");
  return call.fails ? nullptr : Autorelease(New<Commands>("MTLCommandBuffer"));
}

Encoder* NewEncoder(Commands* self, void*) {
  Call call("computeCommandEncoder");
  if (call.fails) return nullptr;
  if (self->is_encoding || self->is_committed) Fault("computeCommandEncoder: too many or too late");
  self->is_encoding = true;
  Encoder* encoder = New<Encoder>("MTLComputeCommandEncoder");
  Retain(self);
  encoder->commands = self;
  return Autorelease(encoder);
}

void SetPipeline(Encoder* self, void*, Pipeline* pipeline) {
  Call call("setComputePipelineState:");
  if (!IsLive(pipeline)) return Fault("setComputePipelineState: no pipeline");
  self->pipeline = pipeline;
  self->commands->held.push_back(Retain(pipeline));
}

void SetBuffer(Encoder* self, void*, Buffer* buffer, Uint offset, Uint index) {
  Call call("setBuffer:offset:atIndex:");
  if (!IsLive(buffer) || index > 30 || offset >= buffer->bytes || offset % 16 != 0) {
    return Fault("setBuffer: a buffer, an offset or an index");
  }
  self->arguments[index] = {buffer, offset};
  self->commands->held.push_back(Retain(buffer));
}

void Dispatch(Encoder* self, void*, Size grid, Size block) {
  Call call("dispatchThreadgroups:threadsPerThreadgroup:");
  Pipeline* pipeline = self->pipeline;
  if (self->is_ended || pipeline == nullptr) return Fault("dispatch: ended, or without a pipeline");
  FakeMetalLaunch launch = {{grid.width, grid.height, grid.depth},
                            {block.width, block.height, block.depth}};
  if (grid.width * grid.height * grid.depth == 0 ||
      block.width * block.height * block.depth > pipeline->known.max_threads) {
    Fault("dispatch: a size that is refused");
  }
  for (const auto& [index, argument] : self->arguments) {
    launch.arguments[index] = argument.first->memory + argument.second;
    launch.bytes[index] = argument.first->bytes - argument.second;
    launch.num_arguments = index + 1;
  }
  if (pipeline->compiled == nullptr) {
    for (Uint i = 0; i < pipeline->known.num_arguments; ++i) {
      if (self->arguments.count(i) == 0) Fault("dispatch: an argument is missing");
    }
  }
  self->commands->work.push_back([pipeline, launch](uint64_t* now) -> const char* {
    *now += pipeline->known.duration_ns;
    if (pipeline->compiled == nullptr) return pipeline->known.function(launch);
    pipeline->compiled(launch.grid, launch.block, launch.arguments);
    return nullptr;
  });
}

void EndEncoding(Encoder* self, void*) {
  Call call("endEncoding");
  if (self->is_ended) Fault("endEncoding: twice");
  self->is_ended = true;
  self->commands->is_encoding = false;
}

void Commit(Commands* self, void*) {
  Call call("commit");
  if (self->is_encoding || self->is_committed) Fault("commit: while it is encoded, or twice");
  self->is_committed = true;
}

void WaitUntilCompleted(Commands* self, void*) {
  Call call("waitUntilCompleted");
  if (!self->is_committed) return Fault("waitUntilCompleted: not committed");
  if (self->is_done) return;
  uint64_t& now = TheWorld().now;
  self->start = now;
  if (call.fails) self->failure = "Caused GPU Hang Error";
  for (Work& work : self->work) {
    if (!self->failure.empty()) break;
    if (const char* failure = work(&now)) self->failure = failure;
  }
  self->end = now;
  self->is_done = true;
}

void CheckDone(Commands* self) {
  if (!self->is_done) Fault("a command buffer is asked before it is done");
}

Uint Status(Commands* self, void*) {
  CheckDone(self);
  return self->failure.empty() ? 4 : 5;
}
String* Error(Commands* self, void*) {
  CheckDone(self);
  return Autorelease(NewError(self->failure));
}
double StartTime(Commands* self, void*) {
  CheckDone(self);
  return static_cast<double>(self->start) * 1e-9;
}
double EndTime(Commands* self, void*) {
  CheckDone(self);
  return static_cast<double>(self->end) * 1e-9;
}

bool Responds(Object* self, void*, void* selector) {
  return self->isa->methods.count(static_cast<const std::string*>(selector)->c_str()) != 0;
}

void Unknown(Object* self, void* selector) {
  Fault(self->isa->name + " has no " + *static_cast<const std::string*>(selector));
  abort();  // as Objective-C does
}

template <typename F>
void Add(const char* class_name, const char* selector, F* function) {
  ClassNamed(class_name)->methods[selector] = reinterpret_cast<Method>(function);
}

void MakeClasses() {
  if (!TheWorld().classes.empty()) return;
  Add("NSString", "UTF8String", Utf8);
  Add("NSString", "stringWithUTF8String:", StringWithUtf8);
  Add("NSError", "localizedDescription", Description);
  Add("NSArray", "count", Count);
  Add("NSArray", "objectAtIndex:", ObjectAt);
  Add("MTLDevice", "name", DeviceName);
  Add("MTLDevice", "maxBufferLength", MaxBufferLength);
  Add("MTLDevice", "recommendedMaxWorkingSetSize", WorkingSetSize);
  Add("MTLDevice", "newLibraryWithSource:options:error:", NewLibrary);
  Add("MTLDevice", "newComputePipelineStateWithFunction:error:", NewPipeline);
  Add("MTLDevice", "newBufferWithLength:options:", NewBufferWithLength);
  Add("MTLDevice", "newBufferWithBytes:length:options:", NewBufferWithBytes);
  Add("MTLDevice", "newCommandQueue", NewQueue);
  Add("MTLCompileOptions", "new", NewOptions);
  Add("MTLCompileOptions", "setFastMathEnabled:", SetFastMath);
  Add("MTLCompileOptions", "setLanguageVersion:", SetVersion);
  Add("MTLLibrary", "newFunctionWithName:", NewFunction);
  Add("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup", MaxThreads);
  Add("MTLBuffer", "contents", Contents);
  Add("MTLBuffer", "length", Length);
  Add("MTLBuffer", "device", DeviceOfBuffer);
  Add("MTLCommandQueue", "commandBuffer", NewCommands);
  Add("MTLCommandQueue", "device", DeviceOfQueue);
  Add("MTLCommandBuffer", "computeCommandEncoder", NewEncoder);
  Add("MTLCommandBuffer", "commit", Commit);
  Add("MTLCommandBuffer", "waitUntilCompleted", WaitUntilCompleted);
  Add("MTLCommandBuffer", "status", Status);
  Add("MTLCommandBuffer", "error", Error);
  Add("MTLCommandBuffer", "GPUStartTime", StartTime);
  Add("MTLCommandBuffer", "GPUEndTime", EndTime);
  Add("MTLComputeCommandEncoder", "setComputePipelineState:", SetPipeline);
  Add("MTLComputeCommandEncoder", "setBuffer:offset:atIndex:", SetBuffer);
  Add("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", Dispatch);
  Add("MTLComputeCommandEncoder", "endEncoding", EndEncoding);
  for (auto& [name, known] : TheWorld().classes) {
    known->methods["respondsToSelector:"] = reinterpret_cast<Method>(Responds);
  }
}

}  // namespace

EXPORT void fake_metal_reset() {
  World& world = TheWorld();
  std::lock_guard<std::recursive_mutex> lock(world.mutex);
  world.settings = World().settings;
  world.known.clear();
  world.failures.clear();
  world.calls.clear();
  world.faults.clear();
}

EXPORT FakeMetalSettings* fake_metal_settings() { return &TheWorld().settings; }
EXPORT void fake_metal_register(const FakeMetalKernel& kernel) {
  TheWorld().known[kernel.name] = kernel;
}
EXPORT void fake_metal_fail(const char* method, int nth) { TheWorld().failures[method] = nth; }
EXPORT int fake_metal_calls(const char* method) { return TheWorld().calls[method]; }
EXPORT int fake_metal_live() { return static_cast<int>(TheWorld().live.size()); }
EXPORT const char* fake_metal_faults() { return TheWorld().faults.c_str(); }
EXPORT bool fake_metal_fast_math() { return TheWorld().fast_math; }
EXPORT size_t fake_metal_language_version() { return TheWorld().version; }

EXPORT void* fake_metal_new_queue() {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  MakeClasses();
  Device* device = TheDevice();
  Queue* queue = NewQueue(device, nullptr);
  Release(device);
  return queue;
}

EXPORT void* fake_metal_new_buffer(size_t bytes, bool is_private) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  return NewBuffer(TheWorld().device, bytes, is_private);
}

EXPORT void* fake_metal_contents(void* buffer) { return static_cast<Buffer*>(buffer)->memory; }

EXPORT void fake_metal_release(void* object) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  Release(static_cast<Object*>(object));
}

EXPORT void* objc_getClass(const char* name) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  MakeClasses();
  return ClassNamed(name);
}

EXPORT void* object_getClass(void* object) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  if (!IsLive(static_cast<Object*>(object))) {
    Fault("a message to a released object");
    abort();
  }
  return static_cast<Object*>(object)->isa;
}

EXPORT Method class_getMethodImplementation(void* of, void* selector) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  const auto& methods = static_cast<ClassObject*>(of)->methods;
  auto found = methods.find(*static_cast<const std::string*>(selector));
  return found != methods.end() ? found->second : reinterpret_cast<Method>(Unknown);
}

EXPORT const void* sel_registerName(const char* name) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  return &*TheWorld().selectors.insert(name).first;
}

EXPORT void* objc_retain(void* object) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  return Retain(static_cast<Object*>(object));
}

EXPORT void objc_release(void* object) { fake_metal_release(object); }

EXPORT void* objc_autoreleasePoolPush() {
  pools.push_back(autoreleased.size());
  return reinterpret_cast<void*>(pools.size());
}

EXPORT void objc_autoreleasePoolPop(void* pool) {
  std::lock_guard<std::recursive_mutex> lock(TheWorld().mutex);
  if (reinterpret_cast<size_t>(pool) != pools.size()) Fault("pools are popped out of order");
  while (autoreleased.size() > pools.back()) {
    Object* object = autoreleased.back();
    autoreleased.pop_back();
    Release(object);
  }
  pools.pop_back();
}

EXPORT void* MTLCreateSystemDefaultDevice() {
  Call call("MTLCreateSystemDefaultDevice");
  MakeClasses();
  return call.fails || !TheWorld().settings.has_default_device ? nullptr : TheDevice();
}

EXPORT void* MTLCopyAllDevices() {
  Call call("MTLCopyAllDevices");
  MakeClasses();
  Array* array = New<Array>("NSArray");
  if (!call.fails && TheWorld().settings.has_any_device) array->items.push_back(TheDevice());
  return array;
}
