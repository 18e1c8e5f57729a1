// The C API as a program uses it that has two models linked in.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "edgesdk_model.h"

extern "C" {
edgesdk_status edgesdk_open_model_a(uint32_t, const edgesdk_options*, edgesdk_model**);
edgesdk_status edgesdk_open_model_b(uint32_t, const edgesdk_options*, edgesdk_model**);
edgesdk_status edgesdk_open_model_shapes(uint32_t, const edgesdk_options*, edgesdk_model**);
void model_b_need_cpu_feature(const char* name);
}

namespace {

using Open = edgesdk_status (*)(uint32_t, const edgesdk_options*, edgesdk_model**);
constexpr int kCount = 1000;
constexpr size_t kBytes = kCount * sizeof(float);

// Memory aligned to 64 bytes, and the same one byte further.
struct Buffer {
  alignas(64) unsigned char bytes[kBytes + 64] = {0};
  float* aligned() { return reinterpret_cast<float*>(bytes); }
  unsigned char* unaligned() { return bytes + 1; }
};

class Handle {
 public:
  explicit Handle(Open open, const edgesdk_options* options = nullptr) {
    CHECK_EQ(open(EDGESDK_ABI_VERSION, options, &model_), EDGESDK_OK);
  }
  ~Handle() { edgesdk_model_close(model_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  operator edgesdk_model*() { return model_; }

 private:
  edgesdk_model* model_ = nullptr;
};

std::vector<float> Input(float scale) {
  std::vector<float> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = i % 3 == 0 ? -scale : scale;
  return values;
}

void CheckValues(const void* data, const std::vector<float>& x, float factor) {
  std::vector<float> values(kCount);
  memcpy(values.data(), data, kBytes);
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) {
    float product = factor * static_cast<float>(i) * x[i];
    if (values[i] != (product > 0 ? product : 0) + 1) ++wrong;
  }
  CHECK_EQ(wrong, 0);
}

void CheckOutput(edgesdk_model* model, const std::vector<float>& x, float factor) {
  const void* data = nullptr;
  size_t size_bytes = 0;
  CHECK_EQ(edgesdk_model_get_output(model, 0, &data, &size_bytes), EDGESDK_OK);
  CHECK_EQ(size_bytes, kBytes);
  CheckValues(data, x, factor);
}

TEST(handles_go_to_the_library_that_opened_them) {
  Handle a(edgesdk_open_model_a);
  Handle b(edgesdk_open_model_b);
  CHECK_TEXT(edgesdk_model_name(a), "model_a");
  CHECK_TEXT(edgesdk_model_name(b), "model_b");
  std::vector<float> x = Input(1);
  for (edgesdk_model* model : {static_cast<edgesdk_model*>(a), static_cast<edgesdk_model*>(b)}) {
    CHECK_EQ(edgesdk_model_set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
    CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  }
  CheckOutput(a, x, 2);
  CheckOutput(b, x, 3);
}

TEST(variants_take_turns_and_keep_their_bindings) {
  Handle model(edgesdk_open_model_shapes);
  CHECK_EQ(edgesdk_model_num_variants(model), 2);
  CHECK_EQ(edgesdk_model_variant(model), 0);
  std::vector<float> x = Input(0.5f);
  CHECK_EQ(edgesdk_model_set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  const void* first = nullptr;
  CHECK_EQ(edgesdk_model_get_output(model, 0, &first, nullptr), EDGESDK_OK);

  CHECK_EQ(edgesdk_model_select_variant(model, 1), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_variant(model), 1);
  edgesdk_tensor_info info;
  CHECK_EQ(edgesdk_model_input_info(model, 0, &info), EDGESDK_OK);
  CHECK_EQ(info.ndim, 1);
  CHECK_EQ(info.shape[0], 4);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_ERROR_INPUT_MISSING);
  const float few[] = {1, -2, 3, -4};
  CHECK_EQ(edgesdk_model_set_input(model, 0, few, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(edgesdk_model_set_input(model, 0, few, sizeof(few)), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  const void* second = nullptr;
  size_t size_bytes = 0;
  CHECK_EQ(edgesdk_model_get_output(model, 0, &second, &size_bytes), EDGESDK_OK);
  CHECK_EQ(size_bytes, sizeof(few));
  CHECK_EQ(memcmp(second, few, sizeof(few)), 0);
  CheckValues(first, x, 2);  // the other variant's output is still there

  CHECK_EQ(edgesdk_model_select_variant(model, 0), EDGESDK_OK);
  for (float& value : x) value *= 4;  // where the input is still bound
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CheckOutput(model, x, 2);
}

TEST(variants_are_described_before_they_are_used) {
  Handle model(edgesdk_open_model_shapes);
  edgesdk_tensor_info info;
  CHECK_EQ(edgesdk_model_variant_input_info(model, 1, 0, &info), EDGESDK_OK);
  CHECK_EQ(info.size_bytes, size_t{16});
  CHECK_EQ(edgesdk_model_variant_output_info(model, 0, 0, &info), EDGESDK_OK);
  CHECK_EQ(info.size_bytes, kBytes);
  for (int32_t variant : {-1, 2}) {
    CHECK_EQ(edgesdk_model_variant_input_info(model, variant, 0, &info),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK_EQ(edgesdk_model_select_variant(model, variant), EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(edgesdk_model_last_error(model), "the model has 2") != nullptr);
  }
  CHECK_EQ(edgesdk_model_variant_output_info(model, 1, 1, &info), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(edgesdk_model_select_variant(nullptr, 0), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(edgesdk_model_num_variants(nullptr), 0);
  CHECK_EQ(edgesdk_model_variant(model), 0);
  Handle single(edgesdk_open_model_a);
  CHECK_EQ(edgesdk_model_num_variants(single), 1);
  CHECK_EQ(edgesdk_model_select_variant(single, 0), EDGESDK_OK);
}

TEST(says_what_it_is) {
  Handle model(edgesdk_open_model_a);
  CHECK_TEXT(edgesdk_model_target(model), "test");
  CHECK_TEXT(edgesdk_model_build_id(model), "0123456789abcdef");
  CHECK_EQ(edgesdk_model_num_inputs(model), 1);
  CHECK_EQ(edgesdk_model_num_outputs(model), 1);
  CHECK_EQ(edgesdk_model_num_layers(model), 3);
  CHECK_EQ(edgesdk_model_num_threads(model), 3);
  edgesdk_tensor_info info;
  CHECK_EQ(edgesdk_model_input_info(model, 0, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "x=1:\"0");
  CHECK_EQ(info.dtype, EDGESDK_FLOAT32);
  CHECK_EQ(info.ndim, 2);
  CHECK_EQ(info.shape[0], 10);
  CHECK_EQ(info.shape[1], 100);
  CHECK_EQ(info.size_bytes, kBytes);
  CHECK_EQ(edgesdk_model_output_info(model, 0, &info), EDGESDK_OK);
  CHECK_TEXT(info.name, "y");
}

TEST(inputs_are_read_where_they_are) {
  Handle model(edgesdk_open_model_a);
  Buffer buffer;
  for (int aligned = 0; aligned < 2; ++aligned) {
    void* place = aligned ? static_cast<void*>(buffer.aligned()) : buffer.unaligned();
    CHECK_EQ(edgesdk_model_set_input(model, 0, place, kBytes), EDGESDK_OK);
    // Bound once, read at every run.
    for (float scale : {1.0f, 5.0f}) {
      std::vector<float> x = Input(scale);
      memcpy(place, x.data(), kBytes);
      CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
      CheckOutput(model, x, 2);
      CHECK(memcmp(place, x.data(), kBytes) == 0);
    }
  }
  Buffer other;
  std::vector<float> x = Input(9);
  memcpy(other.aligned(), x.data(), kBytes);
  CHECK_EQ(edgesdk_model_set_input(model, 0, other.aligned(), kBytes), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CheckOutput(model, x, 2);
}

TEST(outputs_are_written_where_they_are_wanted) {
  Handle model(edgesdk_open_model_a);
  std::vector<float> x = Input(1);
  CHECK_EQ(edgesdk_model_set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
  Buffer buffer;
  const void* data = nullptr;
  for (int aligned = 0; aligned < 2; ++aligned) {
    void* place = aligned ? static_cast<void*>(buffer.aligned()) : buffer.unaligned();
    memset(buffer.bytes, 0x55, sizeof(buffer.bytes));
    CHECK_EQ(edgesdk_model_set_output(model, 0, place, kBytes), EDGESDK_OK);
    CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
    CheckValues(place, x, 2);
    CHECK_EQ(edgesdk_model_get_output(model, 0, &data, nullptr), EDGESDK_OK);
    CHECK(data == place);
    CHECK_EQ(int{buffer.bytes[kBytes + 1]}, 0x55);  // nothing behind it was touched
    if (!aligned) CHECK_EQ(int{buffer.bytes[0]}, 0x55);
  }
  memset(buffer.bytes, 0x55, sizeof(buffer.bytes));
  CHECK_EQ(edgesdk_model_set_output(model, 0, nullptr, 0), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CHECK_EQ(int{buffer.bytes[0]}, 0x55);
  CheckOutput(model, x, 2);
}

TEST(wrong_arguments_are_refused_with_a_reason) {
  Handle model(edgesdk_open_model_a);
  Buffer buffer;
  float* place = buffer.aligned();
  CHECK_TEXT(edgesdk_model_last_error(model), "");
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_ERROR_INPUT_MISSING);
  CHECK_TEXT(edgesdk_model_last_error(model), "input 'x=1:\"0' was never set");
  CHECK_EQ(edgesdk_model_set_input(model, 0, place, kBytes - 1), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(edgesdk_model_last_error(model), "input 'x=1:\"0' needs 4000 bytes, got 3999");
  CHECK_EQ(edgesdk_model_set_input(model, 0, nullptr, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(edgesdk_model_last_error(model), "input 'x=1:\"0' needs 4000 bytes, got 4000 at NULL");
  CHECK_EQ(edgesdk_model_set_output(model, 0, place, 1), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(edgesdk_model_last_error(model), "output 'y' has 4000 bytes, got room for 1");
  CHECK_EQ(edgesdk_model_set_output(model, 0, nullptr, kBytes), EDGESDK_ERROR_INVALID_ARGUMENT);
  const void* data = nullptr;
  edgesdk_tensor_info tensor;
  edgesdk_layer_info layer;
  for (int32_t index : {-1, 7, 1 << 30}) {
    std::string number = std::to_string(index);
    auto check = [&](edgesdk_status status, const char* what, const char* has) {
      CHECK_EQ(status, EDGESDK_ERROR_INVALID_ARGUMENT);
      CHECK_TEXT(edgesdk_model_last_error(model),
                 "there is no " + std::string(what) + " " + number + ": the model has " + has);
    };
    check(edgesdk_model_set_input(model, index, place, kBytes), "input", "1");
    check(edgesdk_model_set_output(model, index, place, kBytes), "output", "1");
    check(edgesdk_model_get_output(model, index, &data, nullptr), "output", "1");
    check(edgesdk_model_input_info(model, index, &tensor), "input", "1");
    check(edgesdk_model_output_info(model, index, &tensor), "output", "1");
    check(edgesdk_model_layer_info(model, index, &layer), "layer", "3");
  }
  for (edgesdk_status status :
       {edgesdk_model_get_output(model, 0, nullptr, nullptr),
        edgesdk_model_input_info(model, 0, nullptr), edgesdk_model_output_info(model, 0, nullptr),
        edgesdk_model_layer_info(model, 0, nullptr), edgesdk_model_memory(model, nullptr)}) {
    CHECK_EQ(status, EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(edgesdk_model_last_error(model), "needs a place to write to") != nullptr);
  }
  // None of this spoiled the handle.
  std::vector<float> x = Input(1);
  CHECK_EQ(edgesdk_model_set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CheckOutput(model, x, 2);
}

TEST(no_handle_is_refused_everywhere) {
  edgesdk_tensor_info tensor;
  edgesdk_layer_info layer;
  edgesdk_memory_info memory;
  const void* data = nullptr;
  float value = 0;
  for (edgesdk_status status :
       {edgesdk_model_run(nullptr), edgesdk_model_set_input(nullptr, 0, &value, 4),
        edgesdk_model_set_output(nullptr, 0, &value, 4),
        edgesdk_model_get_output(nullptr, 0, &data, nullptr),
        edgesdk_model_input_info(nullptr, 0, &tensor),
        edgesdk_model_output_info(nullptr, 0, &tensor),
        edgesdk_model_layer_info(nullptr, 0, &layer), edgesdk_model_memory(nullptr, &memory)}) {
    CHECK_EQ(status, EDGESDK_ERROR_INVALID_ARGUMENT);
  }
  CHECK_TEXT(edgesdk_model_last_error(nullptr), "the model handle is NULL");
  CHECK_EQ(edgesdk_model_num_inputs(nullptr) + edgesdk_model_num_outputs(nullptr), 0);
  CHECK_EQ(edgesdk_model_num_layers(nullptr) + edgesdk_model_num_threads(nullptr), 0);
  CHECK_TEXT(edgesdk_model_name(nullptr), "");
  edgesdk_model_set_profiling(nullptr, 1);
  edgesdk_model_close(nullptr);
}

TEST(a_kernels_failure_is_told_and_leaves_the_handle_usable) {
  Handle model(edgesdk_open_model_a);
  std::vector<float> x = Input(1);
  CHECK_EQ(edgesdk_model_set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
  for (int bad : {0, kCount - 1}) {  // in the caller's part of the loop, and in a worker's
    x[bad] = NAN;
    CHECK_EQ(edgesdk_model_run(model), EDGESDK_ERROR_KERNEL);
    CHECK_TEXT(edgesdk_model_last_error(model), "multiply failed: ValueError: x holds a NaN");
    x[bad] = 1;
    CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
    CheckOutput(model, x, 2);
  }
}

TEST(profiling_counts_runs_since_it_was_switched_on) {
  Handle model(edgesdk_open_model_a);
  std::vector<float> x = Input(1);
  edgesdk_model_set_input(model, 0, x.data(), kBytes);
  edgesdk_layer_info layer;
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_layer_info(model, 0, &layer), EDGESDK_OK);
  CHECK_EQ(layer.total_ns, 0u);
  edgesdk_model_set_profiling(model, 1);
  for (int i = 0; i < 3; ++i) CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CHECK_EQ(edgesdk_model_layer_info(model, 0, &layer), EDGESDK_OK);
  CHECK_TEXT(layer.name, "scale of x");
  CHECK_TEXT(layer.kernel, "multiply");
  CHECK(layer.last_ns > 0);
  CHECK(layer.total_ns > layer.last_ns);
  edgesdk_model_set_profiling(model, 1);
  CHECK_EQ(edgesdk_model_layer_info(model, 0, &layer), EDGESDK_OK);
  CHECK_EQ(layer.total_ns, 0u);
}

TEST(memory_is_accounted_for) {
  Handle model(edgesdk_open_model_a);
  edgesdk_memory_info memory;
  CHECK_EQ(edgesdk_model_memory(model, &memory), EDGESDK_OK);
  CHECK_EQ(memory.weights_bytes, kBytes);
  CHECK_EQ(memory.activations_bytes, 2 * 4032u);
  CHECK_EQ(memory.io_bytes, kBytes);
  Buffer buffer;
  edgesdk_model_set_input(model, 0, buffer.unaligned(), kBytes);
  edgesdk_model_set_input(model, 0, buffer.unaligned(), kBytes);
  CHECK_EQ(edgesdk_model_memory(model, &memory), EDGESDK_OK);
  CHECK_EQ(memory.io_bytes, 2 * kBytes);  // one copy, not one per call
}

TEST(open_refuses_and_says_why) {
  char reason[256];
  edgesdk_options options = {};
  options.struct_size = sizeof(options);
  options.error_buffer = reason;
  options.error_buffer_size = sizeof(reason);
  edgesdk_model* model = reinterpret_cast<edgesdk_model*>(&options);
  for (uint32_t version : {0u, EDGESDK_ABI_VERSION + 1}) {
    model = reinterpret_cast<edgesdk_model*>(&options);
    CHECK_EQ(edgesdk_open_model_b(version, &options, &model), EDGESDK_ERROR_ABI);
    CHECK(model == nullptr);
    CHECK_TEXT(reason, "the program was built for ABI version " + std::to_string(version) +
                           " of edgesdk_model.h, this library for 1");
    CHECK(edgesdk_get_api(version) == nullptr);
  }
  CHECK(edgesdk_get_api(EDGESDK_ABI_VERSION) != nullptr);
  CHECK_EQ(edgesdk_get_api(EDGESDK_ABI_VERSION)->struct_size, sizeof(edgesdk_api));
  CHECK_EQ(edgesdk_open_model_b(EDGESDK_ABI_VERSION, &options, nullptr),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  options.num_threads = -4;
  CHECK_EQ(edgesdk_open_model_b(EDGESDK_ABI_VERSION, &options, &model),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_TEXT(reason, "num_threads is -4");
  // The first library's edgesdk_model_open, so that library's last error.
  CHECK_EQ(edgesdk_model_open(99, nullptr, &model), EDGESDK_ERROR_ABI);
  CHECK(strstr(edgesdk_model_last_error(nullptr), "ABI version 99") != nullptr);
}

// A structure whose size was never set would have its fields ignored in silence.
TEST(options_without_their_size_are_refused) {
  edgesdk_options options = {};
  options.num_threads = 1;
  for (size_t size : {size_t{0}, sizeof(options) - 1}) {
    options.struct_size = size;
    edgesdk_model* model = nullptr;
    CHECK_EQ(edgesdk_open_model_a(EDGESDK_ABI_VERSION, &options, &model),
             EDGESDK_ERROR_INVALID_ARGUMENT);
    CHECK(model == nullptr);
  }
  CHECK(strstr(edgesdk_model_last_error(nullptr), "options.struct_size is ") != nullptr);
  struct {  // a newer program's: longer
    edgesdk_options options;
    int more;
  } longer = {};
  longer.options.struct_size = sizeof(longer);
  longer.options.num_threads = 1;
  Handle model(edgesdk_open_model_a, &longer.options);
  CHECK_EQ(edgesdk_model_num_threads(model), 1);
}

// A program that was built with the first release's header, whose structure ended here.
TEST(options_of_older_programs_are_read_as_far_as_they_go) {
  edgesdk_options options = {};
  options.struct_size = offsetof(edgesdk_options, device_index);
  options.num_threads = 1;
  memset(&options.device_index, 0x55, sizeof(options) - options.struct_size);
  Handle model(edgesdk_open_model_a, &options);
  CHECK_EQ(edgesdk_model_num_threads(model), 1);
}

TEST(a_library_for_the_cpu_has_no_device) {
  Handle model(edgesdk_open_model_a);
  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_OK);
  CHECK_TEXT(info.kind, "cpu");
  CHECK_TEXT(info.name, "");
  CHECK_TEXT(info.replays_reason, "");
  CHECK_EQ(info.memory_bytes, 0u);
  CHECK_EQ(edgesdk_model_device_info(model, nullptr), EDGESDK_ERROR_INVALID_ARGUMENT);
  info.struct_size = 0;
  CHECK_EQ(edgesdk_model_device_info(model, &info), EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(edgesdk_model_last_error(model), "struct_size") != nullptr);
  Buffer buffer;
  void* data = nullptr;
  const char* reason = "'model_a' was built for 'test', which has no memory but the CPU's";
  CHECK_EQ(edgesdk_model_set_input_device(model, 0, buffer.bytes, kBytes), EDGESDK_ERROR_DEVICE);
  CHECK_TEXT(edgesdk_model_last_error(model), reason);
  CHECK_EQ(edgesdk_model_set_output_device(model, 0, buffer.bytes, kBytes), EDGESDK_ERROR_DEVICE);
  CHECK_EQ(edgesdk_model_get_input_device(model, 0, &data, nullptr), EDGESDK_ERROR_DEVICE);
  CHECK_EQ(edgesdk_model_get_output_device(model, 0, &data, nullptr), EDGESDK_ERROR_DEVICE);
  CHECK_EQ(edgesdk_model_get_output_device(model, 1, &data, nullptr),
           EDGESDK_ERROR_INVALID_ARGUMENT);
  CHECK_EQ(edgesdk_model_set_input_device(nullptr, 0, nullptr, 0), EDGESDK_ERROR_INVALID_ARGUMENT);
}

TEST(threads_are_limited_per_handle) {
  edgesdk_options options = {};
  options.struct_size = sizeof(options);
  for (int threads : {1, 2, 3, 100}) {
    options.num_threads = threads;
    Handle model(edgesdk_open_model_a, &options);
    CHECK_EQ(edgesdk_model_num_threads(model), threads < 3 ? threads : 3);
    std::vector<float> x = Input(1);
    edgesdk_model_set_input(model, 0, x.data(), kBytes);
    CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
    CheckOutput(model, x, 2);
  }
}

TEST(a_cpu_without_a_needed_feature_is_refused) {
  // One that this CPU lacks: fma4 went with AMD's Bulldozer line, and the emulated CPUs are old.
  const char* missing = nullptr;
  for (const char* name : {
#if defined(__x86_64__)
         "fma4"
#elif defined(__aarch64__)
           "sve2", "i8mm", "bf16", "asimddp"
#else
           "asimddp", "fphp", "crc32"
#endif
       }) {
    model_b_need_cpu_feature(name);
    edgesdk_model* model = nullptr;
    edgesdk_status status = edgesdk_open_model_b(EDGESDK_ABI_VERSION, nullptr, &model);
    edgesdk_model_close(model);
    if (status == EDGESDK_ERROR_DEVICE) missing = name;
  }
  CHECK(missing != nullptr);
  if (missing == nullptr) return;
  model_b_need_cpu_feature(missing);
  char reason[256] = "";
  edgesdk_options options = {};
  options.struct_size = sizeof(options);
  options.error_buffer = reason;
  options.error_buffer_size = sizeof(reason);
  edgesdk_model* model = nullptr;
  CHECK_EQ(edgesdk_open_model_b(EDGESDK_ABI_VERSION, &options, &model), EDGESDK_ERROR_DEVICE);
  CHECK(model == nullptr);
  CHECK_TEXT(reason, "this CPU lacks '" + std::string(missing) +
                         "', which the library built for target 'test' uses");
  options.error_buffer_size = 10;
  CHECK_EQ(edgesdk_open_model_b(EDGESDK_ABI_VERSION, &options, &model), EDGESDK_ERROR_DEVICE);
  CHECK_TEXT(reason, "this CPU ");
#if defined(__x86_64__)
  model_b_need_cpu_feature("sse2");
#else
  model_b_need_cpu_feature(nullptr);
#endif
  Handle fine(edgesdk_open_model_b);
  model_b_need_cpu_feature(nullptr);
}

TEST(handles_run_at_once_on_several_threads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([t] {
      Open open = t % 2 == 0 ? edgesdk_open_model_a : edgesdk_open_model_b;
      for (int i = 0; i < 3; ++i) {
        Handle model(open);
        std::vector<float> x = Input(static_cast<float>(t + 1));
        edgesdk_model_set_input(model, 0, x.data(), kBytes);
        for (int k = 0; k < 50; ++k) {
          CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
          CheckOutput(model, x, t % 2 == 0 ? 2 : 3);
        }
        x[kCount - 1] = NAN;
        CHECK_EQ(edgesdk_model_run(model), EDGESDK_ERROR_KERNEL);
        CHECK_TEXT(edgesdk_model_last_error(model), "multiply failed: ValueError: x holds a NaN");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#if !defined(_WIN32)

TEST(a_forked_child_goes_on_with_its_handle) {
  Handle model(edgesdk_open_model_a);
  std::vector<float> x = Input(1);
  edgesdk_model_set_input(model, 0, x.data(), kBytes);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int before = check::Failures().load();
    for (int i = 0; i < 20; ++i) CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
    CheckOutput(model, x, 2);
    _exit(check::Failures().load() == before ? 0 : 1);
  }
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(edgesdk_model_run(model), EDGESDK_OK);
  CheckOutput(model, x, 2);
}

#endif

#if defined(_WIN32)

void* LoadModel(const std::string& name) { return LoadLibraryA((name + ".dll").c_str()); }

void* Find(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

bool Unload(void* library) { return FreeLibrary(static_cast<HMODULE>(library)) != 0; }

#else

void* LoadModel(const std::string& name) {
  Dl_info where;
  CHECK(dladdr(reinterpret_cast<void*>(edgesdk_open_model_a), &where) != 0);
  std::string path(where.dli_fname);
  path = path.substr(0, path.find_last_of('/') + 1) + "lib" + name + ".so";
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void* Find(void* library, const char* name) { return dlsym(library, name); }

bool Unload(void* library) { return dlclose(library) == 0; }

#endif

// Its workers run its code for as long as the process lives: closing it must not unmap it.
TEST(a_closed_library_may_be_loaded_again) {
  for (int i = 0; i < 3; ++i) {
    void* library = LoadModel("model_late");
    CHECK(library != nullptr);
    if (library == nullptr) return;
    using GetApi = const edgesdk_api* (*)(uint32_t);
    const edgesdk_api* api =
        reinterpret_cast<GetApi>(Find(library, "edgesdk_get_api"))(EDGESDK_ABI_VERSION);
    CHECK(Find(library, "edgert_open") == nullptr);  // only what the header declares is exported
    edgesdk_model* model = nullptr;
    CHECK_EQ(api->open(EDGESDK_ABI_VERSION, nullptr, &model), EDGESDK_OK);
    std::vector<float> x = Input(1);
    CHECK_EQ(api->set_input(model, 0, x.data(), kBytes), EDGESDK_OK);
    CHECK_EQ(api->run(model), EDGESDK_OK);
    CheckOutput(model, x, 5);
    CHECK_TEXT(api->name(model), "model_late");
    api->close(model);
    CHECK(Unload(library));
    // Still there: its code may run on.
    CHECK_EQ(reinterpret_cast<uintptr_t>(api->run) != 0 && api->num_inputs(nullptr) == 0, true);
  }
}

}  // namespace

int main(int argc, char** argv) {
#if defined(_WIN32)
  SetEnvironmentVariableA("EDGESDK_NUM_THREADS", "3");
#else
  setenv("EDGESDK_NUM_THREADS", "3", 1);
#endif
  return check::Main(argc, argv);
}
