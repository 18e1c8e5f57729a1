// system_posix.cc: Linux and Apple's systems.
#if !defined(_WIN32)

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "../edgert/integer.h"
#include "system.h"

namespace launcher {

FILE* OpenFile(const char* path, const char* mode) { return fopen(path, mode); }

void RemoveFile(const char* path) { remove(path); }

void* AllocateAligned(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void FreeAligned(void* memory) { free(memory); }

void* LoadSharedLibrary(const char* path, char* error, size_t error_size) {
  // dlopen looks for a name without a slash in the system's folders only.
  char full[4096];
  snprintf(full, sizeof(full), "%s%s", strchr(path, '/') == nullptr ? "./" : "", path);
  void* library = dlopen(full, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) snprintf(error, error_size, "%s", dlerror());
  return library;
}

void* FindFunction(void* library, const char* name) { return dlsym(library, name); }

double NowMs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

long long PeakRssBytes() {
  rusage usage;
#if defined(__APPLE__)
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
#else
  // Not getrusage's ru_maxrss where that can be helped: it counts what the process that started
  // this one had before exec, too.
  long long kib = 0;
  FILE* file = fopen("/proc/self/status", "r");
  char line[256];
  while (file != nullptr && kib == 0 && fgets(line, sizeof(line), file) != nullptr) {
    if (strncmp(line, "VmHWM:", 6) == 0) kib = edgert::ParseInteger(line + 6);
  }
  if (file != nullptr) fclose(file);
  if (kib == 0) {
    getrusage(RUSAGE_SELF, &usage);
    kib = usage.ru_maxrss;
  }
  return kib * 1024;
#endif
}

}  // namespace launcher

#endif  // !_WIN32
