// Where a program begins, and what the NDK's crtbegin_dynamic.o does otherwise: bionic's
// libc/arch-common/bionic/crtbegin.c and crtbrand.S.

typedef struct {
  void (**preinit_array)(void);
  void (**init_array)(void);
  void (**fini_array)(void);
  unsigned long preinit_array_count;
  unsigned long init_array_count;
  unsigned long fini_array_count;
} Structors;

int main(int argc, char** argv, char** environment);
_Noreturn void __libc_init(void* arguments, void (*on_exit)(void),
                           int (*start)(int, char**, char**), const Structors* structors);

// The linker has called the constructors; programs in C have no destructors.
__attribute__((used, visibility("hidden"))) void edgesdk_start(void* arguments) {
  Structors none = {0};
  __libc_init(arguments, 0, main, &none);
}

__asm__(
    ".text\n"
    ".global _start\n"
    ".type _start, %function\n"
    "_start:\n"
    "  bti j\n"
    "  mov x29, #0\n"
    "  mov x30, #0\n"
    "  mov x0, sp\n"
    "  b edgesdk_start\n"
    ".size _start, .-_start\n");

// From Android 10 on, thread-local variables of a program begin behind eight words of bionic's own.
__asm__(
    ".section .tdata,\"awT\",@progbits\n"
    ".p2align 6\n"
    ".text\n"
    ".reloc 0, R_AARCH64_NONE, .tdata\n");

// Says which Android it is for: the size of the name and of the number, type 1.
__asm__(
    ".section .note.android.ident,\"a\",%note\n"
    ".balign 4\n"
    ".long 8, 4, 1\n"
    ".asciz \"Android\"\n"
    ".long 29\n"
    ".text\n");
