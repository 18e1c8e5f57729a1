// The thread pool: partition, nesting, concurrency, sleep, errors, signals, fork, end.

#include <stdlib.h>

#if defined(_WIN32)
#include <windows.h>
#else
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "kernel_error.h"
#include "thread_pool.h"

namespace {

using edgert::KernelError;
using edgert::ParallelEnv;
using edgert::ThreadPool;

constexpr uint64_t kSpinNs = 20 * 1000;

// What a loop saw: how often each task ran, on which thread, and the number of tasks it was told.
struct Seen {
  std::vector<int> runs = std::vector<int>(256, 0);
  std::vector<std::thread::id> thread = std::vector<std::thread::id>(256);
  std::atomic<int> num_task{0};

  static int Task(int task, ParallelEnv* env, void* data) {
    Seen* seen = static_cast<Seen*>(data);
    seen->runs[task] += 1;
    seen->thread[task] = std::this_thread::get_id();
    seen->num_task.store(env->num_task);
    return 0;
  }
};

int CountTask(int, ParallelEnv*, void* data) {
  static_cast<std::atomic<int>*>(data)->fetch_add(1, std::memory_order_relaxed);
  return 0;
}

TEST(every_task_runs_once_on_a_static_partition) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads, kSpinNs);
    CHECK_EQ(pool.num_threads(), threads);
    for (int num_task : {0, 1, 2, 3, 7, 64, 255}) {
      for (int max_threads : {0, 1, 2, 5, 100}) {
        Seen seen;
        CHECK_EQ(pool.Launch(Seen::Task, &seen, num_task, max_threads), 0);
        int participants = threads;
        if (max_threads > 0 && max_threads < participants) participants = max_threads;
        if (num_task > 0 && num_task < participants) participants = num_task;
        int tasks = num_task > 0 ? num_task : participants;
        CHECK_EQ(seen.num_task.load(), tasks);
        for (int i = 0; i < 256; ++i) CHECK_EQ(seen.runs[i], i < tasks ? 1 : 0);
        // Whoever comes first takes a task, but no more threads than were asked for.
        int different = 0;
        for (int i = 0; i < tasks; ++i) {
          bool is_new = true;
          for (int k = 0; k < i; ++k) {
            if (seen.thread[i] == seen.thread[k]) is_new = false;
          }
          different += is_new;
        }
        CHECK(different <= participants);
      }
    }
  }
}

// Every task waits until all have begun: this ends only if each has a thread of its own.
struct Meeting {
  std::atomic<int> begun{0};
  Seen seen;

  static int Task(int task, ParallelEnv* env, void* data) {
    Meeting* meeting = static_cast<Meeting*>(data);
    meeting->begun.fetch_add(1);
    while (meeting->begun.load() < env->num_task) std::this_thread::yield();
    return Seen::Task(task, env, &meeting->seen);
  }
};

TEST(tasks_run_at_the_same_time) {
  ThreadPool pool(4, kSpinNs);
  for (int round = 0; round < 50; ++round) {
    Meeting meeting;
    CHECK_EQ(pool.Launch(Meeting::Task, &meeting, 0, 0), 0);
    for (int i = 0; i < 4; ++i) {
      CHECK_EQ(meeting.seen.runs[i], 1);
      for (int k = 0; k < i; ++k) {
        CHECK(meeting.seen.thread[i] != meeting.seen.thread[k]);
      }
    }
  }
}

// Workers that come late to a loop find it done, and must not touch the next one's data before it
// is theirs: many loops of very different sizes, faster than workers wake up.
TEST(late_workers_take_part_in_the_right_loop) {
  ThreadPool pool(8, 0);
  for (int round = 0; round < 5000; ++round) {
    std::atomic<int> count{0};
    int tasks = 1 + round * 7 % 61;
    CHECK_EQ(pool.Launch(CountTask, &count, tasks, 0), 0);
    CHECK_EQ(count.load(), tasks);
  }
}

// Workers woken for a loop of all threads, and late for it, must not join the next one's two.
TEST(a_loop_for_few_threads_never_gets_more) {
  ThreadPool pool(8, 0);
  for (int round = 0; round < 300; ++round) {
    std::atomic<int> count{0};
    CHECK_EQ(pool.Launch(CountTask, &count, 8, 0), 0);
    Seen seen;
    CHECK_EQ(pool.Launch(Seen::Task, &seen, 200, 2), 0);
    int different = 0;
    for (int i = 0; i < 200; ++i) {
      bool is_new = true;
      for (int k = 0; k < i; ++k) {
        if (seen.thread[i] == seen.thread[k]) is_new = false;
      }
      different += is_new;
    }
    CHECK(different <= 2);
  }
}

TEST(more_tasks_than_the_pool_counts_are_done_alone) {
  ThreadPool pool(4, kSpinNs);
  std::atomic<int> count{0};
  CHECK_EQ(pool.Launch(CountTask, &count, 70000, 0), 0);
  CHECK_EQ(count.load(), 70000);
}

struct Nested {
  ThreadPool* pool;
  std::atomic<int> wrong{0};
  std::atomic<int> inner_tasks{0};
};

TEST(a_loop_inside_a_loop_is_done_alone) {
  ThreadPool pool(4, kSpinNs);
  Nested nested{&pool};
  auto outer = [](int, ParallelEnv*, void* data) -> int {
    Nested* nested = static_cast<Nested*>(data);
    Seen seen;
    if (nested->pool->Launch(Seen::Task, &seen, 5, 0) != 0) nested->wrong.fetch_add(1);
    for (int i = 0; i < 5; ++i) {
      nested->inner_tasks.fetch_add(seen.runs[i]);
      if (seen.thread[i] != std::this_thread::get_id()) nested->wrong.fetch_add(1);
    }
    return 0;
  };
  CHECK_EQ(pool.Launch(outer, &nested, 8, 0), 0);
  CHECK_EQ(nested.wrong.load(), 0);
  CHECK_EQ(nested.inner_tasks.load(), 8 * 5);
}

// The first loop does not end before the second thread's has: a pool that let the second wait for
// the first would never come back.
TEST(a_busy_pool_does_not_make_others_wait) {
  ThreadPool pool(3, kSpinNs);
  struct Shared {
    std::atomic<bool> first_runs{false};
    std::atomic<bool> second_done{false};
  } shared;
  auto hold = [](int, ParallelEnv*, void* data) -> int {
    Shared* shared = static_cast<Shared*>(data);
    shared->first_runs.store(true);
    while (!shared->second_done.load()) std::this_thread::yield();
    return 0;
  };
  std::thread first([&] { CHECK_EQ(pool.Launch(hold, &shared, 0, 0), 0); });
  while (!shared.first_runs.load()) std::this_thread::yield();
  Seen seen;
  CHECK_EQ(pool.Launch(Seen::Task, &seen, 4, 0), 0);
  for (int i = 0; i < 4; ++i) CHECK_EQ(seen.runs[i], 1);
  CHECK_EQ(pool.Launch(Seen::Task, &seen, 0, 0), 0);
  CHECK_EQ(seen.num_task.load(), 1);  // alone: one task does all the work
  shared.second_done.store(true);
  first.join();
}

TEST(several_threads_launch_at_once) {
  ThreadPool pool(4, kSpinNs);
  constexpr int kLaunches = 1000;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::atomic<int> count{0};
      for (int i = 0; i < kLaunches; ++i) CHECK_EQ(pool.Launch(CountTask, &count, 6, 0), 0);
      CHECK_EQ(count.load(), 6 * kLaunches);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(many_short_loops) {
  for (uint64_t spin_ns : {uint64_t{0}, uint64_t{1000}, uint64_t{200 * 1000}}) {
    for (int threads : {2, 4}) {
      ThreadPool pool(threads, spin_ns);
      int total = 0;
      // Plain ints: the pool must order each task before the launcher's reading of its result.
      std::vector<int> result(16, 0);
      auto task = [](int i, ParallelEnv*, void* data) -> int {
        static_cast<std::vector<int>*>(data)->at(i) += i + 1;
        return 0;
      };
      for (int i = 0; i < 3000; ++i) {
        // Fewer threads now and then: those left out must neither be lost nor run.
        CHECK_EQ(pool.Launch(task, &result, 4, i % 3), 0);
        total += 10;
      }
      CHECK_EQ(result[0] + result[1] + result[2] + result[3], total);
    }
  }
}

TEST(sleeping_workers_wake) {
  ThreadPool pool(3, 1000);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Seen seen;
    CHECK_EQ(pool.Launch(Seen::Task, &seen, 3, 0), 0);
    CHECK_EQ(seen.runs[0] + seen.runs[1] + seen.runs[2], 3);
  }
}

TEST(a_sleeping_launcher_wakes) {
  ThreadPool pool(2, 1000);
  auto slow_worker = [](int task, ParallelEnv*, void*) -> int {
    if (task > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return 0;
  };
  for (int i = 0; i < 20; ++i) CHECK_EQ(pool.Launch(slow_worker, nullptr, 0, 0), 0);
}

// Task `*data` fails: with a message if it is even, without one if it is odd.
int FailingTask(int task, ParallelEnv*, void* data) {
  int failing = *static_cast<int*>(data);
  if (task != failing) return 0;
  if (failing % 2 == 0) KernelError::Set(("task " + std::to_string(task) + " broke").c_str());
  return 40 + task;
}

TEST(the_message_of_a_failing_task_reaches_the_caller) {
  // With 3 threads, task 5 fails without a message where task 2 left one.
  for (int threads : {1, 2, 3, 4}) {
    ThreadPool pool(threads, kSpinNs);
    for (int failing : {0, 2, 6, 3, 5, 4, 1}) {
      KernelError::Clear();
      CHECK_EQ(pool.Launch(FailingTask, &failing, 7, 0), 40 + failing);
      std::string wanted = "task " + std::to_string(failing) + " broke";
      CHECK_TEXT(KernelError::Message(), failing % 2 == 0 ? wanted : "");
      KernelError::Clear();
      std::atomic<int> count{0};
      CHECK_EQ(pool.Launch(CountTask, &count, 7, 0), 0);
      CHECK_EQ(count.load(), 7);
      CHECK_TEXT(KernelError::Message(), "");
    }
  }
}

TEST(of_several_failures_one_is_reported_whole) {
  ThreadPool pool(4, kSpinNs);
  auto fail = [](int task, ParallelEnv*, void*) -> int {
    KernelError::Set(("task " + std::to_string(task) + " broke").c_str());
    return 40 + task;
  };
  for (int i = 0; i < 500; ++i) {
    int result = pool.Launch(fail, nullptr, 4, 0);
    CHECK_TEXT(KernelError::Message(), "task " + std::to_string(result - 40) + " broke");
  }
}

// Often: a worker that is late for the last loop meets the end of the pool.
TEST(pools_end_cleanly) {
  for (int i = 0; i < 400; ++i) {
    ThreadPool idle(4, i % 2 == 0 ? 0 : kSpinNs);
    ThreadPool used(3, i % 2 == 0 ? kSpinNs : 0);
    std::atomic<int> count{0};
    CHECK_EQ(used.Launch(CountTask, &count, 3, 0), 0);
    CHECK_EQ(count.load(), 3);
  }
}

TEST(a_pool_of_nothing_is_a_pool_of_one) {
  for (int threads : {-1, 0, 1}) {
    ThreadPool pool(threads, kSpinNs);
    CHECK_EQ(pool.num_threads(), 1);
    Seen seen;
    CHECK_EQ(pool.Launch(Seen::Task, &seen, 0, 0), 0);
    CHECK_EQ(seen.runs[0], 1);
  }
}

#if !defined(_WIN32)

std::atomic<int> signals_handled{0};

TEST(workers_take_no_signals_of_the_program) {
  struct sigaction action = {};
  struct sigaction previous;
  action.sa_handler = [](int) { signals_handled.fetch_add(1); };
  sigaction(SIGUSR1, &action, &previous);
  ThreadPool pool(4, 0);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, SIGUSR1);
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  CHECK_EQ(sigismember(&mask, SIGUSR1), 0);  // making the pool left our own mask alone
  pthread_sigmask(SIG_BLOCK, &one, nullptr);
  kill(getpid(), SIGUSR1);
  std::atomic<int> count{0};
  for (int i = 0; i < 50; ++i) pool.Launch(CountTask, &count, 8, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(signals_handled.load(), 0);  // this thread blocks it, so it waits
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  CHECK_EQ(signals_handled.load(), 1);
  sigaction(SIGUSR1, &previous, nullptr);
}

TEST(a_forked_child_has_a_pool_of_its_own) {
  ThreadPool& pool = ThreadPool::Shared();
  std::atomic<int> count{0};
  CHECK_EQ(pool.Launch(CountTask, &count, 16, 0), 0);
  // The child of the child, too: the handler must survive.
  for (int generation = 0; generation < 2; ++generation) {
    pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a child that waits for threads it does not have ends with SIGALRM
      // Its threads are real ones again: the tasks meet.
      Meeting meeting;
      ThreadPool& own = ThreadPool::Shared();
      bool ok = own.Launch(Meeting::Task, &meeting, own.num_threads(), 0) == 0;
      for (int i = 0; i < own.num_threads(); ++i) ok = ok && meeting.seen.runs[i] == 1;
      if (generation == 0 && ok) {
        pid_t grandchild = fork();
        if (grandchild == 0) {
          alarm(60);
          std::atomic<int> own_count{0};
          ThreadPool::Shared().Launch(CountTask, &own_count, 9, 0);
          _exit(own_count.load() == 9 ? 0 : 1);
        }
        int status = 1;
        waitpid(grandchild, &status, 0);
        ok = status == 0;
      }
      _exit(ok ? 0 : 1);
    }
    int status = 1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  CHECK_EQ(pool.Launch(CountTask, &count, 16, 0), 0);
  CHECK_EQ(count.load(), 32);
}

#endif

}  // namespace

int main(int argc, char** argv) {
  // The shared pool has more than one thread on any machine.
#if defined(_WIN32)
  SetEnvironmentVariableA("EDGESDK_NUM_THREADS", "3");
#else
  setenv("EDGESDK_NUM_THREADS", "3", 1);
#endif
  return check::Main(argc, argv);
}
