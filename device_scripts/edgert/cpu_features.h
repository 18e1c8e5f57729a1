// cpu_features.h: does this CPU have an instruction set? Asked once, when a model is opened, so
// that a wrong board gets a sentence instead of SIGILL.
#ifndef EDGERT_CPU_FEATURES_H_
#define EDGERT_CPU_FEATURES_H_

namespace edgert {

enum class Feature { kPresent, kAbsent, kUnknownName };

// `name` as Linux prints it in /proc/cpuinfo ("avx2", "asimddp", "neon").
Feature CpuFeature(const char* name);

}  // namespace edgert

#endif  // EDGERT_CPU_FEATURES_H_
