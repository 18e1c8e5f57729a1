#include "opencl_driver.h"

#include <stdio.h>
#include <string.h>

#include "driver_library.h"

namespace edgert {
namespace opencl {
namespace {

#if defined(_WIN32)
constexpr const char* kLibraries[] = {"OpenCL.dll"};
constexpr const char* kAdvice = "install the GPU's driver";
#elif defined(__ANDROID__)
#if defined(__LP64__)
#define EDGERT_LIB "lib64"
#else
#define EDGERT_LIB "lib"
#endif
// The name for apps, which get what the vendor made public; then where vendors have it, for
// programs of the shell; then Google's own phones and cars, whose library has other entry points;
// then drivers that have OpenCL and OpenGL ES in one file (Arm, Imagination).
constexpr const char* kLibraries[] = {
    "libOpenCL.so",
    "/vendor/" EDGERT_LIB "/libOpenCL.so",
    "/system/vendor/" EDGERT_LIB "/libOpenCL.so",
    "/system/" EDGERT_LIB "/libOpenCL.so",
    "libOpenCL-pixel.so",
    "libOpenCL-car.so",
    "/vendor/" EDGERT_LIB "/egl/libGLES_mali.so",
    "/system/vendor/" EDGERT_LIB "/egl/libGLES_mali.so",
    "/vendor/" EDGERT_LIB "/libPVROCL.so",
};
constexpr const char* kAdvice =
    "an app for Android 12 or later must say in its manifest, within <application>: "
    "<uses-native-library android:name=\"libOpenCL.so\" android:required=\"false\"/>";
#elif defined(__APPLE__)
constexpr const char* kLibraries[] = {"/System/Library/Frameworks/OpenCL.framework/OpenCL"};
constexpr const char* kAdvice = "this system has no OpenCL";
#else
// The loader that distributions have, then drivers of boards that stand alone: Arm's Mali blob
// (Rockchip, Amlogic), Imagination's, Vivante's (i.MX), Qualcomm's.
constexpr const char* kLibraries[] = {
    "libOpenCL.so.1", "libOpenCL.so",        "libmali.so.1",          "libmali.so",
    "libPVROCL.so.1", "libVivanteOpenCL.so", "libOpenCL_adreno.so.1",
};
constexpr const char* kAdvice =
    "install the GPU's driver and the loader (on Debian ocl-icd-libopencl1)";
#endif

// Google's library for its phones exports OpenCL through a function of its own (as TensorFlow
// Lite's GPU delegate uses it, opencl_wrapper.cc).
using FindPointer = void* (*)(const char*);

FindPointer EnablePixel(void* library) {
  void* enable = FindSymbol(library, "enableOpenCL");
  void* find = FindSymbol(library, "loadOpenCLPointer");
  if (enable == nullptr || find == nullptr) return nullptr;
  void (*call)();
  FindPointer result;
  memcpy(&call, &enable, sizeof(call));
  memcpy(&result, &find, sizeof(result));
  call();
  return result;
}

// Fills the table; returns the name of what lacks, or nullptr.
const char* FillTable(void* library, Driver* driver) {
  FindPointer pixel = EnablePixel(library);
  auto find = [&](const char* name) {
    return pixel != nullptr ? pixel(name) : FindSymbol(library, name);
  };
  void* address;
#define EDGERT_OPENCL_NEEDED(result, member, parameters) \
  address = find("cl" #member);                          \
  if (address == nullptr) return "cl" #member;           \
  memcpy(&driver->member, &address, sizeof(address));
  EDGERT_OPENCL_FUNCTIONS(EDGERT_OPENCL_NEEDED)
#undef EDGERT_OPENCL_NEEDED
  return nullptr;
}

// Whether the library knows a driver.
bool Accept(void* library, void* result, char* why_not, size_t bytes) {
  Driver* driver = static_cast<Driver*>(result);
  const char* missing = FillTable(library, driver);
  if (missing != nullptr) {
    snprintf(why_not, bytes, " (has no %s)", missing);
    CloseLibrary(library);
    return false;
  }
  Uint count = 0;
  Result found = driver->GetPlatformIDs(0, nullptr, &count);
  if (found == kSuccess && count > 0) return true;
  // It stays loaded: it may have started threads.
  if (found == kSuccess || found == kPlatformNotFound) {
    snprintf(why_not, bytes, " (knows no driver: is one listed in /etc/OpenCL/vendors?)");
  } else {
    char reason[64];
    Describe(found, reason, sizeof(reason));
    snprintf(why_not, bytes, " (%s)", reason);
  }
  return false;
}

}  // namespace

bool LoadDriver(Driver* driver, char* error, size_t error_bytes) {
  LibrarySearch search{"EDGESDK_OPENCL_LIBRARY", kLibraries,
                       sizeof(kLibraries) / sizeof(kLibraries[0])};
  char tried[900];
  if (FindLibrary(search, Accept, driver, tried, sizeof(tried))) return true;
  snprintf(error, error_bytes,
           "no OpenCL: cannot use %s; %s, or set EDGESDK_OPENCL_LIBRARY to its library", tried,
           kAdvice);
  return false;
}

void Describe(Result result, char* text, size_t bytes) {
  struct Name {
    Result result;
    const char* meaning;
  };
  // The names of the specification, in words.
  constexpr Name kNames[] = {
      {-1, "device not found"},
      {-2, "device not available"},
      {-3, "compiler not available"},
      {-4, "memory object allocation failure"},
      {-5, "out of resources"},
      {-6, "out of host memory"},
      {-7, "profiling information not available"},
      {-8, "memory copy overlap"},
      {-11, "build program failure"},
      {-12, "map failure"},
      {-13, "misaligned sub-buffer offset"},
      {-14, "execution status error for events in wait list"},
      {-30, "invalid value"},
      {-33, "invalid device"},
      {-34, "invalid context"},
      {-36, "invalid command queue"},
      {-38, "invalid memory object"},
      {-42, "invalid binary"},
      {-43, "invalid build options"},
      {-44, "invalid program"},
      {-45, "invalid program executable"},
      {-46, "invalid kernel name"},
      {-47, "invalid kernel definition"},
      {-48, "invalid kernel"},
      {-49, "invalid argument index"},
      {-50, "invalid argument value"},
      {-51, "invalid argument size"},
      {-52, "invalid kernel arguments"},
      {-54, "invalid work group size"},
      {-55, "invalid work item size"},
      {-59, "invalid operation"},
      {-61, "invalid buffer size"},
      {-63, "invalid global work size"},
      {-1001, "no driver is installed"},
  };
  for (const Name& name : kNames) {
    if (name.result == result) {
      snprintf(text, bytes, "%s (OpenCL error %d)", name.meaning, result);
      return;
    }
  }
  snprintf(text, bytes, "OpenCL error %d", result);
}

bool IsOutOfMemory(Result result) {
  return result == kMemObjectAllocationFailure || result == kOutOfHostMemory ||
         result == kInvalidBufferSize;
}

}  // namespace opencl
}  // namespace edgert
