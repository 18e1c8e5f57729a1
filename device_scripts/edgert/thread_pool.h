// thread_pool.h: runs one parallel loop at a time over a fixed set of threads.
//
// Each participant gets one task of a static partition, as TVM's generated code expects. Between
// loops the workers spin for a bounded time (a network is a rapid sequence of short loops), then
// sleep.
#ifndef EDGERT_THREAD_POOL_H_
#define EDGERT_THREAD_POOL_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "platform.h"

namespace edgert {

// TVM's ABI of a parallel region (tvm/runtime/c_backend_api.h).
struct ParallelEnv {
  void* sync_handle;
  int32_t num_task;
};
using ParallelLambda = int (*)(int task_id, ParallelEnv* env, void* data);

class ThreadPool {
 public:
  // The pool of this library, made at the first use. Sized by EDGESDK_NUM_THREADS, or else by the
  // CPUs this process may use. Its threads live as long as the process.
  static ThreadPool& Shared();

  // `num_threads` counts the calling thread; `spin_ns` bounds the busy waiting.
  ThreadPool(int num_threads, uint64_t spin_ns);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs lambda(task, env, data) for the tasks of one loop and returns the first non-zero result,
  // or 0. With num_task 0 there are as many tasks as threads, at most `max_threads` (0: no limit).
  // A pool that is busy with another thread's loop makes the caller do its loop alone rather than
  // wait.
  int Launch(ParallelLambda lambda, void* data, int num_task, int max_threads);

 private:
  struct Worker {
    ThreadPool* pool;
    int index;
    pthread_t thread;
  };

  static void* WorkerMain(void* argument);
  void WorkerLoop(int index);
  void RunTasks(int first);
  bool WaitForEpoch(uint64_t seen);
  void WaitForWorkers();

  int num_threads_;
  uint64_t spin_ns_;
  Worker* workers_;

  Mutex busy_;  // held during a launch

  // The loop being run. Written by the launcher before epoch_ rises, read by workers after.
  ParallelLambda lambda_ = nullptr;
  void* data_ = nullptr;
  ParallelEnv env_{nullptr, 0};
  int participants_ = 0;

  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> running_{0};   // workers that have not finished this epoch
  std::atomic<int> result_{0};    // first non-zero result of a task
  std::atomic<int> sleepers_{0};  // workers waiting on wake_
  std::atomic<bool> stopping_{false};
  std::atomic<bool> launcher_sleeps_{false};
  Mutex sleep_mutex_;
  Condition wake_;
  Condition finished_;
};

}  // namespace edgert

#endif  // EDGERT_THREAD_POOL_H_
