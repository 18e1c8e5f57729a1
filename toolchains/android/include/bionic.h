// Comes before all else (-include). Where bionic on 64-bit ARM differs from musl, whose headers zig has, in
// what no header beside this one corrects (glob.h, pthread.h, signal.h, unistd.h). The rest of what edgert
// uses (stat, dirent, rusage, pthread_mutex_t, ...) has the same layout in both, which
// tests/unit/test_android_headers.py holds against bionic's own headers.
//
// Name a new header here: zig keeps objects and does not see one that comes to stand in front of another.
#pragma once

// bits/signal_types.h: the kernel's 64 signals, where musl has room for 1024.
typedef unsigned long sigset_t;
#define __DEFINED_sigset_t

// errno.h
#define __errno_location __errno
