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
  kEdgertArena = 3    // the handle's block of activations
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

// One call of a compiled kernel, or (kernel == nullptr) a copy of args[0] to args[1].
struct edgert_step {
  TVMFFISafeCallType kernel;
  const char* kernel_name;
  const char* layer_name;
  const uint32_t* args;  // indices into tensors: inputs, then outputs
  uint32_t num_args;
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
};

extern const struct edgert_plan edgert_model_plan;

// Opens `edgert_model_plan`. Never replaced by another library's function of the same purpose, so
// the opening function that carries the model's name is made from it.
edgesdk_status edgert_open(uint32_t abi_version, const edgesdk_options* options,
                           edgesdk_model** model);

}  // extern "C"

#endif  // EDGERT_PLAN_H_
