#include "driver_library.h"

#include <stdio.h>
#include <string.h>

#include "platform.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace edgert {
namespace {

#if defined(_WIN32)

void* OpenLibrary(const char* path) {
  // A name alone from the system's folder only: a nvcuda.dll beside the program would be nobody's
  // driver.
  bool is_path = strpbrk(path, "/\\") != nullptr;
  return reinterpret_cast<void*>(
      LoadLibraryExA(path, nullptr, is_path ? 0 : LOAD_LIBRARY_SEARCH_SYSTEM32));
}

void WhyNotOpened(const char*, char* text, size_t bytes) {
  unsigned long code = GetLastError();
  if (code != ERROR_MOD_NOT_FOUND) snprintf(text, bytes, " (Windows error %lu)", code);
}

#else

// glibc says "PATH: ... No such file or directory", musl the same with words in front; of another
// library that this one needs they name that one there.
bool IsAbsent(const char* reason, const char* path) {
#if defined(__APPLE__)
  if (strstr(reason, "image not found") != nullptr) return true;
  if (strstr(reason, "(no such file)") != nullptr) return true;
#endif
  const char* at = strstr(reason, path);
  return at != nullptr && at[strlen(path)] == ':' && strstr(at, "No such file") != nullptr;
}

void* OpenLibrary(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

// Right after a failing OpenLibrary: writes why, unless it is just that there is no such file. The
// file's own libraries may be missing, or it may be for another machine.
void WhyNotOpened(const char* path, char* text, size_t bytes) {
  const char* reason = dlerror();
  if (reason == nullptr || IsAbsent(reason, path)) return;
  // Callers list the path themselves.
  size_t length = strlen(path);
  if (strncmp(reason, path, length) == 0 && strncmp(reason + length, ": ", 2) == 0) {
    reason += length + 2;
  }
  snprintf(text, bytes, " (%s)", reason);
}

#endif

}  // namespace

bool FindLibrary(const LibrarySearch& search, AcceptLibrary accept, void* result, char* tried,
                 size_t bytes) {
  char buffer[1024];
  const char* chosen = Environment(search.variable, buffer, sizeof(buffer));
  if (chosen != nullptr && chosen[0] == '\0') chosen = nullptr;
  const char* const* paths = chosen != nullptr ? &chosen : search.paths;
  size_t num_paths = chosen != nullptr ? 1 : search.num_paths;
  size_t used = 0;
  tried[0] = '\0';
  for (size_t i = 0; i < num_paths; ++i) {
    char why_not[300] = "";
    void* library = OpenLibrary(paths[i]);
    if (library == nullptr) {
      WhyNotOpened(paths[i], why_not, sizeof(why_not));
    } else if (accept(library, result, why_not, sizeof(why_not))) {
      return true;
    }
    snprintf(tried + used, bytes - used, "%s%s%s", used > 0 ? ", " : "", paths[i], why_not);
    used += strlen(tried + used);
  }
  if (chosen != nullptr) snprintf(tried + used, bytes - used, ", as %s says", search.variable);
  return false;
}

#if defined(_WIN32)

void CloseLibrary(void* library) { FreeLibrary(static_cast<HMODULE>(library)); }

void* FindSymbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

void CloseLibrary(void* library) { dlclose(library); }

void* FindSymbol(void* library, const char* name) { return dlsym(library, name); }

#endif

}  // namespace edgert
