// How long a network takes on a GPU, run by run, with its inputs and outputs on the host or kept in
// the GPU's memory. Needs the bundle alone: no CUDA toolkit to build, NVIDIA's driver to run.
//
//     gpu_latency [--runs N] [--on-gpu] [--device N]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include NETWORK_HEADER

namespace {

struct Settings {
  int runs = 1000;
  bool on_gpu = false;
  int device = 0;
};

int Fail(const char* reason) {
  std::fprintf(stderr, "gpu_latency: %s\n", reason);
  return 1;
}

// Values between -1 and 1 for floats, zeros for all else: no network minds them.
void Fill(const edgesdk_tensor_info& info, unsigned char* data) {
  std::memset(data, 0, info.size_bytes);
  if (info.dtype != EDGESDK_FLOAT32) return;
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < info.size_bytes / sizeof(float); ++i) {
    state = 1664525u * state + 1013904223u;  // Numerical Recipes, "ranqd1"
    const float value = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
    std::memcpy(data + i * sizeof(float), &value, sizeof(float));
  }
}

void PrintDevice(edgesdk_model* model) {
  edgesdk_device_info info = {};
  info.struct_size = sizeof(info);
  if (edgesdk_model_device_info(model, &info) != EDGESDK_OK) return;
  if (info.compute_capability == 0) {
    std::printf("%s on the %s\n", edgesdk_model_name(model), info.kind);
    return;
  }
  std::printf("%s on %s (sm_%d), %s of sm_%d, driver for CUDA %d.%d, %s\n",
              edgesdk_model_name(model), info.name, info.compute_capability,
              info.code_is_intermediate ? "PTX" : "machine code", info.code_architecture,
              info.driver_version / 1000, info.driver_version % 1000 / 10,
              info.replays ? "replayed as a graph" : info.replays_reason);
  const auto kib = [](std::size_t bytes) { return static_cast<double>(bytes) / 1024; };
  std::printf("GPU memory: weights %.0f KiB, activations %.0f KiB, inputs and outputs %.0f KiB\n",
              kib(info.weights_bytes), kib(info.activations_bytes), kib(info.io_bytes));
}

// All outputs, one behind the other.
std::vector<unsigned char> Outputs(edgesdk_model* model) {
  std::vector<unsigned char> all;
  for (std::int32_t i = 0; i < edgesdk_model_num_outputs(model); ++i) {
    const void* data = nullptr;
    std::size_t size_bytes = 0;
    if (edgesdk_model_get_output(model, i, &data, &size_bytes) != EDGESDK_OK) return {};
    const auto* bytes = static_cast<const unsigned char*>(data);
    all.insert(all.end(), bytes, bytes + size_bytes);
  }
  return all;
}

// From now on runs read the inputs that the last run brought to the GPU, and leave outputs there.
// An address of the program's own takes the place of NULL.
bool StayOnGpu(edgesdk_model* model) {
  for (std::int32_t i = 0; i < edgesdk_model_num_inputs(model); ++i) {
    if (edgesdk_model_set_input_device(model, i, nullptr, 0) != EDGESDK_OK) return false;
  }
  for (std::int32_t i = 0; i < edgesdk_model_num_outputs(model); ++i) {
    if (edgesdk_model_set_output_device(model, i, nullptr, 0) != EDGESDK_OK) return false;
  }
  return true;
}

// In 16 steps from the fastest to the 99th percentile, and what is slower.
void PrintHistogram(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto part = [&us](double p) {
    return us[static_cast<std::size_t>(p * static_cast<double>(us.size() - 1))];
  };
  constexpr std::size_t kSteps = 16;
  const double first = us.front();
  const double step = std::max((part(0.99) - first) / kSteps, 0.001);
  std::vector<std::size_t> counts(kSteps + 1);
  for (double value : us) {
    ++counts[std::min(static_cast<std::size_t>((value - first) / step), kSteps)];
  }
  const std::size_t most = *std::max_element(counts.begin(), counts.end());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::string bar((50 * counts[i] + most - 1) / most, '#');
    std::printf("%10.1f us %7zu %s\n", first + step * static_cast<double>(i), counts[i],
                bar.c_str());
  }
  std::printf("%zu runs: median %.1f us, p99 %.1f us, fastest %.1f us, slowest %.1f us\n",
              us.size(), part(0.5), part(0.99), us.front(), us.back());
}

bool Parse(int argc, char** argv, Settings* settings) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--on-gpu") {
      settings->on_gpu = true;
    } else if (flag == "--runs" && i + 1 < argc) {
      settings->runs = std::atoi(argv[++i]);
    } else if (flag == "--device" && i + 1 < argc) {
      settings->device = std::atoi(argv[++i]);
    } else {
      return false;
    }
  }
  return settings->runs > 0;
}

int Run(edgesdk_model* model, const Settings& settings) {
  for (std::int32_t i = 0; i < edgesdk_model_num_inputs(model); ++i) {
    edgesdk_tensor_info info;
    void* data = nullptr;
    edgesdk_model_input_info(model, i, &info);
    if (edgesdk_model_own_input(model, i, &data, nullptr) != EDGESDK_OK) {
      return Fail(edgesdk_model_last_error(model));
    }
    Fill(info, static_cast<unsigned char*>(data));
  }
  // The first run records the commands for the GPU; the others replay them.
  if (edgesdk_model_run(model) != EDGESDK_OK) return Fail(edgesdk_model_last_error(model));
  const std::vector<unsigned char> expected = Outputs(model);
  PrintDevice(model);
  if (settings.on_gpu && !StayOnGpu(model)) return Fail(edgesdk_model_last_error(model));
  std::vector<double> us;
  for (int i = -10; i < settings.runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    if (edgesdk_model_run(model) != EDGESDK_OK) return Fail(edgesdk_model_last_error(model));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (i >= 0) us.push_back(took.count());
  }
  if (Outputs(model) != expected) return Fail("the last run's outputs are not those of the first");
  std::printf("inputs and outputs %s\n", settings.on_gpu ? "stay on the GPU" : "on the host");
  PrintHistogram(us);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!Parse(argc, argv, &settings)) {
    std::fputs("usage: gpu_latency [--runs N] [--on-gpu] [--device N]\n", stderr);
    return 2;
  }
  edgesdk_options options = {};
  options.struct_size = sizeof(options);
  options.device_index = settings.device;
  char reason[1280] = "";
  options.error_buffer = reason;
  options.error_buffer_size = sizeof(reason);
  edgesdk_model* model = nullptr;
  if (NETWORK_OPEN(EDGESDK_ABI_VERSION, &options, &model) != EDGESDK_OK) return Fail(reason);
  const int code = Run(model, settings);
  edgesdk_model_close(model);
  return code;
}
