/* A plugin for qemu-user (TCG) that counts the instructions that the emulated program executed.
 *
 * Build: gcc -O2 -shared -fPIC -o libcount.so count.c; use: qemu-aarch64 -plugin
 * ./libcount.so,out=FILE
 *
 * The few declarations of qemu-plugin.h (plugin API version 1, QEMU 4.2 and later) that it needs
 * stand here, because Debian ships the header only inside QEMU's source package. One addition for
 * each translated block, not for each instruction: exact, because a block that is left early by a
 * fault is not counted twice, and nothing else leaves it early.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
typedef struct qemu_info_t qemu_info_t;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, enum qemu_plugin_op op,
                                              void *counter, uint64_t add);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*callback)(qemu_plugin_id_t,
                                                            struct qemu_plugin_tb *));
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, void *),
                                    void *data);

#define EXPORT __attribute__((visibility("default")))

EXPORT int qemu_plugin_version = 1;

static uint64_t executed;
static char out_path[4096];

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &executed,
                                           qemu_plugin_tb_n_insns(tb));
}

static void finish(qemu_plugin_id_t id, void *data) {
  (void)id;
  (void)data;
  FILE *file = fopen(out_path, "w");
  if (file == NULL) return;
  fprintf(file, "%" PRIu64 "\n", executed);
  fclose(file);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
                               char **argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "out=", 4) != 0) return -1;
  snprintf(out_path, sizeof(out_path), "%s", argv[0] + 4);
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, finish, NULL);
  return 0;
}
