#include "candidate.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include "../launcher/npy.h"
#include "edgesdk_model.h"
#include "integer.h"
#include "kernel_error.h"
#include "platform.h"
#include "thread_pool.h"

// edgert's, in tvm_symbols.cc: what the candidate's pointers of the same names are set to.
extern "C" {
extern int (*__TVMBackendParallelLaunch)(edgert::ParallelLambda, void*, int);
extern void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void*);
}

namespace agent {
namespace {

// Memory around an output that must stay as it is.
constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0xa5;
// All bits set is NaN in every floating-point type: an element that is never written shows.
constexpr unsigned char kUnwritten = 0xff;
constexpr uint32_t kMaxNumber = 1u << 30;

struct DataType {
  DLDataTypeCode code;
  uint8_t bits;
};

DataType DlpackType(edgesdk_dtype dtype) {
  uint8_t bits = static_cast<uint8_t>(launcher::DtypeBytes(dtype) * 8);
  switch (dtype) {
    case EDGESDK_FLOAT32:
    case EDGESDK_FLOAT64:
    case EDGESDK_FLOAT16:
      return {kDLFloat, bits};
    case EDGESDK_BFLOAT16:
      return {kDLBfloat, bits};
    case EDGESDK_BOOL:
      return {kDLBool, bits};
    case EDGESDK_INT8:
    case EDGESDK_INT16:
    case EDGESDK_INT32:
    case EDGESDK_INT64:
      return {kDLInt, bits};
    default:
      return {kDLUInt, bits};
  }
}

bool IsFloat(edgesdk_dtype dtype) {
  return dtype == EDGESDK_FLOAT32 || dtype == EDGESDK_FLOAT64 || dtype == EDGESDK_FLOAT16 ||
         dtype == EDGESDK_BFLOAT16;
}

struct Comparison {
  bool equal;
  double relative;  // the largest difference, relative to the largest expected magnitude
};

// As the launcher's self-test compares: integers exactly, NaN and infinity where they should be.
Comparison Compare(const Argument& argument, const void* data, double tolerance) {
  const void* expected = argument.blob->data;
  size_t size = static_cast<size_t>(argument.blob->total);
  if (size == 0 || memcmp(data, expected, size) == 0) return {true, 0};
  size_t count = size / launcher::DtypeBytes(argument.dtype);
  double largest = 0;
  double difference = 0;
  for (size_t i = 0; i < count; ++i) {
    double a = launcher::ElementAsDouble(argument.dtype, data, i);
    double b = launcher::ElementAsDouble(argument.dtype, expected, i);
    if (isfinite(b) && fabs(b) > largest) largest = fabs(b);
    if ((isnan(a) && isnan(b)) || a == b) continue;
    double distance = fabs(a - b);
    if (!isfinite(distance)) distance = static_cast<double>(INFINITY);
    if (distance > difference) difference = distance;
  }
  double relative = largest > 0 ? difference / largest : difference;
  return {IsFloat(argument.dtype) && relative <= tolerance, relative};
}

using GetApi = const edgesdk_api* (*)(uint32_t);

class Candidate {
 public:
  Candidate(const Request& request, const char* path, const char* sysfs, Outcome* outcome)
      : request_(request), path_(path), sysfs_(sysfs), outcome_(outcome) {}

  void Run() {
    if (Prepare() && Load() && CheckFirstRun()) Time();
  }

 private:
  struct Sample {
    double calls_s;    // in the candidate alone
    double elapsed_s;  // with the emptying of caches between
  };

  void Enter(Stage stage) { outcome_->stage.store(stage); }

  __attribute__((format(printf, 3, 4))) bool Fail(Failure failure, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(outcome_->error, sizeof(outcome_->error), format, arguments);
    va_end(arguments);
    outcome_->failure = failure;
    return false;
  }

  // Everything that is not the candidate's comes first, so that the limit counts the candidate
  // only.
  bool Prepare() {
    if (request_.threads > 0) {
      char text[16];
      snprintf(text, sizeof(text), "%u", static_cast<unsigned>(request_.threads));
      setenv("EDGESDK_NUM_THREADS", text, 1);
    }
    edgert::ThreadPool::Shared();
    if (request_.flush_cache_bytes > 0) {
      flush_ = static_cast<unsigned char*>(edgert::AllocateAligned(request_.flush_cache_bytes));
      if (flush_ == nullptr) {
        return Fail(Failure::kDevice, "no memory for emptying a cache of %llu bytes",
                    static_cast<unsigned long long>(request_.flush_cache_bytes));
      }
      // Pages never written are all one and the same page of zeros, which would empty no cache.
      memset(flush_, 1, static_cast<size_t>(request_.flush_cache_bytes));
    }
    for (uint32_t i = 0; i < request_.num_arguments; ++i) {
      const Argument& argument = request_.arguments[i];
      if (!(argument.is_output ? BindOutput(i) : BindInput(i))) return false;
      DataType type = DlpackType(argument.dtype);
      DLTensor& tensor = tensors_[i];
      tensor.device = DLDevice{kDLCPU, 0};
      tensor.ndim = argument.ndim;
      tensor.dtype = DLDataType{static_cast<uint8_t>(type.code), type.bits, 1};
      tensor.shape = const_cast<int64_t*>(argument.shape);
      tensor.strides = nullptr;
      tensor.byte_offset = 0;
      arguments_[i].type_index = kTVMFFIDLTensorPtr;
      arguments_[i].v_ptr = &tensor;
    }
    return true;
  }

  bool BindInput(uint32_t index) {
    tensors_[index].data = request_.arguments[index].blob->data;
    return true;
  }

  bool BindOutput(uint32_t index) {
    uint64_t size = request_.arguments[index].blob->total;
    unsigned char* memory =
        static_cast<unsigned char*>(edgert::AllocateAligned(size + 2 * kGuardBytes));
    if (memory == nullptr) {
      return Fail(Failure::kDevice, "no memory for output %u of %llu bytes",
                  static_cast<unsigned>(index), static_cast<unsigned long long>(size));
    }
    memset(memory, kGuard, kGuardBytes);
    memset(memory + kGuardBytes, kUnwritten, static_cast<size_t>(size));
    memset(memory + kGuardBytes + size, kGuard, kGuardBytes);
    tensors_[index].data = memory + kGuardBytes;
    return true;
  }

  bool Load() {
    Enter(Stage::kWriting);
    int descriptor = open(path_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    size_t size = static_cast<size_t>(request_.library->total);
    size_t written = 0;
    bool ok = descriptor >= 0;
    while (ok && written < size) {
      ssize_t count = write(descriptor, request_.library->data + written, size - written);
      ok = count > 0 || (count < 0 && errno == EINTR);
      if (count > 0) written += static_cast<size_t>(count);
    }
    int reason = errno;
    if (descriptor >= 0 && close(descriptor) != 0 && ok) {
      reason = errno;
      ok = false;
    }
    if (!ok) {
      unlink(path_);
      return Fail(Failure::kDevice, "cannot write the candidate of %zu bytes to %s: %s", size,
                  path_, strerror(reason));
    }
    Enter(Stage::kLoading);
    LimitMemory();
    dlerror();
    void* library = dlopen(path_, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) Fail(Failure::kLoad, "%s", DlError());
    unlink(path_);
    if (library == nullptr) return false;
    void* open = dlsym(library, "edgesdk_get_api");
    if (open != nullptr) return OpenModel(library, reinterpret_cast<GetApi>(open));
    void* kernel = dlsym(library, request_.symbol);
    if (kernel == nullptr) {
      char symbol[kMaxSymbol + 16];
      snprintf(symbol, sizeof(symbol), "__tvm_ffi_%s", request_.symbol);
      kernel = dlsym(library, symbol);
    }
    if (kernel == nullptr) {
      return Fail(Failure::kLoad, "the library has no function '%s'", request_.symbol);
    }
    kernel_ = reinterpret_cast<TVMFFISafeCallType>(kernel);
    Fill(library, "__TVMBackendParallelLaunch",
         reinterpret_cast<void*>(__TVMBackendParallelLaunch));
    Fill(library, "__TVMBackendAllocWorkspace",
         reinterpret_cast<void*>(__TVMBackendAllocWorkspace));
    Fill(library, "__TVMBackendFreeWorkspace", reinterpret_cast<void*>(__TVMBackendFreeWorkspace));
    return true;
  }

  // A candidate for an accelerator is a whole model, of which one run makes several calls.
  bool OpenModel(void* library, GetApi get_api) {
    api_ = get_api(EDGESDK_ABI_VERSION);
    void* calls = dlsym(library, "edgesdk_candidate_calls");
    if (api_ == nullptr || calls == nullptr) {
      return Fail(Failure::kLoad, "the candidate is of another version than the agent");
    }
    calls_per_run_ = *static_cast<const uint32_t*>(calls);
    edgesdk_options options = {};
    options.struct_size = sizeof(options);
    options.error_buffer = outcome_->error;
    options.error_buffer_size = sizeof(outcome_->error);
    edgesdk_status status = api_->open(EDGESDK_ABI_VERSION, &options, &model_);
    if (status != EDGESDK_OK) {
      outcome_->failure = status == EDGESDK_ERROR_OUT_OF_MEMORY ? Failure::kMemory : Failure::kLoad;
      return false;
    }
    int32_t inputs = 0;
    int32_t outputs = 0;
    for (uint32_t i = 0; i < request_.num_arguments && status == EDGESDK_OK; ++i) {
      const Argument& argument = request_.arguments[i];
      size_t size = static_cast<size_t>(argument.blob->total);
      status = argument.is_output ? api_->set_output(model_, outputs++, tensors_[i].data, size)
                                  : api_->set_input(model_, inputs++, tensors_[i].data, size);
    }
    return status == EDGESDK_OK || Fail(Failure::kLoad, "%s", api_->last_error(model_));
  }

  // What moves between host and device is no part of the call.
  bool KeepOnDevice() {
    if (model_ == nullptr) return true;
    edgesdk_status status = EDGESDK_OK;
    for (int32_t i = 0; i < api_->num_inputs(model_) && status == EDGESDK_OK; ++i) {
      status = api_->set_input_device(model_, i, nullptr, 0);
    }
    for (int32_t i = 0; i < api_->num_outputs(model_) && status == EDGESDK_OK; ++i) {
      status = api_->set_output_device(model_, i, nullptr, 0);
    }
    return status == EDGESDK_OK || Raised();
  }

  static const char* DlError() {
    const char* text = dlerror();
    return text != nullptr ? text : "it cannot be loaded";
  }

  static void Fill(void* library, const char* name, void* function) {
    void** pointer = static_cast<void**>(dlsym(library, name));
    if (pointer != nullptr) *pointer = function;
  }

  // Linux before 4.7, and qemu, do not enforce this: the agent watches the resident size, too.
  void LimitMemory() {
    MemoryUse use = ReadMemoryUse("/proc/self/statm");
    outcome_->resident_kib.store(static_cast<uint32_t>(use.resident_bytes / 1024));
    if (request_.memory_limit_bytes == 0 || use.data_bytes == 0) return;
    uint64_t limit = use.data_bytes + request_.memory_limit_bytes;
    if (limit < use.data_bytes || limit > static_cast<uint64_t>(RLIM_INFINITY)) return;
    rlimit wanted = {static_cast<rlim_t>(limit), static_cast<rlim_t>(limit)};
    setrlimit(RLIMIT_DATA, &wanted);
  }

  bool Call() {
    if (model_ != nullptr) return api_->run(model_) == EDGESDK_OK;
    TVMFFIAny result;
    memset(&result, 0, sizeof(result));
    return kernel_(nullptr, arguments_, static_cast<int32_t>(request_.num_arguments), &result) == 0;
  }

  bool Raised() {
    const char* message =
        model_ != nullptr ? api_->last_error(model_) : edgert::KernelError::Message();
    // What edgert says when AllocWorkspace fails.
    bool memory = strncmp(message, "out of memory", 13) == 0;
    return Fail(memory ? Failure::kMemory : Failure::kKernel, "%s",
                message[0] != '\0' ? message : "it failed without a message");
  }

  bool CheckFirstRun() {
    Enter(Stage::kFirstRun);
    if (!Call()) return Raised();
    for (uint32_t i = 0; i < request_.num_arguments; ++i) {
      const Argument& argument = request_.arguments[i];
      if (!argument.is_output) continue;
      const unsigned char* data = static_cast<const unsigned char*>(tensors_[i].data);
      Comparison found = Compare(argument, data, request_.tolerance);
      if (found.relative > outcome_->max_relative_error) {
        outcome_->max_relative_error = found.relative;
      }
      if (!found.equal) {
        return Fail(Failure::kWrong, "argument %u differs by %.3g (relative; %.3g is allowed)",
                    static_cast<unsigned>(i), found.relative,
                    IsFloat(argument.dtype) ? request_.tolerance : 0.0);
      }
      if (!Untouched(data - kGuardBytes) || !Untouched(data + argument.blob->total)) {
        return Fail(Failure::kWrong, "it writes outside of argument %u", static_cast<unsigned>(i));
      }
    }
    return true;
  }

  static bool Untouched(const unsigned char* guard) {
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (guard[i] != kGuard) return false;
    }
    return true;
  }

  void Time() {
    Enter(Stage::kTiming);
    if (!KeepOnDevice()) return;
    for (uint32_t i = 0; i < request_.warmup; ++i) {
      if (!Call()) {
        Raised();
        return;
      }
    }
    // Read while the clock is still up from the calls before.
    outcome_->before = ReadDeviceState(sysfs_);
    uint32_t number = request_.number > 0 ? request_.number : 1;
    for (uint32_t i = 0; i < request_.repeat; ++i) {
      Sample sample = TakeSample(number);
      while (request_.number == 0 && sample.elapsed_s * 1e3 < request_.min_repeat_ms &&
             number < kMaxNumber && outcome_->failure == Failure::kNone) {
        // As TVM's time_evaluator: straight to the number that should do, and never little by
        // little.
        double ratio = request_.min_repeat_ms / (sample.elapsed_s * 1e3 + 1e-9);
        double next = fmax(number * ratio + 1, number * 1.618 + 1);
        number = next < kMaxNumber ? static_cast<uint32_t>(next) : kMaxNumber;
        sample = TakeSample(number);
      }
      if (outcome_->failure != Failure::kNone) return;
      if (sample.calls_s <= 0) {
        Fail(Failure::kDevice, "%u calls took no time by the device's clock",
             static_cast<unsigned>(number));
        return;
      }
      outcome_->samples_s[i] = sample.calls_s / number / calls_per_run_;
      outcome_->num_samples = i + 1;
    }
    outcome_->after = ReadDeviceState(sysfs_);
  }

  Sample TakeSample(uint32_t number) {
    bool ok = true;
    uint64_t calls_ns = 0;
    uint64_t start = edgert::NowNs();
    if (flush_ == nullptr) {
      for (uint32_t i = 0; i < number && ok; ++i) ok = Call();
      calls_ns = edgert::NowNs() - start;
    } else {
      for (uint32_t i = 0; i < number && ok; ++i) {
        EmptyCaches();
        uint64_t before = edgert::NowNs();
        ok = Call();
        calls_ns += edgert::NowNs() - before;
      }
    }
    uint64_t elapsed_ns = edgert::NowNs() - start;
    if (!ok) Raised();
    return {static_cast<double>(calls_ns) * 1e-9, static_cast<double>(elapsed_ns) * 1e-9};
  }

  // Every thread reads the whole block: that pushes what the candidate uses out of the core's own
  // caches and out of the shared one.
  void EmptyCaches() {
    auto read_all = [](int, edgert::ParallelEnv*, void* data) {
      const Candidate* self = static_cast<const Candidate*>(data);
      const volatile unsigned char* block = self->flush_;
      for (uint64_t i = 0; i < self->request_.flush_cache_bytes; i += 32) (void)block[i];
      return 0;
    };
    edgert::ThreadPool::Shared().Launch(read_all, this, 0, 0);
  }

  const Request& request_;
  const char* path_;
  const char* sysfs_;
  Outcome* outcome_;
  unsigned char* flush_ = nullptr;
  TVMFFISafeCallType kernel_ = nullptr;
  const edgesdk_api* api_ = nullptr;
  edgesdk_model* model_ = nullptr;
  uint32_t calls_per_run_ = 1;
  DLTensor tensors_[kMaxArguments] = {};
  TVMFFIAny arguments_[kMaxArguments] = {};
};

}  // namespace

void RunCandidate(const Request& request, const char* path, const char* sysfs, Outcome* outcome) {
  Candidate(request, path, sysfs, outcome).Run();
  outcome->done = true;
}

MemoryUse ReadMemoryUse(const char* statm) {
  FILE* file = fopen(statm, "r");
  if (file == nullptr) return {0, 0};
  // Pages: size, resident, shared, text, unused, data and stack.
  char line[256];
  bool read = fgets(line, sizeof(line), file) != nullptr;
  fclose(file);
  uint64_t fields[6];
  const char* at = line;
  for (uint64_t& field : fields) {
    const char* end = at;
    if (read) field = static_cast<uint64_t>(edgert::ParseInteger(at, &end));
    if (end == at) return {0, 0};
    at = end;
  }
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return {fields[1] * page, fields[5] * page};
}

}  // namespace agent
