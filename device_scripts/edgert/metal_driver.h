// metal_driver.h: what edgert uses of Apple's Metal, found when it is needed.
//
// Metal speaks Objective-C, whose runtime is a C library: methods are C functions that take the
// object and the selector first. So no header of Apple's and no SDK is needed to build, and no
// framework to link. Selectors, numbers and structures are those of Apple's documentation of Metal
// (https://developer.apple.com/documentation/metal), as of macOS 11 and iOS 13; functions are those
// of the Objective-C runtime and of ARC's support in it (LLVM's "Objective-C Automatic Reference
// Counting", "Runtime support").
#ifndef EDGERT_METAL_DRIVER_H_
#define EDGERT_METAL_DRIVER_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace edgert {
namespace metal {

using Object = struct objc_object*;
using Class = struct objc_class*;
using Selector = struct objc_selector*;
using Method = void (*)();  // whatever it takes
using Uint = size_t;        // NSUInteger

// MTLSize
struct Size {
  Uint width;
  Uint height;
  Uint depth;
};

constexpr Uint kStorageModeShared = 0;               // MTLResourceStorageModeShared
constexpr Uint kLanguageVersion2_2 = (2 << 16) + 2;  // MTLLanguageVersion2_2: macOS 10.15, iOS 13
constexpr Uint kCommandBufferCompleted = 4;          // MTLCommandBufferStatusCompleted

// EDGERT_METAL_FUNCTIONS(NEEDED, OPTIONAL): each is (result, name, parameters). The optional one is
// on macOS only.
#define EDGERT_METAL_FUNCTIONS(NEEDED, OPTIONAL)                   \
  NEEDED(Class, objc_getClass, (const char*))                      \
  NEEDED(Class, object_getClass, (Object))                         \
  NEEDED(Method, class_getMethodImplementation, (Class, Selector)) \
  NEEDED(Selector, sel_registerName, (const char*))                \
  NEEDED(Object, objc_retain, (Object))                            \
  NEEDED(void, objc_release, (Object))                             \
  NEEDED(void*, objc_autoreleasePoolPush, ())                      \
  NEEDED(void, objc_autoreleasePoolPop, (void*))                   \
  NEEDED(Object, MTLCreateSystemDefaultDevice, ())                 \
  OPTIONAL(Object, MTLCopyAllDevices, ())

// F(member, selector)
#define EDGERT_METAL_SELECTORS(F)                               \
  F(new_object, "new")                                          \
  F(responds, "respondsToSelector:")                            \
  F(count, "count")                                             \
  F(object_at, "objectAtIndex:")                                \
  F(string_with_utf8, "stringWithUTF8String:")                  \
  F(utf8, "UTF8String")                                         \
  F(description, "localizedDescription")                        \
  F(name, "name")                                               \
  F(max_buffer_length, "maxBufferLength")                       \
  F(working_set_size, "recommendedMaxWorkingSetSize")           \
  F(set_fast_math, "setFastMathEnabled:")                       \
  F(set_language_version, "setLanguageVersion:")                \
  F(new_library, "newLibraryWithSource:options:error:")         \
  F(new_function, "newFunctionWithName:")                       \
  F(new_pipeline, "newComputePipelineStateWithFunction:error:") \
  F(max_threads, "maxTotalThreadsPerThreadgroup")               \
  F(new_buffer, "newBufferWithLength:options:")                 \
  F(new_buffer_with, "newBufferWithBytes:length:options:")      \
  F(contents, "contents")                                       \
  F(length, "length")                                           \
  F(device, "device")                                           \
  F(new_queue, "newCommandQueue")                               \
  F(command_buffer, "commandBuffer")                            \
  F(encoder, "computeCommandEncoder")                           \
  F(set_pipeline, "setComputePipelineState:")                   \
  F(set_buffer, "setBuffer:offset:atIndex:")                    \
  F(dispatch, "dispatchThreadgroups:threadsPerThreadgroup:")    \
  F(end_encoding, "endEncoding")                                \
  F(commit, "commit")                                           \
  F(wait, "waitUntilCompleted")                                 \
  F(status, "status")                                           \
  F(error, "error")                                             \
  F(start_time, "GPUStartTime")                                 \
  F(end_time, "GPUEndTime")

struct Driver {
#define EDGERT_METAL_MEMBER(result, name, parameters) result(*name) parameters;
  EDGERT_METAL_FUNCTIONS(EDGERT_METAL_MEMBER, EDGERT_METAL_MEMBER)
#undef EDGERT_METAL_MEMBER
#define EDGERT_METAL_MEMBER(member, selector) Selector member;
  struct {
    EDGERT_METAL_SELECTORS(EDGERT_METAL_MEMBER)
  } selectors;
#undef EDGERT_METAL_MEMBER

  // Calls a method. All arguments must have the types that the method has: nothing converts them.
  template <typename Result, typename... Arguments>
  Result Send(Object object, Selector selector, Arguments... arguments) const {
    Method method = class_getMethodImplementation(object_getClass(object), selector);
    Result (*call)(Object, Selector, Arguments...);
    memcpy(&call, &method, sizeof(call));
    return call(object, selector, arguments...);
  }

  bool Responds(Object object, Selector selector) const {
    return Send<bool>(object, selectors.responds, selector);
  }

  // The text of an NSString, valid as long as the autorelease pool; nullptr gives "".
  const char* Text(Object string) const;
};

// What methods return without the caller owning it is released at the end of this.
class AutoreleasePool {
 public:
  explicit AutoreleasePool(const Driver& driver)
      : driver_(driver), pool_(driver.objc_autoreleasePoolPush()) {}
  ~AutoreleasePool() { driver_.objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  const Driver& driver_;
  void* pool_;
};

// Fills `driver` from the library that EDGESDK_METAL_LIBRARY names, or else from the system's
// framework. It stays loaded. Returns false with a reason.
bool LoadDriver(Driver* driver, char* error, size_t error_bytes);

}  // namespace metal
}  // namespace edgert

#endif  // EDGERT_METAL_DRIVER_H_
