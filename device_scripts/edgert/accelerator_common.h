// accelerator_common.h: what the accelerators' own halves (accelerator.h) have in common.
#ifndef EDGERT_ACCELERATOR_COMMON_H_
#define EDGERT_ACCELERATOR_COMMON_H_

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "accelerator.h"
#include "platform.h"

namespace edgert {

// Where a failure's reason goes.
struct Report {
  char* text;
  size_t bytes;

  edgesdk_status Fail(edgesdk_status status, const char* format, ...) const
      __attribute__((format(printf, 3, 4))) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, bytes, format, arguments);
    va_end(arguments);
    return status;
  }
};

// A lock in static memory, made at the first use: edgert has no constructors of static objects.
// A child of fork() gets a new one, since a thread that is not there may hold the parent's, and
// `forget` is called in it, for what the lock guards is of no use there either.
template <void (*forget)()>
class ForkAwareLock {
 public:
  static Mutex& Get() {
    CallOnce(&once_, Make);
    return *reinterpret_cast<Mutex*>(storage_);
  }

 private:
  static void Make() {
    static bool forks_are_watched = false;
    if (!forks_are_watched) forks_are_watched = WatchForks(Renew);
    new (storage_) Mutex;
  }

  static void Renew() {
    once_ = EDGERT_ONCE_INIT;
    forget();
  }

  inline static OnceFlag once_ = EDGERT_ONCE_INIT;
  alignas(Mutex) inline static unsigned char storage_[sizeof(Mutex)];
};

// Zeroed memory for free(); nullptr when there is none.
template <typename T>
T* AllocateArray(size_t count) {
  return static_cast<T*>(calloc(count == 0 ? 1 : count, sizeof(T)));
}

// Memory of the host that only the CPU uses, for FreeAligned(); nullptr when there is none.
inline void* AllocatePlainHost(uint64_t bytes, const Report& report) {
  void* memory = AllocateAligned(bytes);
  if (memory == nullptr) {
    report.Fail(EDGESDK_ERROR_OUT_OF_MEMORY, "out of memory: no room for %llu bytes",
                static_cast<unsigned long long>(bytes));
  }
  return memory;
}

// Takes `program` from the list that begins at *first, if it is there: a forked child's list has
// forgotten it.
template <typename Program>
void Unlink(Program** first, const Program* program) {
  while (*first != nullptr && *first != program) first = &(*first)->next;
  if (*first == program) *first = program->next;
}

// Whether the environment variable `name` is `value`.
inline bool EnvironmentIs(const char* name, const char* value) {
  char buffer[16];
  const char* text = Environment(name, buffer, sizeof(buffer));
  return text != nullptr && strcmp(text, value) == 0;
}

// What of the plan's weights goes to the accelerator: the bytes up to the end of its last one.
inline uint64_t DeviceWeightBytes(const edgert_plan& plan) {
  uint64_t end = 0;
  for (uint32_t i = 0; i < plan.num_tensors; ++i) {
    const edgert_tensor& tensor = plan.tensors[i];
    uint64_t tensor_end = tensor.offset + tensor.size_bytes;
    if (tensor.storage == kEdgertDeviceWeight && tensor_end > end) end = tensor_end;
  }
  return end;
}

// What a failure calls a command.
inline const char* NameOf(const edgert_plan& plan, const Command& command) {
  switch (command.kind) {
    case CommandKind::kLaunch:
      break;
    case CommandKind::kUpload:
      return "the copy to the GPU";
    case CommandKind::kDownload:
      return "the copy from the GPU";
    case CommandKind::kCopy:
      return "the copy on the GPU";
  }
  return plan.steps[command.step].launch->function;
}

}  // namespace edgert

#endif  // EDGERT_ACCELERATOR_COMMON_H_
