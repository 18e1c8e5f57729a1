// plan.h: the flat plan of a compiled network, as constant data.
//
// edgesdk/compiler/emit.py writes one C++ file per model that defines `edgert_model_plan`; the
// executor walks it. Nothing is parsed at run time, and the linker resolves every kernel.
#ifndef EDGERT_PLAN_H_
#define EDGERT_PLAN_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "edgesdk_model.h"

extern "C" {

// Where the bytes of a tensor live.
enum edgert_storage : uint8_t {
  kEdgertInput = 0,   // memory bound to input number `index`
  kEdgertOutput = 1,  // memory bound to output number `index`
  kEdgertWeight = 2,  // the library's constant block
  kEdgertArena = 3,   // the handle's block of activations
  // The same four in the accelerator's memory. An input or output may be read on either side; what
  // the caller binds in host memory is brought to the accelerator before, and back after, the
  // steps.
  kEdgertDeviceInput = 4,
  kEdgertDeviceOutput = 5,
  kEdgertDeviceWeight = 6,
  kEdgertDeviceArena = 7
};

// A view of storage: several tensors may share bytes (a reshape costs nothing).
struct edgert_tensor {
  edgert_storage storage;
  uint8_t dtype_code;  // DLDataTypeCode
  uint8_t dtype_bits;
  uint8_t ndim;
  uint32_t index;
  uint64_t offset;  // bytes from the start of the storage, a multiple of 64
  uint64_t size_bytes;
  const int64_t* shape;
};

enum edgert_launch_flag : uint32_t {
  // The function may be started before the launch in front of it is complete, because it waits for
  // that itself before it touches memory (CUDA, from sm_90 on: griddepcontrol.wait).
  kEdgertStartsEarly = 1
};

// A kernel of the accelerator. All sizes are fixed; its arguments are the addresses of tensors.
struct edgert_launch {
  const char* function;  // its name in the device code
  uint32_t grid[3];
  uint32_t block[3];      // threads of a block; OpenCL's local size
  uint32_t shared_bytes;  // dynamic shared memory of a block
  uint32_t flags;         // edgert_launch_flag
};

enum edgert_image_format : uint32_t {
  kEdgertCubin = 1,  // machine code of one CUDA architecture
  kEdgertPtx = 2,    // text that the CUDA driver compiles, for this architecture and later ones
  kEdgertOpenclSource = 3,
  kEdgertMetalSource = 4
};

// The accelerator's code in one form of several; it holds all functions of the plan.
struct edgert_image {
  edgert_image_format format;
  uint32_t architecture;  // CUDA: 10 * major + minor of the compute capability; else 0
  const uint8_t* data;    // text ends with a zero byte, which size_bytes counts
  uint64_t size_bytes;
};

// One step: `kernel` calls a compiled function on the CPU, `launch` one of the accelerator. With
// neither it copies args[0] to args[1], which may be on different sides.
struct edgert_step {
  TVMFFISafeCallType kernel;
  const char* kernel_name;
  const char* layer_name;
  const uint32_t* args;  // indices into tensors: inputs, then outputs
  uint32_t num_args;
  const edgert_launch* launch;
};

// An input or output as the caller sees it. `dtype` is an edgesdk_dtype.
struct edgert_port {
  const char* name;
  int32_t dtype;
  int32_t ndim;
  const int64_t* shape;
  uint64_t size_bytes;
};

struct edgert_plan {
  const char* name;
  const char* target;
  const char* build_id;
  const char* const* cpu_features;  // names as the kernel of the OS prints them; ends with nullptr
  const edgert_port* inputs;
  const edgert_port* outputs;
  const edgert_tensor* tensors;
  const edgert_step* steps;
  uint32_t num_inputs;
  uint32_t num_outputs;
  uint32_t num_tensors;
  uint32_t num_steps;
  const uint8_t* weights;
  uint64_t weights_bytes;
  uint64_t arena_bytes;
  const struct edgert_accelerator* accelerator;  // nullptr: the CPU does everything
  const edgert_image* images;
  uint32_t num_images;
  uint64_t device_arena_bytes;
  // The same network for other shapes, over the same weights and images. Only the first has some.
  const struct edgert_plan* others;
  uint32_t num_others;
};

extern const struct edgert_plan edgert_model_plan;

// Opens `edgert_model_plan`. Never replaced by another library's function of the same purpose, so
// the opening function that carries the model's name is made from it.
edgesdk_status edgert_open(uint32_t abi_version, const edgesdk_options* options,
                           edgesdk_model** model);

}  // extern "C"

#endif  // EDGERT_PLAN_H_
