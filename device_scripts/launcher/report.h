// report.h: what edgesdk-run prints on stdout, as text or as one JSON object.
#ifndef EDGESDK_LAUNCHER_REPORT_H_
#define EDGESDK_LAUNCHER_REPORT_H_

#include "edgesdk_model.h"
#include "options.h"

namespace launcher {

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

struct Report {
  const Options& options;
  const edgesdk_api* api;
  edgesdk_model* model;
  Result& result;  // its latencies may be put in order
};

void PrintJson(const Report& report);
void PrintText(const Report& report);

// Libraries of older versions have one set of shapes and no such function.
int32_t NumVariants(const edgesdk_api* api, const edgesdk_model* model);

}  // namespace launcher

#endif  // EDGESDK_LAUNCHER_REPORT_H_
