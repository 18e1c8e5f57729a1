#include "options.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../edgert/integer.h"

namespace launcher {

const char kUsage[] =
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

int Complain(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("edgesdk-run: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  return code;
}

namespace {

bool ParseCount(const char* text, int minimum, int* value) {
  const char* end = nullptr;
  int64_t number = edgert::ParseInteger(text, &end);
  if (end == text || *end != '\0' || number < minimum || number > 100 * 1000 * 1000) return false;
  *value = static_cast<int>(number);
  return true;
}

}  // namespace

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

}  // namespace launcher
