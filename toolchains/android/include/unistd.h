// bionic's numbers for sysconf, where musl has others: libc/include/bits/sysconf.h. Those that edgert
// does not ask for are left out, so that none of musl's is taken by mistake.
#pragma once

#include_next <unistd.h>

#define sysconf(name) sysconf(bionic##name)
#define bionic_SC_PAGESIZE 0x0027
#define bionic_SC_NPROCESSORS_ONLN 0x0061
