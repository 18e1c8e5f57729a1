#include "thread_pool.h"

#include <stdlib.h>

#include <new>

#include "kernel_error.h"

namespace edgert {
namespace {

constexpr int kMaxThreads = 256;
constexpr uint64_t kDefaultSpinNs = 100 * 1000;

pthread_once_t shared_once = PTHREAD_ONCE_INIT;
alignas(ThreadPool) unsigned char shared_storage[sizeof(ThreadPool)];

int ThreadsFromEnvironment() {
  const char* text = getenv("EDGESDK_NUM_THREADS");
  long value = text != nullptr ? strtol(text, nullptr, 10) : 0;
  if (value < 1) return UsableCpus();
  return value < kMaxThreads ? static_cast<int>(value) : kMaxThreads;
}

uint64_t SpinFromEnvironment() {
  const char* text = getenv("EDGESDK_SPIN_US");
  if (text == nullptr) return kDefaultSpinNs;
  long value = strtol(text, nullptr, 10);
  return value > 0 ? static_cast<uint64_t>(value) * 1000u : 0;
}

void MakeShared() {
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
  pthread_once(&shared_once, MakeShared);
  return *reinterpret_cast<ThreadPool*>(shared_storage);
}

ThreadPool::ThreadPool(int num_threads, uint64_t spin_ns)
    : num_threads_(num_threads), spin_ns_(spin_ns), workers_(nullptr) {
  if (num_threads_ <= 1) {
    num_threads_ = 1;
    return;
  }
  // Busy waiting on more threads than CPUs only steals time from the one that has work.
  if (num_threads_ > UsableCpus()) spin_ns_ = 0;
  workers_ = static_cast<Worker*>(calloc(static_cast<size_t>(num_threads_), sizeof(Worker)));
  if (workers_ == nullptr) {
    num_threads_ = 1;
    return;
  }
  int wanted = num_threads_;
  num_threads_ = 1;
  for (int i = 1; i < wanted; ++i) {
    workers_[i] = Worker{this, i, pthread_t{}};
    // A system that is out of threads gives a smaller pool, never an error.
    if (pthread_create(&workers_[i].thread, nullptr, WorkerMain, &workers_[i]) != 0) break;
    num_threads_ = i + 1;
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  {
    MutexLock lock(sleep_mutex_);
    wake_.NotifyAll();
  }
  for (int i = 1; i < num_threads_; ++i) pthread_join(workers_[i].thread, nullptr);
  free(workers_);
}

int ThreadPool::Launch(ParallelLambda lambda, void* data, int num_task, int max_threads) {
  int participants = num_threads_;
  if (max_threads > 0 && max_threads < participants) participants = max_threads;
  if (num_task > 0 && num_task < participants) participants = num_task;
  bool alone = participants == 1 || !busy_.TryLock();
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
  env_.num_task = num_task > 0 ? num_task : participants;
  participants_ = participants;
  result_.store(0, std::memory_order_relaxed);
  running_.store(num_threads_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  // Sequentially consistent with WaitForEpoch: either we see the sleeper, or it sees the new epoch.
  if (sleepers_.load() > 0) {
    MutexLock lock(sleep_mutex_);
    wake_.NotifyAll();
  }
  RunTasks(0);
  WaitForWorkers();
  int result = result_.load(std::memory_order_relaxed);
  if (result != 0) KernelError::TakeFromShared();
  busy_.Unlock();
  return result;
}

void ThreadPool::RunTasks(int first) {
  for (int task = first; task < env_.num_task; task += participants_) {
    int result = lambda_(task, &env_, data_);
    if (result == 0) continue;
    int expected = 0;
    if (result_.compare_exchange_strong(expected, result)) KernelError::MoveToShared();
    return;
  }
}

void* ThreadPool::WorkerMain(void* argument) {
  Worker* worker = static_cast<Worker*>(argument);
  worker->pool->WorkerLoop(worker->index);
  return nullptr;
}

void ThreadPool::WorkerLoop(int index) {
  uint64_t seen = 0;
  while (WaitForEpoch(seen)) {
    ++seen;
    if (index < participants_) RunTasks(index);
    if (running_.fetch_sub(1) == 1 && launcher_sleeps_.load()) {
      MutexLock lock(sleep_mutex_);
      finished_.NotifyAll();
    }
  }
}

// Returns false when the pool ends.
bool ThreadPool::WaitForEpoch(uint64_t seen) {
  auto started = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
  if (!SpinUntil(started, spin_ns_)) {
    MutexLock lock(sleep_mutex_);
    sleepers_.fetch_add(1);
    while (epoch_.load() == seen) wake_.Wait(sleep_mutex_);
    sleepers_.fetch_sub(1);
  }
  return !stopping_.load();
}

void ThreadPool::WaitForWorkers() {
  auto done = [&] { return running_.load(std::memory_order_acquire) == 0; };
  if (SpinUntil(done, spin_ns_)) return;
  MutexLock lock(sleep_mutex_);
  launcher_sleeps_.store(true);
  while (running_.load() != 0) finished_.Wait(sleep_mutex_);
  launcher_sleeps_.store(false);
}

}  // namespace edgert
