#include "thread_pool.h"

#include <stdio.h>
#include <stdlib.h>

#include <new>

#include "integer.h"

namespace edgert {
namespace {

constexpr int kMaxThreads = 256;
constexpr uint64_t kDefaultSpinNs = 100 * 1000;

// The parts of ThreadPool::unclaimed_.
constexpr int kMaxTasks = 0xffff;
constexpr int kParticipantsShift = 16;
constexpr int kLoopShift = 26;
static_assert(kMaxThreads < 1 << (kLoopShift - kParticipantsShift), "participants fit their bits");

int Tasks(uint64_t unclaimed) { return static_cast<int>(unclaimed & kMaxTasks); }

int Participants(uint64_t unclaimed) {
  return static_cast<int>(unclaimed >> kParticipantsShift &
                          ((1u << (kLoopShift - kParticipantsShift)) - 1));
}

OnceFlag shared_once = EDGERT_ONCE_INIT;
alignas(ThreadPool) unsigned char shared_storage[sizeof(ThreadPool)];

int ThreadsFromEnvironment() {
  char buffer[32];
  const char* text = Environment("EDGESDK_NUM_THREADS", buffer, sizeof(buffer));
  int64_t value = text != nullptr ? ParseInteger(text) : 0;
  if (value < 1) return UsableCpus();
  return value < kMaxThreads ? static_cast<int>(value) : kMaxThreads;
}

uint64_t SpinFromEnvironment() {
  char buffer[32];
  const char* text = Environment("EDGESDK_SPIN_US", buffer, sizeof(buffer));
  if (text == nullptr) return kDefaultSpinNs;
  int64_t value = ParseInteger(text);
  return value > 0 ? static_cast<uint64_t>(value) * 1000u : 0;
}

// Runs in a child right after fork(): its copy of the pool has no threads, and its mutexes may be
// held by threads that do not exist. The next use builds a new pool over it.
void ForgetSharedPool() { shared_once = EDGERT_ONCE_INIT; }

void MakeShared() {
  static bool forks_are_watched = false;
  if (!forks_are_watched) forks_are_watched = WatchForks(ForgetSharedPool);
  KeepLoaded();
  new (shared_storage) ThreadPool(ThreadsFromEnvironment(), SpinFromEnvironment());
}

// Spins until `done()` or until the time is up; returns whether it is done.
template <typename Done>
bool SpinUntil(Done done, uint64_t spin_ns) {
  if (done()) return true;
  if (spin_ns == 0) return false;
  uint64_t start = NowNs();
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      SpinPause();
    }
  } while (NowNs() - start < spin_ns);
  return done();
}

}  // namespace

ThreadPool& ThreadPool::Shared() {
  CallOnce(&shared_once, MakeShared);
  return *reinterpret_cast<ThreadPool*>(shared_storage);
}

ThreadPool::ThreadPool(int num_threads, uint64_t spin_ns) : num_threads_(1), spin_ns_(spin_ns) {
  if (num_threads <= 1) return;
  if (num_threads > kMaxThreads) num_threads = kMaxThreads;
  // Busy waiting on more threads than CPUs only steals time from the one that has work.
  if (num_threads > UsableCpus()) spin_ns_ = 0;
  workers_ =
      static_cast<Worker*>(AllocateAligned(static_cast<uint64_t>(num_threads) * sizeof(Worker)));
  if (workers_ == nullptr) return;
  for (; num_threads_ < num_threads; ++num_threads_) {
    Worker* worker = new (&workers_[num_threads_]) Worker(this, num_threads_);
    if (!StartThread(&worker->thread, WorkerMain, worker)) {
      worker->~Worker();
      return;
    }
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  GiveTickets(num_threads_);
  for (int i = 1; i < num_threads_; ++i) {
    JoinThread(workers_[i].thread);
    workers_[i].~Worker();
  }
  FreeAligned(workers_);
}

int ThreadPool::Launch(ParallelLambda lambda, void* data, int num_task, int max_threads) {
  int participants = num_threads_;
  if (max_threads > 0 && max_threads < participants) participants = max_threads;
  if (num_task > 0 && num_task < participants) participants = num_task;
  bool alone = participants == 1 || num_task > kMaxTasks || !busy_.TryLock();
  if (alone) {
    ParallelEnv env{nullptr, num_task > 0 ? num_task : 1};
    for (int task = 0; task < env.num_task; ++task) {
      int result = lambda(task, &env, data);
      if (result != 0) return result;
    }
    return 0;
  }
  lambda_ = lambda;
  data_ = data;
  num_task_ = num_task > 0 ? num_task : participants;
  result_.store(0, std::memory_order_relaxed);
  unfinished_.store(num_task_, std::memory_order_relaxed);
  // Publishes the loop to whoever claims a task of it.
  uint64_t loop = (unclaimed_.load(std::memory_order_relaxed) >> kLoopShift) + 1;
  unclaimed_.store(loop << kLoopShift | static_cast<uint64_t>(participants) << kParticipantsShift |
                       static_cast<uint64_t>(num_task_),
                   std::memory_order_release);
  GiveTickets(participants);
  RunTasks(0);
  WaitForTasks();
  int result = result_.load(std::memory_order_relaxed);
  if (result != 0) KernelError::Set(failure_);
  busy_.Unlock();
  return result;
}

// Hands the loop (or the end of the pool) to workers 1 to participants - 1.
void ThreadPool::GiveTickets(int participants) {
  // This publishes the loop to whoever acquires the ticket.
  for (int i = 1; i < participants; ++i) workers_[i].ticket.fetch_add(1);
  // Sequentially consistent here and in WaitForTicket: either we see that the worker sleeps, or it
  // sees its ticket before it does. Both sides write with a read-modify-write, not a plain store:
  // qemu lets a later load overtake an emulated store-release, and then both would sleep.
  for (int i = 1; i < participants; ++i) {
    if (!workers_[i].asleep.load()) continue;
    MutexLock lock(workers_[i].mutex);
    workers_[i].wake.NotifyAll();
  }
}

// Claims tasks and runs them until none is left to claim for the thread with this index.
void ThreadPool::RunTasks(int index) {
  uint64_t unclaimed = unclaimed_.load(std::memory_order_acquire);
  // A late worker may meet a loop that is for fewer threads than the one it was woken for.
  while (Tasks(unclaimed) != 0 && index < Participants(unclaimed)) {
    // Fails if the loop is another one by now: its number is part of the value.
    if (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
      continue;
    }
    RunTask(num_task_ - Tasks(unclaimed));
    unclaimed = unclaimed_.load(std::memory_order_acquire);
  }
}

void ThreadPool::RunTask(int task) {
  ParallelEnv env{nullptr, num_task_};
  // After a failure the rest of the loop is of no use.
  if (result_.load(std::memory_order_relaxed) == 0) {
    int result = lambda_(task, &env, data_);
    int expected = 0;
    // The launcher reads the message after this task's release of unfinished_.
    if (result != 0 && result_.compare_exchange_strong(expected, result)) {
      snprintf(failure_, sizeof(failure_), "%s", KernelError::Message());
    }
    if (result != 0) KernelError::Clear();
  }
  if (unfinished_.fetch_sub(1) == 1 && launcher_sleeps_.load()) {
    MutexLock lock(finished_mutex_);
    finished_.NotifyAll();
  }
}

ThreadResult ThreadPool::WorkerMain(void* worker) {
  Worker* self = static_cast<Worker*>(worker);
  self->pool->WorkerLoop(self);
  return ThreadResult();
}

void ThreadPool::WorkerLoop(Worker* worker) {
  // A worker that comes late may find several tickets, and nothing left to do.
  for (uint32_t seen = 0; WaitForTicket(worker, &seen);) RunTasks(worker->index);
}

// Waits for a ticket beyond the `seen` ones and counts all there are as seen. Returns false when
// the pool ends.
bool ThreadPool::WaitForTicket(Worker* worker, uint32_t* seen) {
  auto given = [=] { return worker->ticket.load(std::memory_order_acquire) != *seen; };
  if (!SpinUntil(given, spin_ns_)) {
    MutexLock lock(worker->mutex);
    worker->asleep.exchange(true);
    while (worker->ticket.load() == *seen) worker->wake.Wait(worker->mutex);
    worker->asleep.store(false);
  }
  // In this order: the last ticket of a pool, which tells of its end, may be among them.
  *seen = worker->ticket.load(std::memory_order_acquire);
  return !stopping_.load();
}

void ThreadPool::WaitForTasks() {
  auto done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (SpinUntil(done, spin_ns_)) return;
  MutexLock lock(finished_mutex_);
  launcher_sleeps_.exchange(true);  // as in WaitForTicket
  while (unfinished_.load() != 0) finished_.Wait(finished_mutex_);
  launcher_sleeps_.store(false);
}

}  // namespace edgert
