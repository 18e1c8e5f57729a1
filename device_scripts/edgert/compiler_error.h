// compiler_error.h: what a driver's compiler says of the source text that it refuses, in one line.
#ifndef EDGERT_COMPILER_ERROR_H_
#define EDGERT_COMPILER_ERROR_H_

namespace edgert {

struct CompilerError {
  char kernel[128];  // that has the error, or ""
  char line[400];    // of the log
};

// Finds the first error in a compiler's log; compilers made from clang say in which line of the
// source it is. There each kernel begins a line with `kernel_start`.
void FindCompilerError(const char* log, const char* source, const char* kernel_start,
                       CompilerError* error);

}  // namespace edgert

#endif  // EDGERT_COMPILER_ERROR_H_
