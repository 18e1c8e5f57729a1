#include "platform.h"

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
  cpu_set_t set;
  CPU_ZERO(&set);
  long count = 0;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    count = CPU_COUNT(&set);
  } else {  // more CPUs than the set has room for
    count = sysconf(_SC_NPROCESSORS_ONLN);
  }
  return count > 0 ? static_cast<int>(count) : 1;
}

bool StartThread(pthread_t* thread, void* (*main)(void*), void* argument) {
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

}  // namespace edgert
