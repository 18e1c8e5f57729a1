#include "cuda_driver.h"

#include <stdio.h>
#include <string.h>

#include "driver_library.h"

namespace edgert {
namespace cuda {
namespace {

// The loader's folders first; JetPack 4 and 5, Debian, and WSL keep it in folders that a system
// made by hand may have left out of /etc/ld.so.conf.
constexpr const char* kLibraries[] = {
#if defined(_WIN32)
    "nvcuda.dll",
#else
    "libcuda.so.1",
#if defined(__aarch64__)
    "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1",
#elif defined(__x86_64__)
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
#endif
#endif
};

// Fills the table; returns the name of what lacks, or nullptr.
const char* FillTable(void* library, Driver* driver) {
  void* address;
#define EDGERT_CUDA_NEEDED(member, name, parameters) \
  address = FindSymbol(library, name);               \
  if (address == nullptr) return name;               \
  memcpy(&driver->member, &address, sizeof(address));
#define EDGERT_CUDA_OPTIONAL(member, name, parameters) \
  address = FindSymbol(library, name);                 \
  memcpy(&driver->member, &address, sizeof(address));
  EDGERT_CUDA_FUNCTIONS(EDGERT_CUDA_NEEDED, EDGERT_CUDA_OPTIONAL)
#undef EDGERT_CUDA_NEEDED
#undef EDGERT_CUDA_OPTIONAL
  return nullptr;
}

bool Accept(void* library, void* driver, char* why_not, size_t bytes) {
  const char* missing = FillTable(library, static_cast<Driver*>(driver));
  if (missing == nullptr) return true;
  snprintf(why_not, bytes, " (has no %s: it is too old)", missing);
  CloseLibrary(library);
  return false;
}

}  // namespace

bool LoadDriver(Driver* driver, char* error, size_t error_bytes) {
  LibrarySearch search{"EDGESDK_CUDA_LIBRARY", kLibraries,
                       sizeof(kLibraries) / sizeof(kLibraries[0])};
  char tried[900];
  if (FindLibrary(search, Accept, driver, tried, sizeof(tried))) return true;
  snprintf(error, error_bytes,
           "no NVIDIA driver: cannot use %s; install the driver, or set EDGESDK_CUDA_LIBRARY to "
           "its library",
           tried);
  return false;
}

}  // namespace cuda
}  // namespace edgert
