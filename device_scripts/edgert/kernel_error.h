// kernel_error.h: the text of a kernel's failure, on its way from generated code to the caller.
#ifndef EDGERT_KERNEL_ERROR_H_
#define EDGERT_KERNEL_ERROR_H_

namespace edgert {

class KernelError {
 public:
  // What generated code last raised on this thread, or "".
  static const char* Message();
  static void Clear();

  // A worker hands its message to the thread that launched the loop. One loop runs at a time, and
  // only its first failing task moves a message, so one shared place is enough.
  static void MoveToShared();
  static void TakeFromShared();
};

}  // namespace edgert

#endif  // EDGERT_KERNEL_ERROR_H_
