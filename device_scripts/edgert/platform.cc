#include "platform.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

namespace edgert {

void* AllocateAligned(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes == 0 ? kAlignment : bytes) != 0) return nullptr;
  return memory;
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
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  int count = CPU_COUNT(&set);
  return count > 0 ? count : 1;
}

}  // namespace edgert
