// bionic's <glob.h>, whose structure is larger than musl's: libc/include/glob.h.
#pragma once

#include <stddef.h>

typedef struct {
  size_t gl_pathc;
  size_t gl_matchc;
  size_t gl_offs;
  int gl_flags;
  char** gl_pathv;
  void* functions[6];
} glob_t;

#define GLOB_NOSORT 0x0020

#ifdef __cplusplus
extern "C" {
#endif
int glob(const char*, int, int (*)(const char*, int), glob_t*);
void globfree(glob_t*);
#ifdef __cplusplus
}
#endif
