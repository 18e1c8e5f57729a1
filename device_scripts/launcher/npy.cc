#include "npy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../edgert/integer.h"
#include "system.h"

namespace launcher {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6;
constexpr size_t kMaxHeaderBytes = 64 * 1024;
constexpr size_t kAlignment = 64;

struct Type {
  edgesdk_dtype dtype;
  const char* npy;
  const char* name;
  size_t bytes;
};

// NumPy has no bfloat16: it is written as raw two-byte values, as ml_dtypes does. `npy` begins with
// the byte order, which NumPy spells '|' where there is none; in reading it is '<' or '|'.
constexpr Type kTypes[] = {
    {EDGESDK_FLOAT32, "<f4", "float32", 4}, {EDGESDK_FLOAT64, "<f8", "float64", 8},
    {EDGESDK_FLOAT16, "<f2", "float16", 2}, {EDGESDK_BFLOAT16, "<V2", "bfloat16", 2},
    {EDGESDK_INT8, "|i1", "int8", 1},       {EDGESDK_INT16, "<i2", "int16", 2},
    {EDGESDK_INT32, "<i4", "int32", 4},     {EDGESDK_INT64, "<i8", "int64", 8},
    {EDGESDK_UINT8, "|u1", "uint8", 1},     {EDGESDK_UINT16, "<u2", "uint16", 2},
    {EDGESDK_UINT32, "<u4", "uint32", 4},   {EDGESDK_UINT64, "<u8", "uint64", 8},
    {EDGESDK_BOOL, "|b1", "bool", 1},
};

const Type* FindType(edgesdk_dtype dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return &type;
  }
  return nullptr;
}

bool Fail(char* error, size_t size, const char* path, const char* reason) {
  snprintf(error, size, "%s: %s", path, reason);
  return false;
}

// The text after "'key':" in the header's Python dictionary.
const char* HeaderValue(const char* header, const char* key) {
  char quoted[32];
  snprintf(quoted, sizeof(quoted), "'%s'", key);
  const char* at = strstr(header, quoted);
  if (at == nullptr) return nullptr;
  at += strlen(quoted);
  while (*at == ' ' || *at == ':') ++at;
  return at;
}

// Is `descr` the quoted name of `type`, e.g. '<f4'?
bool IsType(const char* descr, const Type& type) {
  bool quoted = (descr[0] == '\'' || descr[0] == '"') && (descr[1] == '<' || descr[1] == '|');
  return quoted && (descr[1] == type.npy[0] || type.dtype == EDGESDK_BFLOAT16) &&
         strncmp(descr + 2, type.npy + 1, 2) == 0 && descr[4] == descr[0];
}

bool ParseHeader(const char* header, Array* array, char* error, size_t error_size,
                 const char* path) {
  const char* descr = HeaderValue(header, "descr");
  const char* fortran = HeaderValue(header, "fortran_order");
  const char* shape = HeaderValue(header, "shape");
  if (descr == nullptr || fortran == nullptr || shape == nullptr || *shape != '(') {
    return Fail(error, error_size, path, "its header is damaged");
  }
  const Type* found = nullptr;
  for (const Type& type : kTypes) {
    if (IsType(descr, type)) found = &type;
  }
  if (found == nullptr) {
    return Fail(error, error_size, path, "its data type is not supported (save it little-endian)");
  }
  // The flattened order only differs if there are two dimensions that matter, but saying so early
  // is kinder than a wrong result.
  if (strncmp(fortran, "False", 5) != 0) {
    return Fail(error, error_size, path, "it is in Fortran order; save numpy.ascontiguousarray(x)");
  }
  array->dtype = found->dtype;
  array->ndim = 0;
  size_t count = 1;
  const char* at = shape + 1;
  while (true) {
    while (*at == ' ' || *at == ',') ++at;
    if (*at == ')') break;
    const char* end = nullptr;
    int64_t dim = edgert::ParseInteger(at, &end);
    if (end == at || dim < 0 || array->ndim == kMaxDims) {
      return Fail(error, error_size, path, "its shape is damaged");
    }
    at = end;
    array->shape[array->ndim++] = dim;
    // Compared with 64 bits: on a 32-bit system `dim` may not fit size_t.
    uint64_t size = static_cast<uint64_t>(dim);
    if (size != 0 && count > SIZE_MAX / 16 / size) {
      return Fail(error, error_size, path, "its shape is too large");
    }
    count *= static_cast<size_t>(size);
  }
  array->size_bytes = count * found->bytes;
  return true;
}

bool ReadBody(FILE* file, const char* path, Array* array, char* error, size_t error_size) {
  unsigned char start[kMagicBytes + 2];
  if (fread(start, 1, sizeof(start), file) != sizeof(start) ||
      memcmp(start, kMagic, kMagicBytes) != 0) {
    return Fail(error, error_size, path, "it is not a .npy file");
  }
  unsigned version = start[kMagicBytes];
  if (version < 1 || version > 3) {
    return Fail(error, error_size, path, "its format version is not known (1 to 3 are)");
  }
  size_t length_bytes = version == 1 ? 2 : 4;
  unsigned char length[4] = {0};
  if (fread(length, 1, length_bytes, file) != length_bytes) {
    return Fail(error, error_size, path, "it is truncated");
  }
  size_t header_bytes = static_cast<size_t>(length[0]) | static_cast<size_t>(length[1]) << 8 |
                        static_cast<size_t>(length[2]) << 16 | static_cast<size_t>(length[3]) << 24;
  if (header_bytes > kMaxHeaderBytes) return Fail(error, error_size, path, "its header is damaged");
  char* header = static_cast<char*>(malloc(header_bytes + 1));
  if (header == nullptr) return Fail(error, error_size, path, "out of memory");
  bool complete = fread(header, 1, header_bytes, file) == header_bytes;
  header[complete ? header_bytes : 0] = '\0';
  bool parsed = complete ? ParseHeader(header, array, error, error_size, path)
                         : Fail(error, error_size, path, "it is truncated");
  free(header);
  if (!parsed) return false;
  size_t room = array->size_bytes == 0 ? 1 : array->size_bytes;
  array->data = AllocateAligned(room, kAlignment);
  if (array->data == nullptr) return Fail(error, error_size, path, "out of memory");
  if (fread(array->data, 1, array->size_bytes, file) != array->size_bytes) {
    FreeArray(array);
    return Fail(error, error_size, path, "it is truncated");
  }
  return true;
}

double HalfToDouble(uint16_t half) {
  int exponent = half >> 10 & 0x1f;
  double fraction = half & 0x3ff;
  double value;
  if (exponent == 0x1f) {
    value = fraction != 0 ? __builtin_nan("") : __builtin_inf();
  } else if (exponent == 0) {
    value = fraction / 1024.0 / 16384.0;
  } else {
    value = 1.0 + fraction / 1024.0;
    for (int i = exponent; i < 15; ++i) value /= 2.0;
    for (int i = 15; i < exponent; ++i) value *= 2.0;
  }
  return (half & 0x8000) != 0 ? -value : value;
}

template <typename T>
double At(const void* data, size_t index) {
  return static_cast<double>(static_cast<const T*>(data)[index]);
}

}  // namespace

const char* NpyName(edgesdk_dtype dtype) {
  const Type* type = FindType(dtype);
  return type != nullptr ? type->npy : "?";
}

const char* DtypeName(edgesdk_dtype dtype) {
  const Type* type = FindType(dtype);
  return type != nullptr ? type->name : "unknown";
}

size_t DtypeBytes(edgesdk_dtype dtype) {
  const Type* type = FindType(dtype);
  return type != nullptr ? type->bytes : 1;
}

bool ReadNpy(const char* path, Array* array, char* error, size_t error_size) {
  FILE* file = OpenFile(path, "rb");
  if (file == nullptr) return Fail(error, error_size, path, strerror(errno));
  bool ok = ReadBody(file, path, array, error, error_size);
  fclose(file);
  return ok;
}

bool WriteNpy(const char* path, const edgesdk_tensor_info& info, const void* data, char* error,
              size_t error_size) {
  if (info.ndim > kMaxDims) return Fail(error, error_size, path, "too many dimensions");
  char shape[kMaxDims * 24] = "";
  size_t used = 0;
  for (int32_t i = 0; i < info.ndim; ++i) {
    used += static_cast<size_t>(snprintf(shape + used, sizeof(shape) - used, "%lld%s",
                                         static_cast<long long>(info.shape[i]),
                                         info.ndim == 1 || i + 1 < info.ndim ? ", " : ""));
  }
  char header[512];
  int text =
      snprintf(header, sizeof(header), "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }",
               NpyName(info.dtype), shape);
  // The data begin at a multiple of 64, the header ends with a line feed (NEP 1).
  size_t total = (kMagicBytes + 4 + static_cast<size_t>(text) + 1 + 63) / 64 * 64;
  size_t header_bytes = total - kMagicBytes - 4;
  memset(header + text, ' ', header_bytes - static_cast<size_t>(text));
  header[header_bytes - 1] = '\n';
  unsigned char start[kMagicBytes + 4];
  memcpy(start, kMagic, kMagicBytes);
  start[6] = 1;
  start[7] = 0;
  start[8] = static_cast<unsigned char>(header_bytes & 0xff);
  start[9] = static_cast<unsigned char>(header_bytes >> 8);
  FILE* file = OpenFile(path, "wb");
  if (file == nullptr) return Fail(error, error_size, path, strerror(errno));
  bool ok = fwrite(start, 1, sizeof(start), file) == sizeof(start) &&
            fwrite(header, 1, header_bytes, file) == header_bytes &&
            fwrite(data, 1, info.size_bytes, file) == info.size_bytes;
  int reason = errno;
  if (fclose(file) != 0) {
    if (ok) reason = errno;
    ok = false;
  }
  if (ok) return true;
  RemoveFile(path);  // half a file is worse than none
  return Fail(error, error_size, path, strerror(reason));
}

void FreeArray(Array* array) {
  FreeAligned(array->data);
  array->data = nullptr;
}

double ElementAsDouble(edgesdk_dtype dtype, const void* data, size_t index) {
  switch (dtype) {
    case EDGESDK_FLOAT32:
      return At<float>(data, index);
    case EDGESDK_FLOAT64:
      return At<double>(data, index);
    case EDGESDK_FLOAT16:
      return HalfToDouble(static_cast<const uint16_t*>(data)[index]);
    case EDGESDK_BFLOAT16: {
      uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16;
      float value;
      memcpy(&value, &bits, sizeof(value));
      return value;
    }
    case EDGESDK_INT8:
      return At<int8_t>(data, index);
    case EDGESDK_INT16:
      return At<int16_t>(data, index);
    case EDGESDK_INT32:
      return At<int32_t>(data, index);
    case EDGESDK_INT64:
      return At<int64_t>(data, index);
    case EDGESDK_UINT8:
    case EDGESDK_BOOL:
      return At<uint8_t>(data, index);
    case EDGESDK_UINT16:
      return At<uint16_t>(data, index);
    case EDGESDK_UINT32:
      return At<uint32_t>(data, index);
    case EDGESDK_UINT64:
      return At<uint64_t>(data, index);
  }
  return 0;
}

}  // namespace launcher
