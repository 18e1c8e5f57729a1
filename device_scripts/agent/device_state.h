// device_state.h: how fast and how hot the device is right now, as Linux tells it.
#ifndef EDGESDK_AGENT_DEVICE_STATE_H_
#define EDGESDK_AGENT_DEVICE_STATE_H_

#include <stdint.h>

namespace agent {

struct DeviceState {
  int64_t clock_khz;     // of the fastest cores; -1: unknown
  double temperature_c;  // of the hottest sensor; NaN: unknown
  int8_t throttled;      // 1: heat or low voltage hold the clock down, 0: not, -1: unknown
};

constexpr DeviceState kUnknownState = {-1, __builtin_nan(""), -1};

// `sysfs` is where sysfs is mounted: "/sys".
DeviceState ReadDeviceState(const char* sysfs);

}  // namespace agent

#endif  // EDGESDK_AGENT_DEVICE_STATE_H_
