// platform.cc: Linux and Apple's systems. platform_win32.cc has the same for Windows.
#if !defined(_WIN32)

#include "platform.h"

#if defined(__APPLE__)
#include <dlfcn.h>
#endif
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <initializer_list>

namespace edgert {

void* AllocateAligned(uint64_t bytes) {
  void* memory = nullptr;
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  size_t size = bytes == 0 ? kAlignment : static_cast<size_t>(bytes);
  return posix_memalign(&memory, kAlignment, size) == 0 ? memory : nullptr;
}

void FreeAligned(void* memory) { free(memory); }

uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

int UsableCpus() {
  long count = 0;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = CPU_COUNT(&set);
#endif
  // No affinity here, or more CPUs than the set has room for.
  if (count == 0) count = sysconf(_SC_NPROCESSORS_ONLN);
  return count > 0 ? static_cast<int>(count) : 1;
}

const char* Environment(const char* name, char*, size_t) { return getenv(name); }

bool StartThread(Thread* thread, ThreadResult (*main)(void*), void* argument) {
  sigset_t blocked;
  sigset_t previous;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
    sigdelset(&blocked, fault);
  }
  // A new thread inherits the mask of the thread that makes it.
  pthread_sigmask(SIG_BLOCK, &blocked, &previous);
  bool started = pthread_create(thread, nullptr, main, argument) == 0;
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  return started;
}

void JoinThread(Thread thread) { pthread_join(thread, nullptr); }

void CallOnce(OnceFlag* flag, void (*function)()) { pthread_once(flag, function); }

bool WatchForks(void (*function)()) { return pthread_atfork(nullptr, nullptr, function) == 0; }

void KeepLoaded() {
#if defined(__APPLE__)  // whose linker has no switch for it
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&KeepLoaded), &self) != 0) {
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
#endif
}

}  // namespace edgert

#endif  // !_WIN32
