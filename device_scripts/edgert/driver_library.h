// driver_library.h: the library of an accelerator's driver, looked for when it is needed.
#ifndef EDGERT_DRIVER_LIBRARY_H_
#define EDGERT_DRIVER_LIBRARY_H_

#include <stddef.h>

namespace edgert {

// Where to look: the file that the environment variable `variable` names, or else `paths` in turn.
// A name alone is looked for where the system has its libraries.
struct LibrarySearch {
  const char* variable;
  const char* const* paths;
  size_t num_paths;
};

// Whether an opened library serves; `result` is the caller's. If not, it writes why, " (reason)",
// and may close it.
using AcceptLibrary = bool (*)(void* library, void* result, char* why_not, size_t bytes);

// Opens the first library that serves, which stays loaded. Returns false if none does, with those
// tried: "libA.so, libB.so (has no clFinish)".
bool FindLibrary(const LibrarySearch& search, AcceptLibrary accept, void* result, char* tried,
                 size_t bytes);

void CloseLibrary(void* library);
void* FindSymbol(void* library, const char* name);

}  // namespace edgert

#endif  // EDGERT_DRIVER_LIBRARY_H_
