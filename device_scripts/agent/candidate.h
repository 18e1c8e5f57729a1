// candidate.h: one candidate in a process of its own: loaded, checked, timed.
//
// The process tells what it found through memory that it shares with the agent. So what it had
// written before a crash is not lost, and there is no channel that a crash could leave half used.
#ifndef EDGESDK_AGENT_CANDIDATE_H_
#define EDGESDK_AGENT_CANDIDATE_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "device_state.h"
#include "edgesdk_model.h"

namespace agent {

constexpr size_t kMaxArguments = 128;
constexpr size_t kMaxDims = 16;
constexpr size_t kMaxSamples = 1024;
constexpr size_t kMaxSymbol = 256;
constexpr size_t kMaxPath = 1024;

// What went wrong; the numbers are part of the protocol.
enum class Failure : uint8_t {
  kNone = 0,
  kLoad = 1,     // the library cannot be loaded
  kCrash = 2,    // ended by a signal, or ended itself
  kTimeout = 3,  // not done in time
  kMemory = 4,   // wanted more memory than it may have
  kWrong = 5,    // its results differ from the expected ones
  kKernel = 6,   // it raised an error
  kDevice = 7,   // the device is at fault: disk full, no memory for the arguments
};

enum class Stage : int { kStarting, kWriting, kLoading, kFirstRun, kTiming };

// Bytes that the host has put here; `problem` says why they could not be taken.
struct Blob {
  unsigned char key[32];
  unsigned char* data = nullptr;  // aligned as edgert aligns
  uint64_t total = 0;
  uint64_t received = 0;
  uint32_t users = 0;  // requests that wait for it or use it
  bool dropped = false;
  char problem[96] = {0};
  Blob* next = nullptr;
};

struct Argument {
  bool is_output;
  edgesdk_dtype dtype;
  int32_t ndim;
  int64_t shape[kMaxDims];
  Blob* blob;  // an input's data, or what an output should become
};

struct Request {
  uint64_t ticket;
  char symbol[kMaxSymbol];
  Blob* library;
  uint32_t number;  // calls of a sample; 0: as many as take min_repeat_ms
  uint32_t repeat;
  uint32_t warmup;
  uint32_t threads;  // 0: as EDGESDK_NUM_THREADS says, or all CPUs
  double min_repeat_ms;
  double tolerance;
  double timeout_s;
  uint64_t flush_cache_bytes;
  uint64_t memory_limit_bytes;  // beyond the arguments
  uint32_t num_arguments;
  Argument arguments[kMaxArguments];
  char problem[256];  // why it cannot be measured, or ""
  Request* next;
};

// Written by the candidate's process. The agent believes nothing that it says about lengths.
struct Outcome {
  std::atomic<Stage> stage;
  std::atomic<uint32_t> resident_kib;  // before the candidate was loaded; 0: not that far
  bool done;
  Failure failure;
  char error[1024];
  double max_relative_error;
  DeviceState before;
  DeviceState after;
  uint32_t num_samples;
  double samples_s[kMaxSamples];
};

// Does the whole work in a forked process. `path` is where the library is written to and loaded
// from; nothing is left there.
void RunCandidate(const Request& request, const char* path, const char* sysfs, Outcome* outcome);

// Bytes of memory that a process has now, 0 if unknown. `self`: /proc/self/statm, or of another.
struct MemoryUse {
  uint64_t resident_bytes;
  uint64_t data_bytes;  // private and writable, what RLIMIT_DATA counts
};
MemoryUse ReadMemoryUse(const char* statm);

}  // namespace agent

#endif  // EDGESDK_AGENT_CANDIDATE_H_
