// entry.cc: where the system starts the launcher.

#include "system.h"

#if defined(_WIN32)

#include <stdlib.h>
#include <windows.h>

// The arguments in Unicode: main() gets them in the system's old code page, in which most file
// names cannot be written.
int wmain(int argc, wchar_t** wide) {
  // A library that is missing is an exit code, not a window that waits for a click.
  SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX | SEM_NOOPENFILEERRORBOX);
  // Both live as long as the process. UTF-8 takes at most three bytes for a UTF-16 unit.
  char** argv = static_cast<char**>(calloc(static_cast<size_t>(argc) + 1, sizeof(char*)));
  for (int i = 0; argv != nullptr && i < argc; ++i) {
    int room = 3 * lstrlenW(wide[i]) + 1;
    argv[i] = static_cast<char*>(malloc(static_cast<size_t>(room)));
    if (argv[i] == nullptr ||
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, argv[i], room, nullptr, nullptr) == 0) {
      argv = nullptr;
    }
  }
  if (argv == nullptr) {
    fputs("edgesdk-run: the arguments cannot be read\n", stderr);
    return 2;
  }
  UINT before = GetConsoleOutputCP();  // 0: there is no console
  if (before != 0) SetConsoleOutputCP(CP_UTF8);
  int code = LauncherMain(argc, argv);
  if (before != 0) SetConsoleOutputCP(before);
  return code;
}

#else

int main(int argc, char** argv) { return LauncherMain(argc, argv); }

#endif
