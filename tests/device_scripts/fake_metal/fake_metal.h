// fake_metal.h: a stand-in for Apple's Metal and the Objective-C runtime, for other systems.
//
// libfake_metal.so exports the functions that edgert uses, and has classes and methods enough for
// what edgert calls; each method is a C function with the types that Apple's has. Work of a command
// buffer happens when somebody waits for it, so that a forgotten wait gives wrong values. Kernels
// are functions of the test, registered by name; a library's source names them as Metal's language
// does ("kernel void NAME("). Time is counted, not measured.
//
// What a program may not do (methods that a class has not, released objects, objects that nobody
// owns outside of an autorelease pool, an encoder that was not ended, arguments that are missing)
// is noted as a fault.
//
// With FAKE_METAL_COMPILER in the environment, a command that makes a shared library of source
// text ("COMMAND SOURCE LIBRARY"), kernels are what that library has (metal_on_host.h).
#ifndef EDGESDK_TESTS_FAKE_METAL_H_
#define EDGESDK_TESTS_FAKE_METAL_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

struct FakeMetalLaunch {
  size_t grid[3];
  size_t block[3];
  void* arguments[31];
  size_t bytes[31];  // from there to the buffer's end
  size_t num_arguments;
};

// Returns nullptr, or the reason that the command buffer fails with.
using FakeMetalFunction = const char* (*)(const FakeMetalLaunch& launch);

struct FakeMetalKernel {
  const char* name;
  FakeMetalFunction function;
  uint32_t num_arguments;
  uint64_t duration_ns;
  size_t max_threads;  // with the kernel's registers
};

struct FakeMetalSettings {
  bool has_default_device;  // MTLCreateSystemDefaultDevice finds one
  bool has_any_device;      // MTLCopyAllDevices does
  uint64_t max_buffer;
  uint64_t memory_bytes;
};

// Back to the first state: default settings, no kernels, no failures, no notes.
void fake_metal_reset();
FakeMetalSettings* fake_metal_settings();
void fake_metal_register(const FakeMetalKernel& kernel);

// Lets the `nth` call (from 1) of a method ("newCommandQueue") or function from now on return
// nothing; "waitUntilCompleted" leaves a command buffer that has failed.
void fake_metal_fail(const char* method, int nth);

// Calls of a method or function since the last reset.
int fake_metal_calls(const char* method);

// Objects that are alive.
int fake_metal_live();

// What was done wrong since the last reset, one line each.
const char* fake_metal_faults();

// The options that the last library was compiled with.
bool fake_metal_fast_math();
size_t fake_metal_language_version();

// What a program makes for itself; the caller owns it.
void* fake_metal_new_queue();
void* fake_metal_new_buffer(size_t bytes, bool is_private);
void* fake_metal_contents(void* buffer);
void fake_metal_release(void* object);

}  // extern "C"

#endif  // EDGESDK_TESTS_FAKE_METAL_H_
