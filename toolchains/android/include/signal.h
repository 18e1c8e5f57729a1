// bionic's <signal.h>, where it differs from musl's: libc/include/bits/signal_types.h, 64-bit.
#pragma once

// musl's structure has the same fields in other places.
#define sigaction musl_sigaction
#include_next <signal.h>
#undef sigaction
#undef sa_handler
#undef sa_sigaction

struct sigaction {
  int sa_flags;
  union {
    void (*sa_handler)(int);
    void (*sa_sigaction)(int, siginfo_t*, void*);
  };
  sigset_t sa_mask;
  void (*sa_restorer)(void);
};

#ifdef __cplusplus
extern "C"
#endif
int sigaction(int, const struct sigaction*, struct sigaction*);
