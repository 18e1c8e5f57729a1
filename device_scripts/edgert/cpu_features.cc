#include "cpu_features.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <stdio.h>
#include <sys/sysctl.h>
#elif defined(__aarch64__) || defined(__arm__) || defined(__riscv)
#include <sys/auxv.h>
#endif

namespace edgert {
namespace {

#if defined(__x86_64__) || defined(__i386__)

// Which register of which CPUID leaf holds the bit, and the register state that the operating
// system must save for it (Intel SDM vol. 1, 13.1): bits of XCR0.
enum Register { kEax, kEbx, kEcx, kEdx };
constexpr uint32_t kNoState = 0;
constexpr uint32_t kAvxState = 0x6;
constexpr uint32_t kAvx512State = 0xe6;

struct Bit {
  const char* name;
  uint32_t leaf;
  uint32_t subleaf;
  Register reg;
  int bit;
  uint32_t state;
};

constexpr Bit kBits[] = {
    {"sse2", 1, 0, kEdx, 26, kNoState},
    {"pni", 1, 0, kEcx, 0, kNoState},
    {"ssse3", 1, 0, kEcx, 9, kNoState},
    {"fma", 1, 0, kEcx, 12, kAvxState},
    {"cx16", 1, 0, kEcx, 13, kNoState},
    {"sse4_1", 1, 0, kEcx, 19, kNoState},
    {"sse4_2", 1, 0, kEcx, 20, kNoState},
    {"movbe", 1, 0, kEcx, 22, kNoState},
    {"popcnt", 1, 0, kEcx, 23, kNoState},
    {"xsave", 1, 0, kEcx, 26, kNoState},
    {"avx", 1, 0, kEcx, 28, kAvxState},
    {"f16c", 1, 0, kEcx, 29, kAvxState},
    {"bmi1", 7, 0, kEbx, 3, kNoState},
    {"avx2", 7, 0, kEbx, 5, kAvxState},
    {"bmi2", 7, 0, kEbx, 8, kNoState},
    {"avx512f", 7, 0, kEbx, 16, kAvx512State},
    {"avx512dq", 7, 0, kEbx, 17, kAvx512State},
    {"avx512ifma", 7, 0, kEbx, 21, kAvx512State},
    {"avx512cd", 7, 0, kEbx, 28, kAvx512State},
    {"avx512bw", 7, 0, kEbx, 30, kAvx512State},
    {"avx512vl", 7, 0, kEbx, 31, kAvx512State},
    {"avx512vbmi", 7, 0, kEcx, 1, kAvx512State},
    {"avx512_vbmi2", 7, 0, kEcx, 6, kAvx512State},
    {"avx512_vnni", 7, 0, kEcx, 11, kAvx512State},
    {"avx512_bitalg", 7, 0, kEcx, 12, kAvx512State},
    {"avx512_vpopcntdq", 7, 0, kEcx, 14, kAvx512State},
    {"avx512_fp16", 7, 0, kEdx, 23, kAvx512State},
    {"avx_vnni", 7, 1, kEax, 4, kAvxState},
    {"avx512_bf16", 7, 1, kEax, 5, kAvx512State},
    {"abm", 0x80000001u, 0, kEcx, 5, kNoState},
    {"lahf_lm", 0x80000001u, 0, kEcx, 0, kNoState},
    {"fma4", 0x80000001u, 0, kEcx, 16, kAvxState},
};

uint32_t EnabledStates() {
  uint32_t regs[4];
  if (__get_cpuid(1, &regs[0], &regs[1], &regs[2], &regs[3]) == 0) return 0;
  constexpr uint32_t kOsxsave = 1u << 27;
  if ((regs[kEcx] & kOsxsave) == 0) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool HasBit(const Bit& bit) {
  uint32_t regs[4];
  if (__get_cpuid_count(bit.leaf, bit.subleaf, &regs[0], &regs[1], &regs[2], &regs[3]) == 0) {
    return false;
  }
  if ((regs[bit.reg] >> bit.bit & 1u) == 0) return false;
  return bit.state == kNoState || (EnabledStates() & bit.state) == bit.state;
}

#elif defined(__APPLE__)

// Apple's names, as sysctl lists them below "hw.optional" ("" for what all its processors have).
struct Bit {
  const char* name;
  const char* apple;
};

constexpr Bit kBits[] = {
    {"fp", ""},
    {"asimd", ""},
    {"aes", "arm.FEAT_AES"},
    {"pmull", "arm.FEAT_PMULL"},
    {"sha1", "arm.FEAT_SHA1"},
    {"sha2", "arm.FEAT_SHA256"},
    {"sha3", "arm.FEAT_SHA3"},
    {"sha512", "arm.FEAT_SHA512"},
    {"crc32", "armv8_crc32"},
    {"atomics", "arm.FEAT_LSE"},
    {"fphp", "arm.FEAT_FP16"},
    {"asimdhp", "arm.FEAT_FP16"},
    {"asimdrdm", "arm.FEAT_RDM"},
    {"lrcpc", "arm.FEAT_LRCPC"},
    {"asimddp", "arm.FEAT_DotProd"},
    {"asimdfhm", "arm.FEAT_FHM"},
    {"i8mm", "arm.FEAT_I8MM"},
    {"bf16", "arm.FEAT_BF16"},
};

bool HasBit(const Bit& bit) {
  char name[64];
  snprintf(name, sizeof(name), "hw.optional.%s", bit.apple);
  int value = 0;
  size_t size = sizeof(value);
  // Systems before macOS 12 and iOS 15 do not know most of these names, and say neither yes nor no.
  return sysctlbyname(name, &value, &size, nullptr, 0) != 0 || value != 0;
}

#elif defined(__aarch64__) || defined(__arm__)

// Bits of AT_HWCAP (word 1) and AT_HWCAP2 (word 2) from Linux's arch/*/include/uapi/asm/hwcap.h,
// spelled out because boards' headers are older than the CPUs they meet.
struct Bit {
  const char* name;
  int word;
  int bit;
};

#if defined(__aarch64__)
constexpr Bit kBits[] = {
    {"fp", 1, 0},     {"asimd", 1, 1},    {"aes", 1, 3},       {"pmull", 1, 4},
    {"sha1", 1, 5},   {"sha2", 1, 6},     {"crc32", 1, 7},     {"atomics", 1, 8},
    {"fphp", 1, 9},   {"asimdhp", 1, 10}, {"asimdrdm", 1, 12}, {"lrcpc", 1, 15},
    {"dcpop", 1, 16}, {"asimddp", 1, 20}, {"sve", 1, 22},      {"asimdfhm", 1, 23},
    {"sve2", 2, 1},   {"i8mm", 2, 13},    {"bf16", 2, 14},
};
#else
constexpr Bit kBits[] = {
    {"half", 1, 1},    {"thumb", 1, 2}, {"vfp", 1, 6},    {"edsp", 1, 7},     {"neon", 1, 12},
    {"vfpv3", 1, 13},  {"tls", 1, 15},  {"vfpv4", 1, 16}, {"idiva", 1, 17},   {"idivt", 1, 18},
    {"vfpd32", 1, 19}, {"lpae", 1, 20}, {"fphp", 1, 22},  {"asimdhp", 1, 23}, {"asimddp", 1, 24},
    {"aes", 2, 0},     {"crc32", 2, 4},
};
#endif

bool HasBit(const Bit& bit) {
  unsigned long word = getauxval(bit.word == 1 ? AT_HWCAP : AT_HWCAP2);
  return (word >> bit.bit & 1u) != 0;
}

#elif defined(__riscv)

// The extensions of one letter, which Linux has in AT_HWCAP by their place in the alphabet
// (arch/riscv/include/uapi/asm/hwcap.h).
struct Bit {
  const char* name;
  int bit;
};

constexpr Bit kBits[] = {
    {"a", 'a' - 'a'}, {"c", 'c' - 'a'}, {"d", 'd' - 'a'},
    {"f", 'f' - 'a'}, {"m", 'm' - 'a'}, {"v", 'v' - 'a'},
};

bool HasBit(const Bit& bit) { return (getauxval(AT_HWCAP) >> bit.bit & 1u) != 0; }

#else

struct Bit {
  const char* name;
};
constexpr Bit kBits[] = {{"none"}};
bool HasBit(const Bit&) { return true; }

#endif

}  // namespace

Feature CpuFeature(const char* name) {
  for (const Bit& bit : kBits) {
    if (strcmp(bit.name, name) == 0) return HasBit(bit) ? Feature::kPresent : Feature::kAbsent;
  }
  return Feature::kUnknownName;
}

}  // namespace edgert
