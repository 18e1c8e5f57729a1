#include "compiler_error.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "integer.h"

namespace edgert {
namespace {

// The first line of the log that has "error" in it, else the first.
void FirstError(const char* log, char* text, size_t bytes) {
  const char* line = strstr(log, "error");
  if (line == nullptr) line = log;
  while (line > log && line[-1] != '\n') --line;
  line += strspn(line, " \t\r\n");
  snprintf(text, bytes, "%.*s", static_cast<int>(strcspn(line, "\r\n")), line);
}

// The kernel that holds line `number` of the source, or "".
void KernelOfLine(const char* source, int64_t number, const char* kernel_start, char* name,
                  size_t bytes) {
  name[0] = '\0';
  for (int64_t line = 1; line <= number && source != nullptr; ++line) {
    if (strncmp(source, kernel_start, strlen(kernel_start)) == 0) {
      const char* start = source + strlen(kernel_start);
      snprintf(name, bytes, "%.*s", static_cast<int>(strcspn(start, "( \n")), start);
    }
    source = strchr(source, '\n');
    if (source != nullptr) ++source;
  }
}

}  // namespace

void FindCompilerError(const char* log, const char* source, const char* kernel_start,
                       CompilerError* error) {
  FirstError(log, error->line, sizeof(error->line));
  error->kernel[0] = '\0';
  // "<name>:LINE:COLUMN: error: ..."
  for (const char* at = strchr(error->line, ':'); at != nullptr && error->kernel[0] == '\0';
       at = strchr(at + 1, ':')) {
    const char* end = nullptr;
    int64_t number = ParseInteger(at + 1, &end);
    if (number > 0 && *end == ':') {
      KernelOfLine(source, number, kernel_start, error->kernel, sizeof(error->kernel));
    }
  }
}

}  // namespace edgert
