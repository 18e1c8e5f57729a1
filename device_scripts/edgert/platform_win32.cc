// platform_win32.cc: Windows 7 and newer.
#if defined(_WIN32)

#include "platform.h"

#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <process.h>
#include <windows.h>

namespace edgert {
namespace {

SRWLOCK* Srw(void** lock) { return reinterpret_cast<SRWLOCK*>(lock); }

static_assert(sizeof(SRWLOCK) == sizeof(void*), "Mutex holds an SRWLOCK");
static_assert(sizeof(CONDITION_VARIABLE) == sizeof(void*), "Condition holds one");
static_assert(sizeof(INIT_ONCE) == sizeof(OnceFlag), "OnceFlag is an INIT_ONCE");

BOOL CALLBACK CallFunction(INIT_ONCE*, void* function, void**) {
  reinterpret_cast<void (*)()>(function)();
  return TRUE;
}

}  // namespace

void* AllocateAligned(uint64_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  return _aligned_malloc(bytes == 0 ? kAlignment : static_cast<size_t>(bytes), kAlignment);
}

void FreeAligned(void* memory) { _aligned_free(memory); }

uint64_t NowNs() {
  // Both calls cannot fail since Windows XP. The product of ticks and 1e9 would overflow within
  // half an hour of the system's start at 10 MHz.
  LARGE_INTEGER ticks, frequency;
  QueryPerformanceCounter(&ticks);
  QueryPerformanceFrequency(&frequency);
  uint64_t now = static_cast<uint64_t>(ticks.QuadPart);
  uint64_t per_second = static_cast<uint64_t>(frequency.QuadPart);
  return now / per_second * 1000000000u + now % per_second * 1000000000u / per_second;
}

int UsableCpus() {
  DWORD_PTR process = 0;
  DWORD_PTR system = 0;
  int count = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &process, &system)) {
    for (; process != 0; process &= process - 1) ++count;
  }
  // A process on several groups of up to 64 CPUs each has no mask.
  if (count == 0) count = static_cast<int>(GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
  return count > 0 ? count : 1;
}

const char* Environment(const char* name, char* buffer, size_t size) {
  // Not getenv, which reads a copy of this C library's own: a program that uses another C library
  // changes another copy.
  DWORD length = GetEnvironmentVariableA(name, buffer, static_cast<DWORD>(size));
  return length > 0 && length < size ? buffer : nullptr;
}

bool StartThread(Thread* thread, ThreadResult (*main)(void*), void* argument) {
  uintptr_t started = _beginthreadex(nullptr, 0, main, argument, 0, nullptr);
  *thread = reinterpret_cast<Thread>(started);
  return started != 0;
}

void JoinThread(Thread thread) {
  WaitForSingleObject(thread, INFINITE);
  CloseHandle(thread);
}

void CallOnce(OnceFlag* flag, void (*function)()) {
  InitOnceExecuteOnce(reinterpret_cast<INIT_ONCE*>(flag), CallFunction,
                      reinterpret_cast<void*>(function), nullptr);
}

bool WatchForks(void (*)()) { return true; }  // there is no fork

void KeepLoaded() {
  HMODULE module;
  GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                     reinterpret_cast<LPCWSTR>(&KeepLoaded), &module);
}

void Mutex::Lock() { AcquireSRWLockExclusive(Srw(&lock_)); }
bool Mutex::TryLock() { return TryAcquireSRWLockExclusive(Srw(&lock_)) != 0; }
void Mutex::Unlock() { ReleaseSRWLockExclusive(Srw(&lock_)); }

void Condition::Wait(Mutex& mutex) {
  SleepConditionVariableSRW(reinterpret_cast<CONDITION_VARIABLE*>(&condition_), Srw(&mutex.lock_),
                            INFINITE, 0);
}

void Condition::NotifyAll() {
  WakeAllConditionVariable(reinterpret_cast<CONDITION_VARIABLE*>(&condition_));
}

}  // namespace edgert

#endif  // _WIN32
