// What the NDK links into each file instead of finding it in libc.so: bionic's
// libc/arch-common/bionic/pthread_atfork.h.
#pragma once

#define pthread_atfork musl_pthread_atfork
#include_next <pthread.h>
#undef pthread_atfork

#ifdef __cplusplus
extern "C" {
#endif
extern __attribute__((visibility("hidden"))) void* __dso_handle;
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void*);
static inline int pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
  return __register_atfork(prepare, parent, child, &__dso_handle);
}
#ifdef __cplusplus
}
#endif
