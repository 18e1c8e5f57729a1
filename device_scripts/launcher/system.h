// system.h: the operating system as the launcher sees it. Paths and arguments are UTF-8 on all.
#ifndef EDGESDK_LAUNCHER_SYSTEM_H_
#define EDGESDK_LAUNCHER_SYSTEM_H_

#include <stddef.h>
#include <stdio.h>

namespace launcher {

// As fopen and remove: errno says why it failed.
FILE* OpenFile(const char* path, const char* mode);
void RemoveFile(const char* path);

// Memory aligned to `alignment`, a power of two, or nullptr.
void* AllocateAligned(size_t bytes, size_t alignment);
void FreeAligned(void* memory);

// Loads a shared library for good, from that very path: a name alone means the present folder.
// Returns nullptr and writes the reason to `error` when it cannot.
void* LoadSharedLibrary(const char* path, char* error, size_t error_size);
void* FindFunction(void* library, const char* name);

// A clock that never goes back.
double NowMs();

// The most memory of this process that was resident, in bytes.
long long PeakRssBytes();

}  // namespace launcher

// What the program does (main.cc); returns its exit code. entry.cc calls it.
int LauncherMain(int argc, char** argv);

#endif  // EDGESDK_LAUNCHER_SYSTEM_H_
