// edgesdk-run: loads a compiled model, runs it on .npy files, and says how long it took.
//
// Exit codes: 0 done, 2 wrong arguments, 7 the library or a file failed, 8 the self-test differs.

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../edgert/integer.h"
#include "edgesdk_model.h"
#include "npy.h"
#include "system.h"

namespace launcher {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitDevice = 7;
constexpr int kExitDiffers = 8;
constexpr int kMaxInputs = 256;

constexpr char kUsage[] =
    "usage: edgesdk-run LIBRARY [options]\n"
    "\n"
    "  --input NAME=FILE.npy   an input, by its name or its number (0=FILE.npy); once for each\n"
    "  --output DIR            write output_0.npy, output_1.npy, ... into DIR\n"
    "  --selftest DIR          run on DIR/input_0.npy, ... and compare with DIR/output_0.npy, ...\n"
    "  --tolerance X           largest difference allowed, relative to the output's largest value\n"
    "                          (default 1e-4; integers must be equal)\n"
    "  --repeat N              timed runs (default 1)\n"
    "  --warmup N              runs before them (default 0)\n"
    "  --threads N             at most N threads (default: EDGESDK_NUM_THREADS, or all CPUs)\n"
    "  --per-layer             time every layer, too\n"
    "  --json                  print one JSON object\n"
    "  --help                  print this text\n"
    "\n"
    "Without inputs and without --selftest it prints what the model is.\n";

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

// What a run leaves for the report.
struct Result {
  double open_ms = 0;
  double* latency_ms = nullptr;
  bool ran = false;
  bool compared = false;
  bool equal = true;
  double max_abs_error = 0;
  double max_relative_error = 0;
};

int Complain(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
int Complain(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("edgesdk-run: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  return code;
}

bool ParseCount(const char* text, int minimum, int* value) {
  const char* end = nullptr;
  int64_t number = edgert::ParseInteger(text, &end);
  if (end == text || *end != '\0' || number < minimum || number > 100 * 1000 * 1000) return false;
  *value = static_cast<int>(number);
  return true;
}

// Returns 0, or the exit code.
int ParseArguments(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const char* flag = argv[i];
    if (flag[0] != '-') {
      if (options->library != nullptr) {
        return Complain(kExitUsage, "one library, please: got '%s' too", flag);
      }
      options->library = flag;
      continue;
    }
    if (strcmp(flag, "--per-layer") == 0) {
      options->per_layer = true;
      continue;
    }
    if (strcmp(flag, "--json") == 0) {
      options->json = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    bool known = true;
    bool ok = value != nullptr;
    if (strcmp(flag, "--input") == 0) {
      ok = ok && strchr(value, '=') != nullptr && options->num_inputs < kMaxInputs;
      if (ok) options->inputs[options->num_inputs++] = value;
    } else if (strcmp(flag, "--output") == 0) {
      options->output_folder = value;
    } else if (strcmp(flag, "--selftest") == 0) {
      options->selftest_folder = value;
    } else if (strcmp(flag, "--tolerance") == 0) {
      char* end = nullptr;
      options->tolerance = ok ? strtod(value, &end) : 0;
      ok = ok && end != value && *end == '\0' && options->tolerance >= 0;
    } else if (strcmp(flag, "--repeat") == 0) {
      ok = ok && ParseCount(value, 1, &options->repeat);
    } else if (strcmp(flag, "--warmup") == 0) {
      ok = ok && ParseCount(value, 0, &options->warmup);
    } else if (strcmp(flag, "--threads") == 0) {
      ok = ok && ParseCount(value, 1, &options->threads);
    } else {
      known = false;
    }
    if (!known) return Complain(kExitUsage, "unknown option '%s'; see --help", flag);
    if (!ok) {
      return Complain(kExitUsage, "%s does not take '%s'; see --help", flag, value ? value : "");
    }
    ++i;
  }
  if (options->library == nullptr) return Complain(kExitUsage, "which library? see --help");
  if (options->selftest_folder != nullptr && options->num_inputs > 0) {
    return Complain(kExitUsage, "--selftest brings its own inputs; leave --input out");
  }
  return 0;
}

void PrintJsonString(const char* text) {
  putchar('"');
  for (const unsigned char* at = reinterpret_cast<const unsigned char*>(text); *at != 0; ++at) {
    if (*at == '"' || *at == '\\') {
      printf("\\%c", *at);
    } else if (*at < 32) {
      printf("\\u%04x", *at);
    } else {
      putchar(*at);
    }
  }
  putchar('"');
}

void PrintJsonNumber(double value) {
  // JSON has no NaN and no infinity.
  if (isfinite(value)) {
    printf("%.9g", value);
  } else {
    fputs("null", stdout);
  }
}

void PrintShape(const edgesdk_tensor_info& info, const char* separator) {
  for (int32_t i = 0; i < info.ndim; ++i) {
    printf("%s%lld", i == 0 ? "" : separator, static_cast<long long>(info.shape[i]));
  }
}

// "1x3x224x224", cut where `size` ends.
void ShapeText(int32_t ndim, const int64_t* shape, char* text, size_t size) {
  text[0] = '\0';
  size_t used = 0;
  for (int32_t i = 0; i < ndim && used < size; ++i) {
    used += static_cast<size_t>(snprintf(text + used, size - used, "%s%lld", i == 0 ? "" : "x",
                                         static_cast<long long>(shape[i])));
  }
}

// A loaded library with an open model.
class Session {
 public:
  explicit Session(const Options& options) : options_(options) {}
  ~Session() {
    if (model_ != nullptr) api_->close(model_);
    for (Array& input : inputs_) FreeArray(&input);
    free(result_.latency_ms);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int Main() {
    int code = Open();
    if (code == 0 && (options_.num_inputs > 0 || options_.selftest_folder != nullptr ||
                      api_->num_inputs(model_) == 0)) {
      code = LoadInputs();
      if (code == 0 && NumVariants() > 1) code = SelectVariant();
      if (code == 0) code = BindInputs();
      if (code == 0) code = Run();
      if (code == 0 && options_.output_folder != nullptr) code = WriteOutputs();
      if (code == 0 && options_.selftest_folder != nullptr) code = Compare();
    }
    if (code != 0 && code != kExitDiffers) return code;
    if (options_.json) {
      PrintJson();
    } else {
      PrintText();
    }
    if (fflush(stdout) != 0) return Complain(kExitDevice, "cannot write the report");
    return code;
  }

 private:
  int Open() {
    double start = NowMs();
    char error[1024];
    void* library = LoadSharedLibrary(options_.library, error, sizeof(error));
    if (library == nullptr) return Complain(kExitDevice, "cannot load: %s", error);
    using GetApi = const edgesdk_api* (*)(uint32_t);
    GetApi get_api = reinterpret_cast<GetApi>(FindFunction(library, "edgesdk_get_api"));
    if (get_api == nullptr) {
      return Complain(kExitDevice, "%s was not made by edgesdk", options_.library);
    }
    api_ = get_api(EDGESDK_ABI_VERSION);
    if (api_ == nullptr) {
      return Complain(kExitDevice,
                      "%s does not speak ABI version %u: library and launcher must come from the "
                      "same bundle",
                      options_.library, EDGESDK_ABI_VERSION);
    }
    edgesdk_options settings;
    memset(&settings, 0, sizeof(settings));
    settings.struct_size = sizeof(settings);
    settings.num_threads = options_.threads;
    if (api_->open(EDGESDK_ABI_VERSION, &settings, &model_) != EDGESDK_OK) {
      model_ = nullptr;
      return Complain(kExitDevice, "cannot open the model: %s", api_->last_error(nullptr));
    }
    result_.open_ms = NowMs() - start;
    if (api_->num_inputs(model_) > kMaxInputs) {
      return Complain(kExitDevice, "the model has more than %d inputs", kMaxInputs);
    }
    return 0;
  }

  // The number of the input that `text` ("NAME=FILE") is for, or -1; *file becomes its file.
  int FindInput(const char* text, const char** file) {
    int best = -1;
    size_t best_length = 0;
    for (int32_t i = 0; i < api_->num_inputs(model_); ++i) {
      edgesdk_tensor_info info;
      api_->input_info(model_, i, &info);
      char number[16];
      snprintf(number, sizeof(number), "%d", static_cast<int>(i));
      // Names may hold '=' themselves: the longest that fits wins.
      const char* names[] = {info.name, number};
      for (const char* name : names) {
        size_t length = strlen(name);
        if (strncmp(text, name, length) == 0 && text[length] == '=' && length >= best_length) {
          best = i;
          best_length = length;
        }
      }
    }
    if (best >= 0) *file = text + best_length + 1;
    return best;
  }

  int LoadInputs() {
    for (int i = 0; i < options_.num_inputs; ++i) {
      const char* file = nullptr;
      int index = FindInput(options_.inputs[i], &file);
      if (index < 0 && api_->num_inputs(model_) == 0) {
        return Complain(kExitUsage, "the model has no inputs; leave --input out");
      }
      if (index < 0) {
        edgesdk_tensor_info info;
        api_->input_info(model_, 0, &info);
        return Complain(kExitUsage, "the model has no input for '%s'; the first is '%s'",
                        options_.inputs[i], info.name);
      }
      int code = LoadInput(index, file);
      if (code != 0) return code;
    }
    if (options_.selftest_folder == nullptr) return 0;
    for (int32_t i = 0; i < api_->num_inputs(model_); ++i) {
      char path[4096];
      snprintf(path, sizeof(path), "%s/input_%d.npy", options_.selftest_folder,
               static_cast<int>(i));
      int code = LoadInput(i, path);
      if (code != 0) return code;
    }
    return 0;
  }

  int LoadInput(int index, const char* file) {
    char error[512];
    Array& array = inputs_[index];
    FreeArray(&array);
    if (!ReadNpy(file, &array, error, sizeof(error))) return Complain(kExitDevice, "%s", error);
    loaded_[index] = true;
    edgesdk_tensor_info info;
    api_->input_info(model_, index, &info);
    if (NumVariants() > 1 || Fits(array, info)) return 0;
    char wanted[256];
    ShapeText(info.ndim, info.shape, wanted, sizeof(wanted));
    return Complain(kExitDevice, "%s does not fit input '%s', which is %s %s", file, info.name,
                    DtypeName(info.dtype), wanted);
  }

  // Libraries of older versions have one set of shapes and no such functions.
  int32_t NumVariants() const {
    bool has = api_->struct_size > offsetof(edgesdk_api, select_variant);
    return has ? api_->num_variants(model_) : 1;
  }

  static bool Fits(const Array& array, const edgesdk_tensor_info& info) {
    bool same = array.dtype == info.dtype && array.ndim == info.ndim;
    for (int32_t i = 0; same && i < info.ndim; ++i) same = array.shape[i] == info.shape[i];
    return same;
  }

  // Takes the variant that all files fit.
  int SelectVariant() {
    for (int32_t variant = 0; variant < NumVariants(); ++variant) {
      bool fits = true;
      for (int32_t i = 0; fits && i < api_->num_inputs(model_); ++i) {
        edgesdk_tensor_info info;
        api_->variant_input_info(model_, variant, i, &info);
        fits = !loaded_[i] || Fits(inputs_[i], info);
      }
      if (!fits) continue;
      if (api_->select_variant(model_, variant) == EDGESDK_OK) return 0;
      return Complain(kExitDevice, "%s", api_->last_error(model_));
    }
    return ComplainOfShapes();
  }

  int ComplainOfShapes() {
    char known[1024] = "";
    size_t used = 0;
    for (int32_t variant = 0; variant < NumVariants(); ++variant) {
      for (int32_t i = 0; i < api_->num_inputs(model_) && used < sizeof(known); ++i) {
        edgesdk_tensor_info info;
        api_->variant_input_info(model_, variant, i, &info);
        char shape[256];
        ShapeText(info.ndim, info.shape, shape, sizeof(shape));
        used += static_cast<size_t>(snprintf(known + used, sizeof(known) - used, "%s%s=%s",
                                             i > 0      ? " "
                                             : used > 0 ? ", "
                                                        : "",
                                             info.name, shape));
      }
    }
    return Complain(kExitDevice, "the inputs fit none of the shapes that were compiled: %s", known);
  }

  int BindInputs() {
    for (int32_t i = 0; i < api_->num_inputs(model_); ++i) {
      if (!loaded_[i]) continue;  // the run says which is missing
      if (api_->set_input(model_, i, inputs_[i].data, inputs_[i].size_bytes) != EDGESDK_OK) {
        return Complain(kExitDevice, "%s", api_->last_error(model_));
      }
    }
    return 0;
  }

  int Run() {
    result_.latency_ms = static_cast<double*>(
        calloc(static_cast<size_t>(options_.repeat), sizeof(*result_.latency_ms)));
    if (result_.latency_ms == nullptr) return Complain(kExitDevice, "out of memory");
    for (int i = 0; i < options_.warmup; ++i) {
      if (api_->run(model_) != EDGESDK_OK) {
        return Complain(kExitDevice, "%s", api_->last_error(model_));
      }
    }
    api_->set_profiling(model_, options_.per_layer ? 1 : 0);
    for (int i = 0; i < options_.repeat; ++i) {
      double start = NowMs();
      edgesdk_status status = api_->run(model_);
      result_.latency_ms[i] = NowMs() - start;
      if (status != EDGESDK_OK) return Complain(kExitDevice, "%s", api_->last_error(model_));
    }
    result_.ran = true;
    return 0;
  }

  int WriteOutputs() {
    for (int32_t i = 0; i < api_->num_outputs(model_); ++i) {
      edgesdk_tensor_info info;
      const void* data = nullptr;
      api_->output_info(model_, i, &info);
      api_->get_output(model_, i, &data, nullptr);
      char path[4096];
      char error[512];
      snprintf(path, sizeof(path), "%s/output_%d.npy", options_.output_folder, static_cast<int>(i));
      if (!WriteNpy(path, info, data, error, sizeof(error))) {
        return Complain(kExitDevice, "%s", error);
      }
    }
    return 0;
  }

  int Compare() {
    result_.compared = true;
    for (int32_t i = 0; i < api_->num_outputs(model_); ++i) {
      edgesdk_tensor_info info;
      const void* data = nullptr;
      api_->output_info(model_, i, &info);
      api_->get_output(model_, i, &data, nullptr);
      char path[4096];
      char error[512];
      Array expected;
      snprintf(path, sizeof(path), "%s/output_%d.npy", options_.selftest_folder,
               static_cast<int>(i));
      if (!ReadNpy(path, &expected, error, sizeof(error))) {
        return Complain(kExitDevice, "%s", error);
      }
      bool fits = expected.dtype == info.dtype && expected.size_bytes == info.size_bytes;
      if (fits) CompareOutput(info, data, expected.data);
      FreeArray(&expected);
      if (!fits) {
        return Complain(kExitDevice, "%s does not fit output '%s'", path, info.name);
      }
    }
    return result_.equal ? 0 : kExitDiffers;
  }

  void CompareOutput(const edgesdk_tensor_info& info, const void* data, const void* expected) {
    bool is_float = info.dtype == EDGESDK_FLOAT32 || info.dtype == EDGESDK_FLOAT64 ||
                    info.dtype == EDGESDK_FLOAT16 || info.dtype == EDGESDK_BFLOAT16;
    if (!is_float) {
      if (memcmp(data, expected, info.size_bytes) != 0) result_.equal = false;
    }
    size_t count = info.size_bytes / DtypeBytes(info.dtype);
    double largest = 0;
    double difference = 0;
    for (size_t i = 0; i < count; ++i) {
      double a = ElementAsDouble(info.dtype, data, i);
      double b = ElementAsDouble(info.dtype, expected, i);
      // NaN and infinity must be where the reference has them.
      if (isnan(a) && isnan(b)) continue;
      if (isinf(b) && a == b) continue;
      double distance = fabs(a - b);
      if (!isfinite(distance)) result_.equal = false;
      if (isfinite(b) && fabs(b) > largest) largest = fabs(b);
      if (distance > difference) difference = distance;
    }
    double relative = largest > 0 ? difference / largest : difference;
    if (is_float && relative > options_.tolerance) result_.equal = false;
    if (difference > result_.max_abs_error) result_.max_abs_error = difference;
    if (relative > result_.max_relative_error) result_.max_relative_error = relative;
  }

  void PrintJsonPorts(const char* key, int32_t count,
                      edgesdk_status (*get)(edgesdk_model*, int32_t, edgesdk_tensor_info*)) {
    printf(", \"%s\": [", key);
    for (int32_t i = 0; i < count; ++i) {
      edgesdk_tensor_info info;
      get(model_, i, &info);
      fputs(i == 0 ? "{\"name\": " : ", {\"name\": ", stdout);
      PrintJsonString(info.name);
      printf(", \"dtype\": \"%s\", \"shape\": [", DtypeName(info.dtype));
      PrintShape(info, ", ");
      fputs("]}", stdout);
    }
    putchar(']');
  }

  void PrintJson() {
    fputs("{\"model\": ", stdout);
    PrintJsonString(api_->name(model_));
    fputs(", \"target\": ", stdout);
    PrintJsonString(api_->target(model_));
    fputs(", \"build_id\": ", stdout);
    PrintJsonString(api_->build_id(model_));
    printf(", \"threads\": %d, \"open_ms\": ", static_cast<int>(api_->num_threads(model_)));
    PrintJsonNumber(result_.open_ms);
    PrintJsonPorts("inputs", api_->num_inputs(model_), api_->input_info);
    PrintJsonPorts("outputs", api_->num_outputs(model_), api_->output_info);
    if (NumVariants() > 1) {
      printf(", \"variant\": %d, \"variants\": %d", static_cast<int>(api_->variant(model_)),
             static_cast<int>(NumVariants()));
    }
    if (result_.ran) {
      fputs(", \"latency_ms\": [", stdout);
      for (int i = 0; i < options_.repeat; ++i) {
        if (i > 0) fputs(", ", stdout);
        PrintJsonNumber(result_.latency_ms[i]);
      }
      putchar(']');
    }
    if (result_.ran && options_.per_layer) {
      fputs(", \"layers\": [", stdout);
      for (int32_t i = 0; i < api_->num_layers(model_); ++i) {
        edgesdk_layer_info layer;
        api_->layer_info(model_, i, &layer);
        fputs(i == 0 ? "{\"name\": " : ", {\"name\": ", stdout);
        PrintJsonString(layer.name);
        fputs(", \"kernel\": ", stdout);
        PrintJsonString(layer.kernel);
        fputs(", \"mean_ms\": ", stdout);
        PrintJsonNumber(static_cast<double>(layer.total_ns) * 1e-6 / options_.repeat);
        putchar('}');
      }
      putchar(']');
    }
    if (result_.compared) {
      printf(", \"selftest\": {\"ok\": %s, \"max_abs_error\": ", result_.equal ? "true" : "false");
      PrintJsonNumber(result_.max_abs_error);
      fputs(", \"max_relative_error\": ", stdout);
      PrintJsonNumber(result_.max_relative_error);
      fputs(", \"tolerance\": ", stdout);
      PrintJsonNumber(options_.tolerance);
      putchar('}');
    }
    edgesdk_memory_info memory;
    api_->memory(model_, &memory);
    printf(", \"memory\": {\"weights_bytes\": %llu, \"activations_bytes\": %llu, ",
           static_cast<unsigned long long>(memory.weights_bytes),
           static_cast<unsigned long long>(memory.activations_bytes));
    printf("\"io_bytes\": %llu, \"peak_rss_bytes\": %lld}}\n",
           static_cast<unsigned long long>(memory.io_bytes), PeakRssBytes());
  }

  void PrintText() {
    printf("%s for %s, build %s, %d thread%s, opened in %.1f ms\n", api_->name(model_),
           api_->target(model_), api_->build_id(model_),
           static_cast<int>(api_->num_threads(model_)), api_->num_threads(model_) == 1 ? "" : "s",
           result_.open_ms);
    PrintPorts("input", api_->num_inputs(model_), api_->input_info);
    PrintPorts("output", api_->num_outputs(model_), api_->output_info);
    if (NumVariants() > 1) {
      printf("these are the shapes of variant %d; there are %d\n",
             static_cast<int>(api_->variant(model_)), static_cast<int>(NumVariants()));
    }
    if (result_.ran && options_.per_layer) {
      for (int32_t i = 0; i < api_->num_layers(model_); ++i) {
        edgesdk_layer_info layer;
        api_->layer_info(model_, i, &layer);
        printf("  %9.4f ms  %s\n", static_cast<double>(layer.total_ns) * 1e-6 / options_.repeat,
               layer.name);
      }
    }
    if (result_.ran) {
      qsort(result_.latency_ms, static_cast<size_t>(options_.repeat), sizeof(double),
            [](const void* a, const void* b) {
              double left = *static_cast<const double*>(a);
              double right = *static_cast<const double*>(b);
              return left < right ? -1 : left > right ? 1 : 0;
            });
      printf("latency: median %.3f ms, min %.3f, max %.3f (%d run%s)\n",
             result_.latency_ms[options_.repeat / 2], result_.latency_ms[0],
             result_.latency_ms[options_.repeat - 1], options_.repeat,
             options_.repeat == 1 ? "" : "s");
    }
    if (result_.compared) {
      printf("self-test: %s (max abs error %.3g, relative %.3g, allowed %.3g)\n",
             result_.equal ? "ok" : "DIFFERS", result_.max_abs_error, result_.max_relative_error,
             options_.tolerance);
    }
  }

  void PrintPorts(const char* kind, int32_t count,
                  edgesdk_status (*get)(edgesdk_model*, int32_t, edgesdk_tensor_info*)) {
    for (int32_t i = 0; i < count; ++i) {
      edgesdk_tensor_info info;
      get(model_, i, &info);
      printf("%s %d: %s %s ", kind, static_cast<int>(i), info.name, DtypeName(info.dtype));
      PrintShape(info, "x");
      putchar('\n');
    }
  }

  const Options& options_;
  const edgesdk_api* api_ = nullptr;
  edgesdk_model* model_ = nullptr;
  Array inputs_[kMaxInputs];
  bool loaded_[kMaxInputs] = {false};
  Result result_;
};

}  // namespace
}  // namespace launcher

int LauncherMain(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--help") == 0) {
      fputs(launcher::kUsage, stdout);
      return 0;
    }
  }
  launcher::Options options;
  int code = launcher::ParseArguments(argc, argv, &options);
  if (code != 0) return code;
  return launcher::Session(options).Main();
}
