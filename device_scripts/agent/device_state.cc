#include "device_state.h"

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "integer.h"

namespace agent {
namespace {

// Servers have a policy for every one of their many cores, and asking each takes milliseconds.
constexpr size_t kMaxFiles = 16;

// The Raspberry Pi firmware's word: 1 the clock is capped, 2 throttled, 3 the soft limit of the
// temperature is reached; the same 16 bits higher: since the start.
constexpr unsigned long kPiHeldDown = 0xe;

bool ReadLine(const char* path, char* line, size_t size) {
  FILE* file = fopen(path, "r");
  if (file == nullptr) return false;
  bool ok = fgets(line, static_cast<int>(size), file) != nullptr;
  fclose(file);
  return ok;
}

// Calls use(path, line) for the first line of each file that matches.
template <typename Use>
void ForEachFile(const char* sysfs, const char* pattern, Use use) {
  char full[512];
  snprintf(full, sizeof(full), "%s/%s", sysfs, pattern);
  glob_t found;
  if (glob(full, GLOB_NOSORT, nullptr, &found) != 0) return;
  for (size_t i = 0; i < found.gl_pathc && i < kMaxFiles; ++i) {
    char line[128];
    if (ReadLine(found.gl_pathv[i], line, sizeof(line))) use(found.gl_pathv[i], line);
  }
  globfree(&found);
}

// The kernel's own throttling: it limits the clock through a "cooling device".
void ReadCooling(const char* path, const char* type, DeviceState* state) {
  if (strstr(type, "cpufreq") == nullptr && strncmp(type, "Processor", 9) != 0) return;
  char other[512];
  char line[128];
  snprintf(other, sizeof(other), "%.*scur_state", static_cast<int>(strlen(path) - 4), path);
  if (!ReadLine(other, line, sizeof(line))) return;
  int8_t active = edgert::ParseInteger(line) > 0 ? 1 : 0;
  if (active > state->throttled) state->throttled = active;
}

}  // namespace

DeviceState ReadDeviceState(const char* sysfs) {
  DeviceState state = kUnknownState;
  ForEachFile(sysfs, "devices/system/cpu/cpufreq/policy*/scaling_cur_freq",
              [&](const char*, const char* line) {
                int64_t khz = edgert::ParseInteger(line);
                if (khz > state.clock_khz) state.clock_khz = khz;
              });
  ForEachFile(sysfs, "class/thermal/thermal_zone*/temp", [&](const char*, const char* line) {
    double celsius = strtod(line, nullptr) / 1000;
    // A sensor that is switched off reads 0 or absolute zero.
    if (celsius <= 0 || celsius > 200) return;
    if (!(celsius <= state.temperature_c)) state.temperature_c = celsius;
  });
  ForEachFile(sysfs, "class/thermal/cooling_device*/type",
              [&](const char* path, const char* type) { ReadCooling(path, type, &state); });
  ForEachFile(
      sysfs, "devices/platform/soc*/*firmware/get_throttled", [&](const char*, const char* line) {
        int8_t active = (edgert::ParseInteger(line, nullptr, 16) & kPiHeldDown) != 0 ? 1 : 0;
        if (active > state.throttled) state.throttled = active;
      });
  return state;
}

}  // namespace agent
