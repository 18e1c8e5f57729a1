// The CPU check agrees with what Linux says of this CPU.

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "check.h"
#include "cpu_features.h"

namespace {

using edgert::CpuFeature;
using edgert::Feature;

TEST(an_unknown_name_is_told_apart) {
  CHECK(CpuFeature("no_such_feature") == Feature::kUnknownName);
  CHECK(CpuFeature("") == Feature::kUnknownName);
}

// Under qemu /proc/cpuinfo is the host's, so only a native run can compare.
TEST(agrees_with_proc_cpuinfo) {
#if defined(__x86_64__)
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
  }
  CHECK(!flags.empty());
  for (const char* name : {"sse2",          "pni",
                           "ssse3",         "fma",
                           "cx16",          "sse4_1",
                           "sse4_2",        "movbe",
                           "popcnt",        "xsave",
                           "avx",           "f16c",
                           "bmi1",          "avx2",
                           "bmi2",          "avx512f",
                           "avx512dq",      "avx512ifma",
                           "avx512cd",      "avx512bw",
                           "avx512vl",      "avx512vbmi",
                           "avx512_vbmi2",  "avx512_vnni",
                           "avx512_bitalg", "avx512_vpopcntdq",
                           "avx512_fp16",   "avx_vnni",
                           "avx512_bf16",   "abm",
                           "lahf_lm",       "fma4"}) {
    bool present = CpuFeature(name) == Feature::kPresent;
    CHECK(CpuFeature(name) != Feature::kUnknownName);
    if (present != (flags.count(name) > 0)) std::fprintf(stderr, "%s:\n", name);
    CHECK_EQ(present, flags.count(name) > 0);
  }
#elif defined(__aarch64__)
  CHECK(CpuFeature("asimd") == Feature::kPresent);
#elif defined(__arm__)
  CHECK(CpuFeature("vfp") == Feature::kPresent);
#endif
}

}  // namespace

int main(int argc, char** argv) { return check::Main(argc, argv); }
