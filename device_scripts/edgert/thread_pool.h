// thread_pool.h: runs one parallel loop at a time over a fixed set of threads.
//
// A loop is cut into one task for each participant, as TVM's generated code expects; whoever comes
// first takes the next task, the launching thread included, so that a worker which the system does
// not run in time (another program has its CPU) costs a little speed and not a time slice. Between
// loops the workers spin for a bounded time (a network is a rapid sequence of short loops), then
// sleep. A loop that needs fewer threads than there are neither wakes nor waits for the others.
#ifndef EDGERT_THREAD_POOL_H_
#define EDGERT_THREAD_POOL_H_

#include <atomic>
#include <cstdint>

#include "kernel_error.h"
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
  // CPUs this process may use. Its threads live as long as the process. A forked child, which has
  // none of its parent's threads, makes itself a new one.
  static ThreadPool& Shared();

  // `num_threads` counts the calling thread; `spin_ns` bounds the busy waiting. A system that is
  // short of threads or memory gives a smaller pool, never an error.
  ThreadPool(int num_threads, uint64_t spin_ns);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs lambda(task, env, data) for the tasks of one loop and returns the first non-zero result,
  // or 0; the failing task's KernelError becomes the caller's. With num_task 0 there are as many
  // tasks as threads, at most `max_threads` (0: no limit). A pool that is busy with another loop
  // makes the caller do its loop alone rather than wait.
  int Launch(ParallelLambda lambda, void* data, int num_task, int max_threads);

 private:
  // Each on cache lines of its own: its worker polls `ticket` while others work.
  struct alignas(kAlignment) Worker {
    Worker(ThreadPool* the_pool, int the_index) : pool(the_pool), index(the_index) {}
    ThreadPool* const pool;
    const int index;
    Thread thread{};
    std::atomic<uint32_t> ticket{0};  // loops that this worker was given since it started
    std::atomic<bool> asleep{false};
    Mutex mutex;
    Condition wake;
  };

  static ThreadResult WorkerMain(void* worker);
  void WorkerLoop(Worker* worker);
  bool WaitForTicket(Worker* worker, uint32_t* seen);
  void GiveTickets(int participants);
  void RunTasks(int index);
  void RunTask(int task);
  void WaitForTasks();

  int num_threads_;
  uint64_t spin_ns_;
  Worker* workers_ = nullptr;  // num_threads_ of them; the first stands for the caller, unused

  Mutex busy_;  // held during a launch

  // The loop being run. Written by the launcher while no task can be claimed, read by whoever has
  // claimed one; a launch ends only when every task is done.
  ParallelLambda lambda_ = nullptr;
  void* data_ = nullptr;
  int num_task_ = 0;

  // The number of the loop (38 bits), its participants (10), and its tasks that nobody has claimed
  // yet (16). The launcher claims tasks like everyone else, so it never waits for a worker that the
  // system has not got round to running, only for one that has begun.
  alignas(kAlignment) std::atomic<uint64_t> unclaimed_{0};
  alignas(kAlignment) std::atomic<int> unfinished_{0};  // tasks of the loop that are not done
  std::atomic<int> result_{0};                          // first non-zero result of a task
  char failure_[KernelError::kBytes];                   // its message
  std::atomic<bool> stopping_{false};
  std::atomic<bool> launcher_sleeps_{false};
  Mutex finished_mutex_;
  Condition finished_;
};

}  // namespace edgert

#endif  // EDGERT_THREAD_POOL_H_
