// integer.h: a number at the start of a text.
//
// The C library's own functions are not used: built against glibc 2.38 or later, strtol is a new
// function that older systems do not have (__isoc23_strtol, which reads 0b101, too).
#ifndef EDGERT_INTEGER_H_
#define EDGERT_INTEGER_H_

#include <stdint.h>

namespace edgert {

// Reads spaces, a sign and digits of `base` (at most 16), and sets *end behind them, or to `text`
// if there are none. Numbers that do not fit become INT64_MAX or INT64_MIN.
inline int64_t ParseInteger(const char* text, const char** end = nullptr, int base = 10) {
  const char* at = text;
  while (*at == ' ' || (*at >= '\t' && *at <= '\r')) ++at;
  bool negative = *at == '-';
  if (*at == '-' || *at == '+') ++at;
  if (base == 16 && at[0] == '0' && (at[1] == 'x' || at[1] == 'X')) at += 2;
  bool any = false;
  int64_t value = 0;
  for (;; ++at, any = true) {
    int digit = *at >= '0' && *at <= '9'   ? *at - '0'
                : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10
                : *at >= 'A' && *at <= 'F' ? *at - 'A' + 10
                                           : base;
    if (digit >= base) break;
    // Towards the negative side, which has one number more.
    if (__builtin_mul_overflow(value, static_cast<int64_t>(base), &value) ||
        __builtin_sub_overflow(value, static_cast<int64_t>(digit), &value)) {
      value = INT64_MIN;
    }
  }
  if (end != nullptr) *end = any ? at : text;
  if (negative) return value;
  return value == INT64_MIN ? INT64_MAX : -value;
}

}  // namespace edgert

#endif  // EDGERT_INTEGER_H_
