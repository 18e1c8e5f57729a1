// platform.h: the operating system as edgert sees it: aligned memory, threads, a clock.
//
// edgert uses no C++ standard library at link time (only headers such as <atomic>), so that a
// library runs on any board whose libc is new enough, whatever its libstdc++ is. Hence plain
// pthreads here, and what Windows has had since Windows 7.
#ifndef EDGERT_PLATFORM_H_
#define EDGERT_PLATFORM_H_

#if !defined(_WIN32)
#include <pthread.h>
#endif
#include <stddef.h>
#include <stdint.h>

namespace edgert {

// TVM's generated code loads vectors with this alignment.
constexpr size_t kAlignment = 64;

// Returns memory aligned to kAlignment, or nullptr. Size 0 gives a valid pointer. The size has 64
// bits as in plans: what a 32-bit system cannot address is refused, not cut.
void* AllocateAligned(uint64_t bytes);
void FreeAligned(void* memory);

// Nanoseconds of a clock that never goes back.
uint64_t NowNs();

// CPUs that this process may run on (its affinity mask), at least 1.
int UsableCpus();

// The value of an environment variable as it is now, or nullptr. `buffer` may hold it.
const char* Environment(const char* name, char* buffer, size_t size);

#if defined(_WIN32)
using Thread = void*;           // a HANDLE
using ThreadResult = unsigned;  // what _beginthreadex wants
using OnceFlag = void*;         // an INIT_ONCE
#define EDGERT_ONCE_INIT nullptr
#else
using Thread = pthread_t;
using ThreadResult = void*;
using OnceFlag = pthread_once_t;
#define EDGERT_ONCE_INIT PTHREAD_ONCE_INIT
#endif

// Starts a thread that takes no signals but those of its own faults (and SIGPROF, for profilers):
// the program's handlers run on the program's threads. Returns whether it runs.
bool StartThread(Thread* thread, ThreadResult (*main)(void*), void* argument);
void JoinThread(Thread thread);

// Calls `function` unless it was called with this flag before; who comes meanwhile waits.
void CallOnce(OnceFlag* flag, void (*function)());

// Has `function` called in every child that is forked from now on. Returns whether it will be.
bool WatchForks(void (*function)());

// Keeps this library in memory until the process ends, for threads that run its code. Where the
// linker says so in the file (-z nodelete), it does nothing.
void KeepLoaded();

// Tells the CPU that this is a waiting loop.
inline void SpinPause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  asm volatile("yield" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

#if defined(_WIN32)

// An SRWLOCK: one pointer, and nothing to release at the end.
class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void Lock();
  bool TryLock();
  void Unlock();

 private:
  friend class Condition;
  void* lock_ = nullptr;
};

#else

class Mutex {
 public:
  Mutex() { pthread_mutex_init(&mutex_, nullptr); }
  ~Mutex() { pthread_mutex_destroy(&mutex_); }
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void Lock() { pthread_mutex_lock(&mutex_); }
  bool TryLock() { return pthread_mutex_trylock(&mutex_) == 0; }
  void Unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  friend class Condition;
  pthread_mutex_t mutex_;
};

#endif

class MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

#if defined(_WIN32)

// A CONDITION_VARIABLE, of which the same is true.
class Condition {
 public:
  Condition() = default;
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;
  void Wait(Mutex& mutex);
  void NotifyAll();

 private:
  void* condition_ = nullptr;
};

#else

class Condition {
 public:
  Condition() { pthread_cond_init(&condition_, nullptr); }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;
  void Wait(Mutex& mutex) { pthread_cond_wait(&condition_, &mutex.mutex_); }
  void NotifyAll() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_;
};

#endif

}  // namespace edgert

#endif  // EDGERT_PLATFORM_H_
