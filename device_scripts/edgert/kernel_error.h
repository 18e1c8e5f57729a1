// kernel_error.h: the text of a kernel's failure, on its way from generated code to the caller.
#ifndef EDGERT_KERNEL_ERROR_H_
#define EDGERT_KERNEL_ERROR_H_

#include <stddef.h>

namespace edgert {

class KernelError {
 public:
  // Longer messages are cut.
  static constexpr size_t kBytes = 1024;

  // What generated code last raised on this thread, or "".
  static const char* Message();
  static void Set(const char* message);
  static void Clear();
};

}  // namespace edgert

#endif  // EDGERT_KERNEL_ERROR_H_
