// weights.h: a file of weights as constant data of the library, put there by the assembler.
//
// A compiler would take minutes and gigabytes for an array of so many numbers. Each object format
// spells the section of constants, and "seen by this library only", in its own way.
#ifndef EDGERT_WEIGHTS_H_
#define EDGERT_WEIGHTS_H_

#include <stdint.h>

#if defined(_WIN32)  // COFF: what is not exported is not seen
#define EDGERT_WEIGHTS_SECTION ".section .rdata,\"dr\"\n"
#define EDGERT_WEIGHTS_SYMBOL "edgert_weights"
#define EDGERT_WEIGHTS_HIDDEN ""
#elif defined(__APPLE__)  // Mach-O
#define EDGERT_WEIGHTS_SECTION ".section __TEXT,__const\n"
#define EDGERT_WEIGHTS_SYMBOL "_edgert_weights"
#define EDGERT_WEIGHTS_HIDDEN ".private_extern _edgert_weights\n"
#else  // ELF
#define EDGERT_WEIGHTS_SECTION ".section .rodata.edgert_weights,\"a\"\n"
#define EDGERT_WEIGHTS_SYMBOL "edgert_weights"
#define EDGERT_WEIGHTS_HIDDEN ".hidden edgert_weights\n"
#endif

#if defined(_WIN32)
extern "C" const uint8_t edgert_weights[];
#else
extern "C" const uint8_t edgert_weights[] __attribute__((visibility("hidden")));
#endif

// `file` is a path in the assembler's quotes, as a string.
#define EDGERT_WEIGHTS(file)                                                               \
  __asm__(EDGERT_WEIGHTS_SECTION                                                           \
          ".balign 64\n"                                                                   \
          ".globl " EDGERT_WEIGHTS_SYMBOL "\n" EDGERT_WEIGHTS_HIDDEN EDGERT_WEIGHTS_SYMBOL \
          ":\n"                                                                            \
          ".incbin " file                                                                  \
          "\n"                                                                             \
          ".text\n")

#endif  // EDGERT_WEIGHTS_H_
