#include "cuda_driver.h"

#include <stdio.h>
#include <string.h>

#include "platform.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace edgert {
namespace cuda {
namespace {

#if defined(_WIN32)

// From the system's folder only: a nvcuda.dll beside the program would be nobody's driver.
constexpr const char* kLibraries[] = {"nvcuda.dll"};

void* OpenLibrary(const char* path) {
  bool is_path = strpbrk(path, "/\\") != nullptr;
  return reinterpret_cast<void*>(
      LoadLibraryExA(path, nullptr, is_path ? 0 : LOAD_LIBRARY_SEARCH_SYSTEM32));
}

void WhyNot(const char*, char* text, size_t bytes) {
  unsigned long code = GetLastError();
  if (code != ERROR_MOD_NOT_FOUND) snprintf(text, bytes, " (Windows error %lu)", code);
}

void* FindSymbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

// The loader's folders first; JetPack 4 and 5, Debian, and WSL keep it in folders that a system
// made by hand may have left out of /etc/ld.so.conf.
constexpr const char* kLibraries[] = {
    "libcuda.so.1",
#if defined(__aarch64__)
    "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1",
#elif defined(__x86_64__)
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
#endif
};

void* OpenLibrary(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

// Why the file could not be loaded, where it is not just that there is none: its own libraries may
// be missing, or it may be for another machine.
void WhyNot(const char* path, char* text, size_t bytes) {
  const char* reason = dlerror();
  if (reason == nullptr || text[0] != '\0') return;
  bool is_absent =
      strncmp(reason, path, strlen(path)) == 0 && strstr(reason, "No such file") != nullptr;
  if (!is_absent) snprintf(text, bytes, " (%s)", reason);
}

void* FindSymbol(void* library, const char* name) { return dlsym(library, name); }

#endif

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

}  // namespace

bool LoadDriver(Driver* driver, char* error, size_t error_bytes) {
  char buffer[1024];
  const char* chosen = Environment("EDGESDK_CUDA_LIBRARY", buffer, sizeof(buffer));
  if (chosen != nullptr && chosen[0] == '\0') chosen = nullptr;
  const char* const* paths = chosen != nullptr ? &chosen : kLibraries;
  size_t num_paths = chosen != nullptr ? 1 : sizeof(kLibraries) / sizeof(kLibraries[0]);
  void* library = nullptr;
  char tried[512] = "";
  char why_not[256] = "";
  const char* path = nullptr;
  for (size_t i = 0; i < num_paths && library == nullptr; ++i) {
    path = paths[i];
    library = OpenLibrary(path);
    if (library == nullptr) WhyNot(path, why_not, sizeof(why_not));
    size_t used = strlen(tried);
    snprintf(tried + used, sizeof(tried) - used, "%s%s", used > 0 ? ", " : "", path);
  }
  if (library == nullptr) {
    snprintf(error, error_bytes,
             "no NVIDIA driver: cannot load %s%s%s; install the driver, or set "
             "EDGESDK_CUDA_LIBRARY to its library",
             tried, why_not, chosen != nullptr ? ", as EDGESDK_CUDA_LIBRARY says" : "");
    return false;
  }
  const char* missing = FillTable(library, driver);
  if (missing == nullptr) return true;
  snprintf(error, error_bytes, "the NVIDIA driver's library %s has no %s: it is too old", path,
           missing);
  return false;
}

}  // namespace cuda
}  // namespace edgert
