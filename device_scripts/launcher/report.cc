#include "report.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "npy.h"
#include "system.h"

namespace launcher {
namespace {

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

void PrintJsonPorts(const Report& report, const char* key, int32_t count,
                    edgesdk_status (*get)(edgesdk_model*, int32_t, edgesdk_tensor_info*)) {
  printf(", \"%s\": [", key);
  for (int32_t i = 0; i < count; ++i) {
    edgesdk_tensor_info info;
    get(report.model, i, &info);
    fputs(i == 0 ? "{\"name\": " : ", {\"name\": ", stdout);
    PrintJsonString(info.name);
    printf(", \"dtype\": \"%s\", \"shape\": [", DtypeName(info.dtype));
    PrintShape(info, ", ");
    fputs("]}", stdout);
  }
  putchar(']');
}

void PrintPorts(const Report& report, const char* kind, int32_t count,
                edgesdk_status (*get)(edgesdk_model*, int32_t, edgesdk_tensor_info*)) {
  for (int32_t i = 0; i < count; ++i) {
    edgesdk_tensor_info info;
    get(report.model, i, &info);
    printf("%s %d: %s %s ", kind, static_cast<int>(i), info.name, DtypeName(info.dtype));
    PrintShape(info, "x");
    putchar('\n');
  }
}

}  // namespace

int32_t NumVariants(const edgesdk_api* api, const edgesdk_model* model) {
  bool has = api->struct_size > offsetof(edgesdk_api, select_variant);
  return has ? api->num_variants(model) : 1;
}

void PrintJson(const Report& report) {
  fputs("{\"model\": ", stdout);
  PrintJsonString(report.api->name(report.model));
  fputs(", \"target\": ", stdout);
  PrintJsonString(report.api->target(report.model));
  fputs(", \"build_id\": ", stdout);
  PrintJsonString(report.api->build_id(report.model));
  printf(", \"threads\": %d, \"open_ms\": ",
         static_cast<int>(report.api->num_threads(report.model)));
  PrintJsonNumber(report.result.open_ms);
  PrintJsonPorts(report, "inputs", report.api->num_inputs(report.model), report.api->input_info);
  PrintJsonPorts(report, "outputs", report.api->num_outputs(report.model), report.api->output_info);
  if (NumVariants(report.api, report.model) > 1) {
    printf(", \"variant\": %d, \"variants\": %d",
           static_cast<int>(report.api->variant(report.model)),
           static_cast<int>(NumVariants(report.api, report.model)));
  }
  if (report.result.ran) {
    fputs(", \"latency_ms\": [", stdout);
    for (int i = 0; i < report.options.repeat; ++i) {
      if (i > 0) fputs(", ", stdout);
      PrintJsonNumber(report.result.latency_ms[i]);
    }
    putchar(']');
  }
  if (report.result.ran && report.options.per_layer) {
    fputs(", \"layers\": [", stdout);
    for (int32_t i = 0; i < report.api->num_layers(report.model); ++i) {
      edgesdk_layer_info layer;
      report.api->layer_info(report.model, i, &layer);
      fputs(i == 0 ? "{\"name\": " : ", {\"name\": ", stdout);
      PrintJsonString(layer.name);
      fputs(", \"kernel\": ", stdout);
      PrintJsonString(layer.kernel);
      fputs(", \"mean_ms\": ", stdout);
      PrintJsonNumber(static_cast<double>(layer.total_ns) * 1e-6 / report.options.repeat);
      putchar('}');
    }
    putchar(']');
  }
  if (report.result.compared) {
    printf(", \"selftest\": {\"ok\": %s, \"max_abs_error\": ",
           report.result.equal ? "true" : "false");
    PrintJsonNumber(report.result.max_abs_error);
    fputs(", \"max_relative_error\": ", stdout);
    PrintJsonNumber(report.result.max_relative_error);
    fputs(", \"tolerance\": ", stdout);
    PrintJsonNumber(report.options.tolerance);
    putchar('}');
  }
  edgesdk_memory_info memory;
  report.api->memory(report.model, &memory);
  printf(", \"memory\": {\"weights_bytes\": %llu, \"activations_bytes\": %llu, ",
         static_cast<unsigned long long>(memory.weights_bytes),
         static_cast<unsigned long long>(memory.activations_bytes));
  printf("\"io_bytes\": %llu, \"peak_rss_bytes\": %lld}}\n",
         static_cast<unsigned long long>(memory.io_bytes), PeakRssBytes());
}

void PrintText(const Report& report) {
  printf("%s for %s, build %s, %d thread%s, opened in %.1f ms\n", report.api->name(report.model),
         report.api->target(report.model), report.api->build_id(report.model),
         static_cast<int>(report.api->num_threads(report.model)),
         report.api->num_threads(report.model) == 1 ? "" : "s", report.result.open_ms);
  PrintPorts(report, "input", report.api->num_inputs(report.model), report.api->input_info);
  PrintPorts(report, "output", report.api->num_outputs(report.model), report.api->output_info);
  if (NumVariants(report.api, report.model) > 1) {
    printf("these are the shapes of variant %d; there are %d\n",
           static_cast<int>(report.api->variant(report.model)),
           static_cast<int>(NumVariants(report.api, report.model)));
  }
  if (report.result.ran && report.options.per_layer) {
    for (int32_t i = 0; i < report.api->num_layers(report.model); ++i) {
      edgesdk_layer_info layer;
      report.api->layer_info(report.model, i, &layer);
      printf("  %9.4f ms  %s\n", static_cast<double>(layer.total_ns) * 1e-6 / report.options.repeat,
             layer.name);
    }
  }
  if (report.result.ran) {
    qsort(report.result.latency_ms, static_cast<size_t>(report.options.repeat), sizeof(double),
          [](const void* a, const void* b) {
            double left = *static_cast<const double*>(a);
            double right = *static_cast<const double*>(b);
            return left < right ? -1 : left > right ? 1 : 0;
          });
    printf("latency: median %.3f ms, min %.3f, max %.3f (%d run%s)\n",
           report.result.latency_ms[report.options.repeat / 2], report.result.latency_ms[0],
           report.result.latency_ms[report.options.repeat - 1], report.options.repeat,
           report.options.repeat == 1 ? "" : "s");
  }
  if (report.result.compared) {
    printf("self-test: %s (max abs error %.3g, relative %.3g, allowed %.3g)\n",
           report.result.equal ? "ok" : "DIFFERS", report.result.max_abs_error,
           report.result.max_relative_error, report.options.tolerance);
  }
}

}  // namespace launcher
