/* edgesdk_model.h: the C API of a compiled model.
 *
 * A library made by edgesdk holds one network with its weights and everything it needs to run.
 * Link it, or load it with dlopen and call edgesdk_get_api:
 *
 *     edgesdk_model* model = NULL;
 *     if (edgesdk_model_open(EDGESDK_ABI_VERSION, NULL, &model) != EDGESDK_OK)
 *       fprintf(stderr, "%s\n", edgesdk_model_last_error(NULL));
 *     edgesdk_model_set_input(model, 0, pixels, pixels_size_bytes);
 *     edgesdk_model_run(model);
 *     const void* scores = NULL;
 *     edgesdk_model_get_output(model, 0, &scores, NULL);
 *     edgesdk_model_close(model);
 *
 * Threads: a model handle serves one thread at a time; any number of handles may be open and run at
 * the same time, each with memory of its own for activations. Weights are shared and never copied.
 * One pool of threads serves all handles of a library. For many handles at once, num_threads = 1
 * in the options of each gives the highest throughput. The pool's threads take no signals. After
 * fork() the child may go on using its handles; it gets a pool of its own. (A GPU's driver does not
 * survive fork(): there the child opens no handle and uses none.)
 *
 * GPUs: a library built for one looks for its driver when it is opened, copies the weights to the
 * GPU once for all handles, and each run brings the inputs there and the outputs back. Inputs and
 * outputs may also stay in the GPU's memory, see edgesdk_model_set_input_device.
 *
 * Several models in one program: every library has an opening function of its own,
 * edgesdk_open_NAME, declared in NAME.h beside this header. All other functions work on the handle
 * of whichever library opened it, so linking several libraries together is fine.
 *
 * No C++ type and no exception crosses this boundary.
 */
#ifndef EDGESDK_MODEL_H_
#define EDGESDK_MODEL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when a program compiled against an older header would misbehave. Checked at open. */
#define EDGESDK_ABI_VERSION 1u

#if defined(EDGESDK_BUILDING_LIBRARY)
#if defined(_WIN32)
#define EDGESDK_API __declspec(dllexport)
#else
#define EDGESDK_API __attribute__((visibility("default")))
#endif
#else
#define EDGESDK_API
#endif

typedef struct edgesdk_model edgesdk_model;

typedef enum edgesdk_status {
  EDGESDK_OK = 0,
  EDGESDK_ERROR_ABI = 1,              /* header and library are of different ABI versions */
  EDGESDK_ERROR_INVALID_ARGUMENT = 2, /* NULL, index out of range, or a wrong size */
  EDGESDK_ERROR_DEVICE = 3, /* this CPU or GPU cannot run the library, or the GPU failed */
  EDGESDK_ERROR_OUT_OF_MEMORY = 4,
  EDGESDK_ERROR_INPUT_MISSING = 5, /* run before every input was set */
  EDGESDK_ERROR_KERNEL = 6         /* a kernel refused its arguments or failed */
} edgesdk_status;

typedef enum edgesdk_dtype {
  EDGESDK_FLOAT32 = 1,
  EDGESDK_FLOAT64 = 2,
  EDGESDK_FLOAT16 = 3,
  EDGESDK_BFLOAT16 = 4,
  EDGESDK_INT8 = 5,
  EDGESDK_INT16 = 6,
  EDGESDK_INT32 = 7,
  EDGESDK_INT64 = 8,
  EDGESDK_UINT8 = 9,
  EDGESDK_UINT16 = 10,
  EDGESDK_UINT32 = 11,
  EDGESDK_UINT64 = 12,
  EDGESDK_BOOL = 13 /* one byte, 0 or 1 */
} edgesdk_dtype;

/* An input or output. Row-major, dense. Strings and shape live as long as the library is loaded. */
typedef struct edgesdk_tensor_info {
  const char* name; /* UTF-8, as in the original model */
  edgesdk_dtype dtype;
  int32_t ndim;
  const int64_t* shape; /* ndim numbers; NULL for a scalar */
  size_t size_bytes;
} edgesdk_tensor_info;

/* One step of the network, in the order of execution. Times are 0 unless profiling is on. */
typedef struct edgesdk_layer_info {
  const char* name;   /* what the step computes */
  const char* kernel; /* the compiled function */
  uint64_t last_ns;   /* duration in the last run */
  uint64_t total_ns;  /* sum over the runs since profiling was switched on */
} edgesdk_layer_info;

typedef struct edgesdk_memory_info {
  size_t weights_bytes;     /* mapped from the library file, shared by all handles and processes */
  size_t activations_bytes; /* allocated per handle: planned intermediate results */
  size_t io_bytes;          /* allocated per handle: outputs, and copies of unaligned inputs */
} edgesdk_memory_info;

/* Where a model runs, and what it holds there. struct_size must be sizeof(edgesdk_device_info) when
 * it is passed; zero means that a field has no meaning for this kind of device. */
typedef struct edgesdk_device_info {
  size_t struct_size;
  const char* kind;           /* "cpu", "cuda", "opencl" or "metal" */
  const char* name;           /* as its driver gives it; "" for the CPU */
  int32_t index;              /* as in edgesdk_options */
  int32_t compute_capability; /* CUDA: 10 * major + minor */
  int32_t driver_version;     /* CUDA: 1000 * major + 10 * minor of what the driver supports */
  int32_t code_architecture;  /* CUDA: the compute capability that the code in use was built for */
  int32_t code_is_intermediate; /* 1: the driver compiled it from PTX, 0: it is machine code */
  int32_t unified_memory;     /* 1: CPU and GPU share their memory, and inputs and outputs in it */
  int32_t replays;            /* 1: runs replay a recorded graph of commands */
  const char* replays_reason; /* why not, otherwise "" */
  uint64_t transfer_ns;       /* copies of inputs and outputs in the last profiled run */
  size_t memory_bytes;        /* of the device */
  size_t free_bytes;          /* of them, now */
  size_t weights_bytes;       /* on the device, shared by this library's handles */
  size_t activations_bytes;   /* on the device, of this handle */
  size_t io_bytes;            /* on the device, of this handle: inputs and outputs */
  const char* driver;         /* OpenCL: the versions of device and driver, otherwise NULL */
  uint64_t load_ns;           /* OpenCL, Metal: what it took to build the code or to read it */
  int32_t code_from_cache;    /* OpenCL: 1: the code was built by an earlier process */
  const char* code_cache;     /* OpenCL: the file that keeps it, or "not kept: REASON" */
} edgesdk_device_info;

/* Pass NULL for the defaults. struct_size must be sizeof(edgesdk_options); zero in any other field
 * means its default. (Programs that were built when this had fewer fields pass less.) */
typedef struct edgesdk_options {
  size_t struct_size;
  /* Threads for this handle, at most the pool's size (the CPUs this process may use, or
   * EDGESDK_NUM_THREADS from the environment). */
  int32_t num_threads;
  /* Where a failing open writes its reason, a terminated string. The way to learn it when several
   * libraries are linked into one program; otherwise edgesdk_model_last_error(NULL) tells. */
  char* error_buffer;
  size_t error_buffer_size;
  /* Which GPU, in the order of its driver, from 0. Libraries for the CPU do not look at this. */
  int32_t device_index;
  /* The queue that runs use, for example a cudaStream_t (CUstream) made by the caller; it must
   * outlive the handle. NULL: a queue of the handle's own. Runs return when their work is done.
   * OpenCL: a cl_command_queue, whose device and context are used. Metal: an MTLCommandQueue, which
   * is retained, and whose device is used. */
  void* device_stream;
  /* Where OpenCL code is kept once it is built. NULL: EDGESDK_CACHE_DIR from the environment, or
   * the user's cache folder. Apps for Android have neither: give them Context.getCodeCacheDir(). */
  const char* cache_folder;
} edgesdk_options;

/* Opens the network: checks ABI version and CPU, and allocates the memory of one handle.
 * abi_version is always EDGESDK_ABI_VERSION. On failure *model is NULL. */
EDGESDK_API edgesdk_status edgesdk_model_open(uint32_t abi_version, const edgesdk_options* options,
                                              edgesdk_model** model);

/* Releases the handle and its memory. NULL is allowed. */
EDGESDK_API void edgesdk_model_close(edgesdk_model* model);

/* The reason of the handle's last failure, or "" if there was none. With NULL: the reason of this
 * thread's last failed open, or of its last call without a handle. Valid until the next call with
 * the same handle. */
EDGESDK_API const char* edgesdk_model_last_error(const edgesdk_model* model);

/* The model's name, the target it was built for, and a hash that names this build. */
EDGESDK_API const char* edgesdk_model_name(const edgesdk_model* model);
EDGESDK_API const char* edgesdk_model_target(const edgesdk_model* model);
EDGESDK_API const char* edgesdk_model_build_id(const edgesdk_model* model);

EDGESDK_API int32_t edgesdk_model_num_inputs(const edgesdk_model* model);
EDGESDK_API int32_t edgesdk_model_num_outputs(const edgesdk_model* model);
EDGESDK_API edgesdk_status edgesdk_model_input_info(edgesdk_model* model, int32_t index,
                                                    edgesdk_tensor_info* info);
EDGESDK_API edgesdk_status edgesdk_model_output_info(edgesdk_model* model, int32_t index,
                                                     edgesdk_tensor_info* info);

/* Binds an input to the caller's memory. Nothing is copied if data is aligned to 64 bytes; else
 * each run copies it first. The memory must stay valid while runs use it; size_bytes must be the
 * input's exact size. The binding holds until it is replaced. */
EDGESDK_API edgesdk_status edgesdk_model_set_input(edgesdk_model* model, int32_t index,
                                                   const void* data, size_t size_bytes);

/* Binds an output to the caller's memory (optional), under the same rules. NULL with size 0 goes
 * back to the handle's own memory. */
EDGESDK_API edgesdk_status edgesdk_model_set_output(edgesdk_model* model, int32_t index, void* data,
                                                    size_t size_bytes);

/* Runs the network once and returns when all outputs are written. */
EDGESDK_API edgesdk_status edgesdk_model_run(edgesdk_model* model);

/* Where an output is. *data stays valid until close, its content until the next run. size_bytes may
 * be NULL. */
EDGESDK_API edgesdk_status edgesdk_model_get_output(edgesdk_model* model, int32_t index,
                                                    const void** data, size_t* size_bytes);

/* Per-layer timing, off at first; it costs two clock readings per layer. */
EDGESDK_API void edgesdk_model_set_profiling(edgesdk_model* model, int32_t enabled);
EDGESDK_API int32_t edgesdk_model_num_layers(const edgesdk_model* model);
EDGESDK_API edgesdk_status edgesdk_model_layer_info(edgesdk_model* model, int32_t index,
                                                    edgesdk_layer_info* info);

EDGESDK_API edgesdk_status edgesdk_model_memory(edgesdk_model* model, edgesdk_memory_info* info);

/* Threads that a run of this handle may use. */
EDGESDK_API int32_t edgesdk_model_num_threads(const edgesdk_model* model);

/* Has an input stay in the GPU's memory: runs read it at data, an address of the GPU that is a
 * multiple of 16, and copy nothing. NULL with size 0: in the handle's own memory there, with what
 * it holds, which is the input of the last run if nobody wrote over it.
 * edgesdk_model_set_input goes back to the host. Binding an address that is none of the last few
 * costs time at the next run, which records its commands anew. What the caller's own commands write
 * there must be done before the run, or be in the queue that was given as device_stream. */
EDGESDK_API edgesdk_status edgesdk_model_set_input_device(edgesdk_model* model, int32_t index,
                                                          void* data, size_t size_bytes);

/* The same for an output: runs write it at data, or with NULL in the handle's own memory there, and
 * do not bring it to the host. edgesdk_model_get_output then copies it on demand.
 * edgesdk_model_set_output goes back to the host. */
EDGESDK_API edgesdk_status edgesdk_model_set_output_device(edgesdk_model* model, int32_t index,
                                                           void* data, size_t size_bytes);

/* The address on the GPU where runs read an input or write an output: what was bound, or the
 * handle's own memory, which stays valid until close. One model's output may so become another's
 * input. size_bytes may be NULL. */
EDGESDK_API edgesdk_status edgesdk_model_get_input_device(edgesdk_model* model, int32_t index,
                                                          void** data, size_t* size_bytes);
EDGESDK_API edgesdk_status edgesdk_model_get_output_device(edgesdk_model* model, int32_t index,
                                                           void** data, size_t* size_bytes);

EDGESDK_API edgesdk_status edgesdk_model_device_info(edgesdk_model* model,
                                                     edgesdk_device_info* info);

/* Binds an input to memory of the handle's own, aligned to 64 bytes and valid until close, and
 * tells where it is: what is written there before a run is not copied once more on the host. For a
 * GPU it is page-locked; where CPU and GPU share one memory, the GPU reads it there. size_bytes may
 * be NULL. */
EDGESDK_API edgesdk_status edgesdk_model_own_input(edgesdk_model* model, int32_t index, void** data,
                                                   size_t* size_bytes);

/* A library may serve several fixed shapes of its network, numbered from 0: its variants. A handle
 * begins with variant 0, and all functions above are about the variant in use. How many there are
 * (1 for most libraries), and which one is in use: */
EDGESDK_API int32_t edgesdk_model_num_variants(const edgesdk_model* model);
EDGESDK_API int32_t edgesdk_model_variant(const edgesdk_model* model);

/* Inputs and outputs of any variant; names, types and their order are those of all. */
EDGESDK_API edgesdk_status edgesdk_model_variant_input_info(edgesdk_model* model, int32_t variant,
                                                            int32_t index,
                                                            edgesdk_tensor_info* info);
EDGESDK_API edgesdk_status edgesdk_model_variant_output_info(edgesdk_model* model, int32_t variant,
                                                             int32_t index,
                                                             edgesdk_tensor_info* info);

/* Has the next runs use a variant. The first time it allocates inputs and outputs for it; memory
 * for activations is that of the largest variant and serves all of them (on a GPU each has its
 * own). Each variant keeps its own bindings, outputs and profile, so going back and forth costs
 * nothing. On failure the variant in use stays. */
EDGESDK_API edgesdk_status edgesdk_model_select_variant(edgesdk_model* model, int32_t variant);

/* All functions above as a table, for programs that load the library with dlopen. Newer functions
 * are at the end: where struct_size does not reach, the library is older and has none. */
typedef struct edgesdk_api {
  uint32_t abi_version;
  uint32_t struct_size;
  edgesdk_status (*open)(uint32_t, const edgesdk_options*, edgesdk_model**);
  void (*close)(edgesdk_model*);
  const char* (*last_error)(const edgesdk_model*);
  const char* (*name)(const edgesdk_model*);
  const char* (*target)(const edgesdk_model*);
  const char* (*build_id)(const edgesdk_model*);
  int32_t (*num_inputs)(const edgesdk_model*);
  int32_t (*num_outputs)(const edgesdk_model*);
  edgesdk_status (*input_info)(edgesdk_model*, int32_t, edgesdk_tensor_info*);
  edgesdk_status (*output_info)(edgesdk_model*, int32_t, edgesdk_tensor_info*);
  edgesdk_status (*set_input)(edgesdk_model*, int32_t, const void*, size_t);
  edgesdk_status (*set_output)(edgesdk_model*, int32_t, void*, size_t);
  edgesdk_status (*run)(edgesdk_model*);
  edgesdk_status (*get_output)(edgesdk_model*, int32_t, const void**, size_t*);
  void (*set_profiling)(edgesdk_model*, int32_t);
  int32_t (*num_layers)(const edgesdk_model*);
  edgesdk_status (*layer_info)(edgesdk_model*, int32_t, edgesdk_layer_info*);
  edgesdk_status (*memory)(edgesdk_model*, edgesdk_memory_info*);
  int32_t (*num_threads)(const edgesdk_model*);
  edgesdk_status (*set_input_device)(edgesdk_model*, int32_t, void*, size_t);
  edgesdk_status (*set_output_device)(edgesdk_model*, int32_t, void*, size_t);
  edgesdk_status (*get_input_device)(edgesdk_model*, int32_t, void**, size_t*);
  edgesdk_status (*get_output_device)(edgesdk_model*, int32_t, void**, size_t*);
  edgesdk_status (*device_info)(edgesdk_model*, edgesdk_device_info*);
  edgesdk_status (*own_input)(edgesdk_model*, int32_t, void**, size_t*);
  int32_t (*num_variants)(const edgesdk_model*);
  int32_t (*variant)(const edgesdk_model*);
  edgesdk_status (*variant_input_info)(edgesdk_model*, int32_t, int32_t, edgesdk_tensor_info*);
  edgesdk_status (*variant_output_info)(edgesdk_model*, int32_t, int32_t, edgesdk_tensor_info*);
  edgesdk_status (*select_variant)(edgesdk_model*, int32_t);
} edgesdk_api;

/* Returns the library's table, or NULL if it does not speak abi_version. */
EDGESDK_API const edgesdk_api* edgesdk_get_api(uint32_t abi_version);

#ifdef __cplusplus
}
#endif

#endif /* EDGESDK_MODEL_H_ */
