// npy.h: NumPy's .npy files (format 1.0 to 3.0, little-endian, C order), read and written.
#ifndef EDGESDK_LAUNCHER_NPY_H_
#define EDGESDK_LAUNCHER_NPY_H_

#include <stddef.h>
#include <stdint.h>

#include "edgesdk_model.h"

namespace launcher {

constexpr int kMaxDims = 16;

struct Array {
  edgesdk_dtype dtype = EDGESDK_FLOAT32;
  int32_t ndim = 0;
  int64_t shape[kMaxDims] = {0};
  size_t size_bytes = 0;
  void* data = nullptr;  // aligned to 64 bytes; freed with FreeArray
};

// NumPy's name of a type as .npy files spell it ("<f4"), and the readable one ("float32").
const char* NpyName(edgesdk_dtype dtype);
const char* DtypeName(edgesdk_dtype dtype);
size_t DtypeBytes(edgesdk_dtype dtype);

// Both return false and write the reason to `error`. A file that could not be written whole is
// removed.
bool ReadNpy(const char* path, Array* array, char* error, size_t error_size);
bool WriteNpy(const char* path, const edgesdk_tensor_info& info, const void* data, char* error,
              size_t error_size);
void FreeArray(Array* array);

// Element `index` as a double, whatever the type. 64-bit integers lose precision beyond 2^53.
double ElementAsDouble(edgesdk_dtype dtype, const void* data, size_t index);

}  // namespace launcher

#endif  // EDGESDK_LAUNCHER_NPY_H_
