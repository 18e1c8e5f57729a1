// edgesdk-agent: measures candidates for a host that speaks to it on stdin and stdout (README.md).
//
// Each candidate runs in a forked process. While it does, the agent reads on, so that the next ones
// are here when it ends. When the channel closes, or a signal says so, the agent ends what runs,
// removes its folder and ends.
//
// Exit codes: 0 the channel closed, 2 wrong arguments, 3 the host broke the protocol, 7 the device
// failed.

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <initializer_list>
#include <new>

#include "candidate.h"
#include "platform.h"
#include "protocol.h"
#include "store.h"

namespace agent {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitProtocol = 3;
constexpr int kExitDevice = 7;

constexpr uint64_t kSecond = 1000u * 1000 * 1000;
// How often the memory of a running candidate is looked at.
constexpr uint64_t kWatchNs = kSecond / 10;
// A host that died behind a dead network never closes the channel.
constexpr uint64_t kIdleNs = 3600 * kSecond;
constexpr uint64_t kLastWordsNs = 5 * kSecond;
constexpr time_t kStaleS = 3600;
constexpr char kFolderPrefix[] = "run-";

volatile sig_atomic_t ending_signal = 0;

void OnEnd(int number) { ending_signal = number; }
void OnChild(int) {}  // only to interrupt ppoll

const char* StageText(Stage stage) {
  switch (stage) {
    case Stage::kStarting:
      return "before it was loaded";
    case Stage::kWriting:
      return "while its library was written";
    case Stage::kLoading:
      return "while it was loaded";
    case Stage::kFirstRun:
      return "in its first run";
    case Stage::kTiming:
      return "while it was timed";
  }
  return "";
}

// Removes the folder with the files in it; folders in it, which no agent makes, stay.
void RemoveFolder(const char* path) {
  DIR* folder = opendir(path);
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) unlinkat(dirfd(folder), entry->d_name, 0);
  closedir(folder);
  rmdir(path);
}

// The folders of agents that were killed: each agent holds a lock on its own. The age leaves those
// alone whose agent has not started yet.
void RemoveStaleFolders(const char* own) {
  char parent[kMaxPath];
  snprintf(parent, sizeof(parent), "%s/..", own);
  const char* slash = strrchr(own, '/');
  const char* own_name = slash != nullptr ? slash + 1 : own;
  DIR* folder = opendir(parent);
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (strncmp(entry->d_name, kFolderPrefix, sizeof(kFolderPrefix) - 1) != 0) continue;
    if (strcmp(entry->d_name, own_name) == 0) continue;
    int lock = openat(dirfd(folder), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) continue;
    struct stat info;
    if (fstat(lock, &info) == 0 && info.st_mtime < time(nullptr) - kStaleS &&
        flock(lock, LOCK_EX | LOCK_NB) == 0) {
      char path[kMaxPath + 256];
      snprintf(path, sizeof(path), "%s/%s", parent, entry->d_name);
      RemoveFolder(path);
    }
    close(lock);
  }
  closedir(folder);
}

class Agent {
 public:
  Agent(const char* folder, const char* sysfs) : folder_(folder), sysfs_(sysfs) {}

  int Main() {
    if (!Start()) return kExitDevice;
    SayHello();
    int code = 0;
    while (code == 0 && ending_signal == 0 && open_) {
      if (request_ == nullptr) Begin();
      Wait();
      if (request_ != nullptr) Look();
      code = ReadFrames();
      if (code == 0 && !output_.ok()) code = OutOfMemory();
    }
    if (request_ != nullptr) EndCandidate();
    if (code != 0) SayLastWords();
    RemoveFolder(folder_);
    return code;
  }

 private:
  bool Start() {
    lock_ = open(folder_, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock_ < 0 || flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      fprintf(stderr, "edgesdk-agent: cannot use the folder %s: %s\n", folder_, strerror(errno));
      return false;
    }
    // Before the signals are watched: its time does not matter.
    RemoveStaleFolders(folder_);
    void* shared =
        mmap(nullptr, sizeof(Outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || !input_.ok()) {
      fputs("edgesdk-agent: out of memory\n", stderr);
      return false;
    }
    outcome_ = static_cast<Outcome*>(shared);
    // Signals come in ppoll only, so none is missed between a look and the next wait.
    sigset_t watched;
    sigemptyset(&watched);
    for (int number : {SIGCHLD, SIGTERM, SIGHUP, SIGINT}) {
      struct sigaction action;
      memset(&action, 0, sizeof(action));
      action.sa_handler = number == SIGCHLD ? OnChild : OnEnd;
      sigaction(number, &action, nullptr);
      sigaddset(&watched, number);
    }
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &watched, &usual_signals_);
    for (int number : {SIGCHLD, SIGTERM, SIGHUP, SIGINT}) sigdelset(&usual_signals_, number);
    last_heard_ = edgert::NowNs();
    return true;
  }

  void SayHello() {
    output_.Begin(FrameType::kHello);
    output_.Put(static_cast<uint32_t>(getpid()));
    output_.Put(static_cast<uint32_t>(edgert::UsableCpus()));
    output_.Put(static_cast<uint32_t>(sizeof(void*) * 8));
    output_.End();
  }

  // Returns when there is something to do.
  void Wait() {
    uint64_t now = edgert::NowNs();
    uint64_t until = last_heard_ + kIdleNs;
    if (request_ != nullptr) until = now + kWatchNs < deadline_ ? now + kWatchNs : deadline_;
    uint64_t wait = until > now ? until - now : 0;
    timespec limit = {static_cast<time_t>(wait / kSecond), static_cast<long>(wait % kSecond)};
    short sending = output_.empty() ? 0 : POLLOUT;
    pollfd channels[] = {{STDIN_FILENO, POLLIN, 0}, {STDOUT_FILENO, sending, 0}};
    if (ppoll(channels, 2, &limit, &usual_signals_) <= 0) {
      if (request_ == nullptr && edgert::NowNs() >= last_heard_ + kIdleNs) {
        fputs("edgesdk-agent: nothing heard for an hour: it ends\n", stderr);
        open_ = false;
      }
      return;
    }
    if (channels[1].revents & (POLLERR | POLLNVAL)) open_ = false;
    if ((channels[1].revents & POLLOUT) && !output_.Send(STDOUT_FILENO)) open_ = false;
    if (channels[0].revents != 0) {
      int got = input_.Receive(STDIN_FILENO);
      if (got == 0) open_ = false;
      if (got > 0) last_heard_ = edgert::NowNs();
    }
  }

  int ReadFrames() {
    FrameType type;
    Fields fields;
    while (true) {
      switch (input_.Next(&type, &fields)) {
        case Input::State::kIncomplete:
          return 0;
        case Input::State::kDamaged:
          return Refuse(input_.problem());
        case Input::State::kFrame:
          break;
      }
      const char* problem = nullptr;
      switch (type) {
        case FrameType::kPut:
          problem = store_.Put(fields);
          break;
        case FrameType::kDrop:
          problem = store_.Drop(fields);
          break;
        case FrameType::kMeasure:
          problem = store_.Measure(fields);
          break;
        default:
          problem = "a frame of unknown type";
      }
      if (problem != nullptr) return Refuse(problem);
    }
  }

  int Refuse(const char* problem) {
    fprintf(stderr, "edgesdk-agent: %s\n", problem);
    output_.Begin(FrameType::kError);
    output_.Text(problem);
    output_.End();
    return kExitProtocol;
  }

  static int OutOfMemory() {
    fputs("edgesdk-agent: out of memory\n", stderr);
    return kExitDevice;
  }

  void SayLastWords() {
    uint64_t until = edgert::NowNs() + kLastWordsNs;
    while (!output_.empty() && output_.ok() && edgert::NowNs() < until) {
      pollfd channel = {STDOUT_FILENO, POLLOUT, 0};
      if (poll(&channel, 1, 100) > 0 && !output_.Send(STDOUT_FILENO)) return;
    }
  }

  // Starts the next candidate, if one waits.
  void Begin() {
    request_ = store_.Next();
    if (request_ == nullptr) return;
    outcome_ = new (outcome_) Outcome();
    outcome_->before = outcome_->after = kUnknownState;
    if (request_->problem[0] != '\0') {
      Report(Failure::kDevice, request_->problem);
      return;
    }
    snprintf(library_, sizeof(library_), "%s/candidate-%u.so", folder_, ++count_);
    pid_t parent = getpid();
    // From here on, not from when the request came.
    deadline_ = edgert::NowNs() + static_cast<uint64_t>(request_->timeout_s * 1e9);
    over_memory_ = over_time_ = false;
    child_ = fork();
    if (child_ == 0) BeTheCandidate(parent);
    if (child_ < 0) {
      char text[128];
      snprintf(text, sizeof(text), "cannot start a process: %s", strerror(errno));
      Report(Failure::kDevice, text);
      return;
    }
    setpgid(child_, child_);  // here and there: whoever comes first
  }

  [[noreturn]] void BeTheCandidate(pid_t parent) {
    // Ends with the agent, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    setpgid(0, 0);
    for (int number : {SIGCHLD, SIGTERM, SIGHUP, SIGINT, SIGPIPE}) signal(number, SIG_DFL);
    sigprocmask(SIG_SETMASK, &usual_signals_, nullptr);
    // The channel is not the candidate's.
    int nowhere = open("/dev/null", O_RDWR);
    for (int descriptor : {0, 1, 2}) dup2(nowhere, descriptor);
    // When memory is short, the kernel takes this process and not the agent. No core files.
    int badness = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (badness >= 0) {
      // Refused, it is as it was before.
      ssize_t ignored = write(badness, "1000", 4);
      (void)ignored;
      close(badness);
    }
    rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    RunCandidate(*request_, library_, sysfs_, outcome_);
    _exit(0);
  }

  // Has the candidate ended, or must it?
  void Look() {
    int status;
    rusage usage;
    pid_t ended = wait4(child_, &status, WNOHANG, &usage);
    if (ended == child_) {
      Finish(status, usage);
      return;
    }
    uint64_t now = edgert::NowNs();
    if (now >= deadline_ && !over_time_) {
      over_time_ = true;
      kill(-child_, SIGKILL);
      // The end is noticed by the signal it sends.
      deadline_ = UINT64_MAX;
    } else if (now >= next_watch_ && !over_memory_) {
      next_watch_ = now + kWatchNs;
      char path[64];
      snprintf(path, sizeof(path), "/proc/%d/statm", static_cast<int>(child_));
      uint64_t base = uint64_t{outcome_->resident_kib.load()} * 1024;
      uint64_t resident = ReadMemoryUse(path).resident_bytes;
      uint64_t allowed = request_->memory_limit_bytes;
      if (base > 0 && allowed > 0 && resident > base && resident - base > allowed) {
        over_memory_ = true;
        kill(-child_, SIGKILL);
      }
    }
  }

  void Finish(int status, const rusage& usage) {
    // What it may have started itself.
    kill(-child_, SIGKILL);
    unlink(library_);
    const char* where = StageText(outcome_->stage.load());
    unsigned long long limit_mb = request_->memory_limit_bytes / 1000000;
    char text[sizeof(outcome_->error)];
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && outcome_->done) {
      outcome_->error[sizeof(outcome_->error) - 1] = '\0';
      // The candidate could write here, too.
      bool fine = outcome_->failure == Failure::kNone;
      bool sane = outcome_->failure <= Failure::kDevice &&
                  (!fine || outcome_->num_samples == request_->repeat);
      Report(sane ? outcome_->failure : Failure::kCrash,
             sane ? outcome_->error : "it overwrote the agent's memory");
      return;
    }
    if (over_memory_) {
      snprintf(text, sizeof(text), "it took more than the %llu MB of memory it may have, %s",
               limit_mb, where);
      Report(Failure::kMemory, text);
    } else if (over_time_) {
      snprintf(text, sizeof(text), "not done within %g s: ended %s", request_->timeout_s, where);
      Report(Failure::kTimeout, text);
    } else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
      snprintf(text, sizeof(text), "the system killed it %s: out of memory?", where);
      Report(Failure::kMemory, text);
    } else if (NearItsLimit(usage)) {
      snprintf(text, sizeof(text), "it ended %s when the %llu MB of memory it may have were full",
               where, limit_mb);
      Report(Failure::kMemory, text);
    } else if (WIFSIGNALED(status)) {
      snprintf(text, sizeof(text), "ended by signal %d (%s) %s", WTERMSIG(status),
               strsignal(WTERMSIG(status)), where);
      Report(CrashKind(), text);
    } else {
      snprintf(text, sizeof(text), "it ended its process with exit code %d %s", WEXITSTATUS(status),
               where);
      Report(CrashKind(), text);
    }
  }

  // A damaged library makes the loader itself crash.
  Failure CrashKind() const {
    return outcome_->stage.load() == Stage::kLoading ? Failure::kLoad : Failure::kCrash;
  }

  // A program whose memory is refused rarely says so: it writes to NULL.
  bool NearItsLimit(const rusage& usage) const {
    uint64_t peak = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
    uint64_t base = uint64_t{outcome_->resident_kib.load()} * 1024;
    uint64_t limit = request_->memory_limit_bytes;
    return base > 0 && limit > 0 && peak > base && peak - base > limit / 8 * 7;
  }

  void EndCandidate() {
    if (child_ > 0) {
      kill(-child_, SIGKILL);
      kill(child_, SIGKILL);  // in case it has no group yet
      waitpid(child_, nullptr, 0);
    }
    store_.Release(request_);
    request_ = nullptr;
  }

  void Report(Failure failure, const char* error) {
    uint32_t samples = outcome_->num_samples < kMaxSamples ? outcome_->num_samples : 0;
    output_.Begin(FrameType::kResult);
    output_.Put(request_->ticket);
    output_.Put(static_cast<uint8_t>(failure));
    output_.Text(error);
    output_.Put(outcome_->max_relative_error);
    for (const DeviceState* state : {&outcome_->before, &outcome_->after}) {
      output_.Put(state->clock_khz);
      output_.Put(state->temperature_c);
      output_.Put(state->throttled);
    }
    output_.Put(samples);
    for (uint32_t i = 0; i < samples; ++i) output_.Put(outcome_->samples_s[i]);
    output_.End();
    store_.Release(request_);
    request_ = nullptr;
    child_ = 0;
  }

  const char* folder_;
  const char* sysfs_;
  Input input_;
  Output output_;
  Store store_;
  Outcome* outcome_ = nullptr;
  int lock_ = -1;
  bool open_ = true;
  sigset_t usual_signals_;
  uint64_t last_heard_ = 0;

  // The candidate that runs.
  Request* request_ = nullptr;
  pid_t child_ = 0;
  unsigned count_ = 0;
  char library_[kMaxPath];
  uint64_t deadline_ = 0;
  uint64_t next_watch_ = 0;
  bool over_time_ = false;
  bool over_memory_ = false;
};

}  // namespace
}  // namespace agent

int main(int argc, char** argv) {
  const char* sysfs = argc == 4 && strcmp(argv[2], "--sysfs") == 0 ? argv[3] : "/sys";
  bool known = argc == 2 || (argc == 4 && sysfs == argv[3]);
  if (!known || argv[1][0] != '/' || strlen(argv[1]) + 64 > agent::kMaxPath) {
    fputs(
        "usage: edgesdk-agent FOLDER [--sysfs DIR]\n"
        "\n"
        "Measures candidates for edgesdk, which speaks to it on standard input and output.\n"
        "FOLDER, an absolute path, is removed at the end with all files in it.\n",
        stderr);
    return agent::kExitUsage;
  }
  return agent::Agent(argv[1], sysfs).Main();
}
