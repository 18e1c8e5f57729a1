// What edgert, the launcher and the agent use of the C library's types and constants, as numbers.
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NUMBER(name, value) const long layout_##name = (long)(value);
#define SIZE(name, type) NUMBER(sizeof_##name, sizeof(type))
#define PLACE(name, type, field) NUMBER(name##_##field, offsetof(type, field))

SIZE(size_t, size_t)
SIZE(time_t, time_t)
SIZE(off_t, off_t)
SIZE(mode_t, mode_t)
SIZE(pid_t, pid_t)
SIZE(wchar_t, wchar_t)
SIZE(pthread_t, pthread_t)
SIZE(pthread_once_t, pthread_once_t)
SIZE(pthread_mutex_t, pthread_mutex_t)
SIZE(pthread_cond_t, pthread_cond_t)
SIZE(sigset_t, sigset_t)
SIZE(cpu_set_t, cpu_set_t)
SIZE(timespec, struct timespec)
PLACE(timespec, struct timespec, tv_nsec)
SIZE(pollfd, struct pollfd)
PLACE(pollfd, struct pollfd, revents)
SIZE(sigaction, struct sigaction)
PLACE(sigaction, struct sigaction, sa_flags)
PLACE(sigaction, struct sigaction, sa_handler)
PLACE(sigaction, struct sigaction, sa_mask)
SIZE(stat, struct stat)
PLACE(stat, struct stat, st_mode)
PLACE(stat, struct stat, st_size)
PLACE(stat, struct stat, st_mtime)
PLACE(dirent, struct dirent, d_type)
PLACE(dirent, struct dirent, d_name)
SIZE(glob_t, glob_t)
PLACE(glob, glob_t, gl_pathc)
PLACE(glob, glob_t, gl_pathv)
SIZE(rlimit, struct rlimit)
PLACE(rusage, struct rusage, ru_maxrss)
PLACE(rusage, struct rusage, ru_nvcsw)
SIZE(dl_info, Dl_info)
PLACE(dl_info, Dl_info, dli_fname)
PLACE(dl_info, Dl_info, dli_fbase)

#define CONSTANT(name) const long layout_##name = (long)(name);
CONSTANT(RTLD_NOW)
CONSTANT(RTLD_LOCAL)
CONSTANT(RTLD_GLOBAL)
NUMBER(RTLD_DEFAULT, (size_t)RTLD_DEFAULT)
CONSTANT(O_DIRECTORY)
CONSTANT(O_CLOEXEC)
CONSTANT(O_CREAT)
CONSTANT(O_EXCL)
CONSTANT(O_TRUNC)
CONSTANT(LOCK_EX)
CONSTANT(LOCK_NB)
CONSTANT(MAP_SHARED)
CONSTANT(MAP_PRIVATE)
CONSTANT(MAP_ANONYMOUS)
CONSTANT(PROT_READ)
CONSTANT(PROT_WRITE)
CONSTANT(SIGCHLD)
CONSTANT(SIGTERM)
CONSTANT(SIGKILL)
CONSTANT(SIG_BLOCK)
CONSTANT(SIG_SETMASK)
CONSTANT(POLLIN)
CONSTANT(POLLOUT)
CONSTANT(POLLERR)
CONSTANT(POLLNVAL)
CONSTANT(CLOCK_MONOTONIC)
CONSTANT(WNOHANG)
CONSTANT(RLIMIT_AS)
CONSTANT(RLIMIT_CORE)
CONSTANT(RUSAGE_SELF)
CONSTANT(RUSAGE_CHILDREN)
CONSTANT(PR_SET_PDEATHSIG)
CONSTANT(AT_HWCAP)
CONSTANT(AT_HWCAP2)
CONSTANT(GLOB_NOSORT)
CONSTANT(EINTR)
CONSTANT(EAGAIN)
CONSTANT(ENOENT)
CONSTANT(SEEK_SET)
CONSTANT(SEEK_END)
