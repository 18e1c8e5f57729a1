// What Android's C library has beside musl or otherwise, so that Android's programs run on musl in
// the tests. Numbers and layouts: bionic's libc/include/bits/sysconf.h, bits/signal_types.h and
// glob.h.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char** environ;

_Noreturn void __libc_init(long* arguments, void (*on_exit)(void),
                           int (*start)(int, char**, char**), const void* structors) {
  (void)on_exit;
  (void)structors;
  exit(start((int)arguments[0], (char**)(arguments + 1), environ));
}

int* __errno(void) { return &errno; }

int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void* dso) {
  (void)dso;
  return pthread_atfork(prepare, parent, child);
}

long sysconf(int name) {
  long (*musl)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
  return musl(name == 0x27 ? _SC_PAGESIZE : name == 0x61 ? _SC_NPROCESSORS_ONLN : -1);
}

struct bionic_sigaction {
  int flags;
  void (*handler)(int);
  unsigned long mask;
  void (*restorer)(void);
};

int sigaction(int number, const struct sigaction* action, struct sigaction* old) {
  int (*musl)(int, const struct sigaction*, struct sigaction*) =
      (int (*)(int, const struct sigaction*, struct sigaction*))dlsym(RTLD_NEXT, "sigaction");
  if (old != NULL) abort();  // nobody asks
  const struct bionic_sigaction* given = (const struct bionic_sigaction*)action;
  struct sigaction real;
  memset(&real, 0, sizeof(real));
  real.sa_flags = given->flags;
  real.sa_handler = given->handler;
  memcpy(&real.sa_mask, &given->mask, sizeof(given->mask));
  return musl(number, &real, NULL);
}

// musl fills more of a set than bionic's 64 signals.
int sigemptyset(sigset_t* set) { return memset(set, 0, 8) == NULL; }
int sigfillset(sigset_t* set) { return memset(set, 0xff, 8) == NULL; }

struct bionic_glob {
  size_t count, matched, offset;
  int flags;
  char** paths;
  void* functions[6];
};

int glob(const char* pattern, int flags, int (*failed)(const char*, int), glob_t* into) {
  int (*musl)(const char*, int, int (*)(const char*, int), glob_t*) =
      (int (*)(const char*, int, int (*)(const char*, int), glob_t*))dlsym(RTLD_NEXT, "glob");
  glob_t found;
  memset(&found, 0, sizeof(found));
  int code = musl(pattern, flags & 0x20 ? GLOB_NOSORT : 0, failed, &found);
  struct bionic_glob* result = (struct bionic_glob*)into;
  memset(result, 0, sizeof(*result));
  result->count = found.gl_pathc;
  result->paths = found.gl_pathv;
  return code;
}

void globfree(glob_t* set) { (void)set; }
