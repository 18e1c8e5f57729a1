// options.h: what edgesdk-run is asked to do, and how it complains.
#ifndef EDGESDK_LAUNCHER_OPTIONS_H_
#define EDGESDK_LAUNCHER_OPTIONS_H_

namespace launcher {

constexpr int kExitUsage = 2;
constexpr int kExitDevice = 7;
constexpr int kExitDiffers = 8;
constexpr int kMaxInputs = 256;

struct Options {
  const char* library = nullptr;
  const char* inputs[kMaxInputs] = {nullptr};
  int num_inputs = 0;
  const char* output_folder = nullptr;
  const char* selftest_folder = nullptr;
  double tolerance = 1e-4;
  int repeat = 1;
  int warmup = 0;
  int threads = 0;
  bool per_layer = false;
  bool json = false;
};

extern const char kUsage[];

// Writes a line to stderr and returns `code`.
int Complain(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Returns 0, or the exit code.
int ParseArguments(int argc, char** argv, Options* options);

}  // namespace launcher

#endif  // EDGESDK_LAUNCHER_OPTIONS_H_
