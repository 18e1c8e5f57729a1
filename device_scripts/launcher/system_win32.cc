// system_win32.cc: Windows 7 and newer.
#if defined(_WIN32)

// K32GetProcessMemoryInfo of kernel32, which is there since Windows 7, and no psapi.dll.
#define PSAPI_VERSION 2
#define WIN32_LEAN_AND_MEAN
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <wchar.h>
#include <windows.h>
// After windows.h.
#include <psapi.h>

#include "system.h"

namespace launcher {
namespace {

// A path as Windows takes it. Longer ones are refused by everything that takes them.
constexpr int kMaxPath = 4096;

// Returns `text` in `wide`; what is too long or no UTF-8 becomes an empty path, which nothing
// opens.
const wchar_t* Widen(const char* text, wchar_t* wide) {
  if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, kMaxPath) == 0) {
    wide[0] = L'\0';
  }
  return wide;
}

}  // namespace

FILE* OpenFile(const char* path, const char* mode) {
  wchar_t wide_path[kMaxPath];
  wchar_t wide_mode[kMaxPath];
  return _wfopen(Widen(path, wide_path), Widen(mode, wide_mode));
}

void RemoveFile(const char* path) {
  wchar_t wide[kMaxPath];
  _wremove(Widen(path, wide));
}

void* AllocateAligned(size_t bytes, size_t alignment) { return _aligned_malloc(bytes, alignment); }

void FreeAligned(void* memory) { _aligned_free(memory); }

void* LoadSharedLibrary(const char* path, char* error, size_t error_size) {
  wchar_t wide[kMaxPath];
  wchar_t full[kMaxPath];
  // A full path and this flag: the libraries that it needs are looked for beside it, too.
  DWORD length = GetFullPathNameW(Widen(path, wide), kMaxPath, full, nullptr);
  HMODULE library = nullptr;
  if (length > 0 && length < kMaxPath) {
    library = LoadLibraryExW(full, nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
  }
  if (library != nullptr) return library;
  DWORD reason = GetLastError();
  wchar_t said[256];
  char text[768];
  DWORD used = FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, nullptr,
                              reason, 0, said, 256, nullptr);
  while (used > 0 && (said[used - 1] == L'\n' || said[used - 1] == L'\r')) --used;
  int bytes = WideCharToMultiByte(CP_UTF8, 0, said, static_cast<int>(used), text, sizeof(text) - 1,
                                  nullptr, nullptr);
  text[bytes] = '\0';
  snprintf(error, error_size, "%s: %s (Windows error %lu)", path, text, reason);
  return nullptr;
}

void* FindFunction(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

double NowMs() {
  LARGE_INTEGER ticks, frequency;
  QueryPerformanceCounter(&ticks);
  QueryPerformanceFrequency(&frequency);
  return static_cast<double>(ticks.QuadPart) * 1e3 / static_cast<double>(frequency.QuadPart);
}

long long PeakRssBytes() {
  PROCESS_MEMORY_COUNTERS counters = {};
  if (!GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters))) return 0;
  return static_cast<long long>(counters.PeakWorkingSetSize);
}

}  // namespace launcher

#endif  // _WIN32
