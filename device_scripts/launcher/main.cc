// edgesdk-run: loads a compiled model, runs it on .npy files, and says how long it took.
//
// Exit codes: 0 done, 2 wrong arguments, 7 the library or a file failed, 8 the self-test differs.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgesdk_model.h"
#include "npy.h"
#include "options.h"
#include "report.h"
#include "system.h"

namespace launcher {
namespace {

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
    Report report{options_, api_, model_, result_};
    if (options_.json) {
      PrintJson(report);
    } else {
      PrintText(report);
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

  int32_t NumVariants() const { return launcher::NumVariants(api_, model_); }

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
