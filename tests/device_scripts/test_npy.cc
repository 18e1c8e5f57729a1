// .npy files: every type there and back, and damaged files of every kind, which must be refused
// with a reason and without a fault. Run under AddressSanitizer to mean much.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../../device_scripts/edgert/integer.h"
#include "check.h"
#include "npy.h"

namespace {

using launcher::Array;

constexpr edgesdk_dtype kAll[] = {
    EDGESDK_FLOAT32, EDGESDK_FLOAT64, EDGESDK_FLOAT16, EDGESDK_BFLOAT16, EDGESDK_INT8,
    EDGESDK_INT16,   EDGESDK_INT32,   EDGESDK_INT64,   EDGESDK_UINT8,    EDGESDK_UINT16,
    EDGESDK_UINT32,  EDGESDK_UINT64,  EDGESDK_BOOL};

// A file in a place of its own, gone at the end.
class TemporaryFile {
 public:
  TemporaryFile() {
    // In memory where there is such a place: there are thousands of files.
    if (access("/dev/shm", W_OK) != 0) strcpy(path_, "/tmp/edgesdk_npy_XXXXXX");
    int file = mkstemp(path_);
    CHECK(file >= 0);
    close(file);
  }
  ~TemporaryFile() { unlink(path_); }
  const char* path() const { return path_; }

  void Write(const std::string& bytes) const {
    FILE* file = fopen(path_, "wb");
    CHECK_EQ(fwrite(bytes.data(), 1, bytes.size(), file), bytes.size());
    fclose(file);
  }
  std::string Read() const {
    std::string bytes;
    FILE* file = fopen(path_, "rb");
    for (int c; (c = fgetc(file)) != EOF;) bytes.push_back(static_cast<char>(c));
    fclose(file);
    return bytes;
  }

 private:
  char path_[64] = "/dev/shm/edgesdk_npy_XXXXXX";
};

// A file of format `version` with this header text and body.
std::string Npy(const std::string& header, const std::string& body = "", int version = 1) {
  std::string bytes("\x93NUMPY", 6);
  bytes.push_back(static_cast<char>(version));
  bytes.push_back(0);
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
    bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  }
  return bytes + header + body;
}

std::string Header(const std::string& descr, const std::string& shape,
                   const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}

// Returns the reason for which `bytes` are refused, without the path; "" if they are read.
std::string Refusal(const std::string& bytes) {
  TemporaryFile file;
  file.Write(bytes);
  Array array;
  char error[512] = "";
  bool read = launcher::ReadNpy(file.path(), &array, error, sizeof(error));
  CHECK_EQ(read, error[0] == '\0');
  CHECK_EQ(read, array.data != nullptr);
  launcher::FreeArray(&array);
  size_t start = strlen(file.path()) + 2;
  return read ? "" : std::string(error).substr(start);
}

TEST(every_type_there_and_back) {
  const int64_t dims[] = {2, 3, 1, 5};
  for (edgesdk_dtype dtype : kAll) {
    for (int32_t ndim : {0, 1, 2, 4}) {
      size_t count = 1;
      for (int32_t i = 0; i < ndim; ++i) count *= static_cast<size_t>(dims[i]);
      std::vector<unsigned char> data(count * launcher::DtypeBytes(dtype));
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 37 + 1);
      edgesdk_tensor_info info{"x", dtype, ndim, dims, data.size()};
      TemporaryFile file;
      char error[512] = "";
      CHECK(launcher::WriteNpy(file.path(), info, data.data(), error, sizeof(error)));
      std::string bytes = file.Read();
      CHECK_EQ((bytes.size() - data.size()) % 64, 0u);
      Array array;
      CHECK(launcher::ReadNpy(file.path(), &array, error, sizeof(error)));
      CHECK_EQ(array.dtype, dtype);
      CHECK_EQ(array.ndim, ndim);
      for (int32_t i = 0; i < ndim && i < array.ndim; ++i) CHECK_EQ(array.shape[i], dims[i]);
      CHECK_EQ(array.size_bytes, data.size());
      CHECK_EQ(reinterpret_cast<uintptr_t>(array.data) % 64, 0u);
      CHECK(memcmp(array.data, data.data(), data.size()) == 0);
      launcher::FreeArray(&array);
      CHECK(array.data == nullptr);
      CHECK_TEXT(error, "");
    }
  }
}

TEST(all_versions_and_spellings_are_read) {
  for (int version : {1, 2, 3}) {
    CHECK_TEXT(Refusal(Npy(Header("<f4", "(1,)"), "abcd", version)), "");
  }
  CHECK_TEXT(Refusal(Npy(Header("|V2", "(1,)"), "ab")), "");  // as raw two-byte values come
  CHECK_TEXT(Refusal(Npy(Header("<f4", "()"), "abcd")), "");
  CHECK_TEXT(Refusal(Npy(Header("<f4", "(0, 7)"))), "");
  CHECK_TEXT(Refusal(Npy(Header("<f4", "( 1 ,1)"), "abcd and more")), "");
  CHECK_TEXT(Refusal(Npy("{\n  'shape':(1,),'fortran_order':False,'descr':'|u1'}", "a")), "");
}

TEST(what_cannot_be_used_is_refused_with_the_reason) {
  CHECK_TEXT(Refusal(""), "it is not a .npy file");
  CHECK_TEXT(Refusal("PK\3\4 and so on, as .npz begins"), "it is not a .npy file");
  CHECK_TEXT(Refusal(Npy(Header("<f4", "(1,)"), "abcd", 4)),
             "its format version is not known (1 to 3 are)");
  std::string type = "its data type is not supported (save it little-endian)";
  for (const char* descr :
       {">f4", "<c8", "<f16", "|S3", "<U4", "|O", "", "<", "<f", "<f4x", "=f4"}) {
    CHECK_TEXT(Refusal(Npy(Header(descr, "(1,)"), "abcdefghabcdefgh")), type);
  }
  CHECK_TEXT(Refusal(Npy("{'fortran_order': False, 'shape': (1,), 'descr': [('a', '<f4')]}")),
             type);
  CHECK_TEXT(Refusal(Npy(Header("<f4", "(1, 2)", "True"), "abcdefgh")),
             "it is in Fortran order; save numpy.ascontiguousarray(x)");
  for (const char* header : {"", "{}", "{'descr': '<f4', 'shape': (1,)}", "'shape'", "'descr'"}) {
    CHECK_TEXT(Refusal(Npy(header)), "its header is damaged");
  }
  CHECK_TEXT(Refusal(Npy("{'fortran_order': False, 'shape': (1,), 'descr'")), type);
  CHECK_TEXT(Refusal(Npy("{'fortran_order': False, 'shape': (1,), 'descr': ")), type);
  CHECK_TEXT(Refusal(Npy("{'fortran_order': False, 'shape': (1,), 'descr': '<f")), type);
  std::string shape = "its shape is damaged";
  for (const char* text :
       {"(", "(1", "(1,", "(-1,)", "(x,)", "(1.5,)", "(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1)"}) {
    CHECK_TEXT(Refusal(Npy(Header("<f4", text), "abcd")), shape);
  }
  // 2^32 elements must not become 0 where size_t has 32 bits; 2^64 nowhere.
  for (const char* text : {"(4294967296, 4294967296)", "(9223372036854775807,)",
                           "(99999999999999999999,)", "(3037000500, 3037000500, 2)"}) {
    CHECK_TEXT(Refusal(Npy(Header("<f8", text), "abcd")), "its shape is too large");
  }
  std::string huge = Refusal(Npy(Header("|u1", "(4294967296,)"), "abcd"));
  CHECK(huge == "it is truncated" || huge == "out of memory" || huge == "its shape is too large");
  std::string long_header("\x93NUMPY\2\0\xff\xff\xff\x7f", 12);
  CHECK_TEXT(Refusal(long_header), "its header is damaged");
}

TEST(cut_anywhere_it_is_refused) {
  for (int version : {1, 2}) {
    std::string whole = Npy(Header("<f4", "(2, 2)"), std::string(16, 'x'), version);
    CHECK_TEXT(Refusal(whole), "");
    for (size_t size = 0; size < whole.size(); ++size) {
      std::string reason = Refusal(whole.substr(0, size));
      CHECK(reason == "it is truncated" || reason == "it is not a .npy file");
    }
  }
}

TEST(random_damage_never_faults) {
  std::mt19937 random(20240917);
  std::string whole = Npy(Header("<f4", "(2, 3)"), std::string(24, 'x'));
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = whole;
    for (unsigned n = random() % 6 + 1; n > 0; --n) {
      size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, random() % 9);
          break;
        case 2:
          bytes.insert(at, 1, "'():,0123456789<>|\0\n"[random() % 20]);
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
      }
      if (bytes.empty()) break;
    }
    if (!Refusal(bytes).empty()) ++refused;
  }
  CHECK(refused > 1000);
}

TEST(missing_files_and_full_disks_are_told) {
  Array array;
  char error[512] = "";
  CHECK(!launcher::ReadNpy("/nonexistent/x.npy", &array, error, sizeof(error)));
  CHECK_TEXT(error, "/nonexistent/x.npy: No such file or directory");
  CHECK(!launcher::ReadNpy("/tmp", &array, error, sizeof(error)));
  int64_t shape[] = {4};
  float data[4] = {0};
  edgesdk_tensor_info info{"x", EDGESDK_FLOAT32, 1, shape, sizeof(data)};
  CHECK(!launcher::WriteNpy("/nonexistent/x.npy", info, data, error, sizeof(error)));
  CHECK_TEXT(error, "/nonexistent/x.npy: No such file or directory");
  // A link to the device that is always full: the failed file goes, the device stays.
  TemporaryFile file;
  unlink(file.path());
  CHECK_EQ(symlink("/dev/full", file.path()), 0);
  CHECK(!launcher::WriteNpy(file.path(), info, data, error, sizeof(error)));
  CHECK_TEXT(error, std::string(file.path()) + ": No space left on device");
  CHECK(access(file.path(), F_OK) != 0);
  CHECK_EQ(access("/dev/full", F_OK), 0);
  int64_t many[20] = {1};
  edgesdk_tensor_info deep{"x", EDGESDK_FLOAT32, 20, many, 4};
  CHECK(!launcher::WriteNpy(file.path(), deep, data, error, sizeof(error)));
}

template <typename T>
double Element(edgesdk_dtype dtype, T value) {
  T values[2] = {T(), value};
  return launcher::ElementAsDouble(dtype, values, 1);
}

TEST(elements_become_doubles) {
  CHECK_EQ(Element<float>(EDGESDK_FLOAT32, -1.5f), -1.5);
  CHECK_EQ(Element<double>(EDGESDK_FLOAT64, 1e300), 1e300);
  CHECK_EQ(Element<int8_t>(EDGESDK_INT8, -128), -128.0);
  CHECK_EQ(Element<uint8_t>(EDGESDK_UINT8, 255), 255.0);
  CHECK_EQ(Element<int16_t>(EDGESDK_INT16, -32768), -32768.0);
  CHECK_EQ(Element<uint16_t>(EDGESDK_UINT16, 65535), 65535.0);
  CHECK_EQ(Element<int32_t>(EDGESDK_INT32, INT32_MIN), -2147483648.0);
  CHECK_EQ(Element<uint32_t>(EDGESDK_UINT32, UINT32_MAX), 4294967295.0);
  CHECK_EQ(Element<int64_t>(EDGESDK_INT64, -(int64_t{1} << 40)), -1099511627776.0);
  CHECK_EQ(Element<uint64_t>(EDGESDK_UINT64, uint64_t{1} << 63), 9223372036854775808.0);
  CHECK_EQ(Element<uint8_t>(EDGESDK_BOOL, 1), 1.0);
  CHECK_EQ(Element<uint16_t>(EDGESDK_BFLOAT16, 0xc040), -3.0);
  // IEEE 754 binary16: one, the largest, the smallest normal and subnormal, -2, infinity, NaN.
  CHECK_EQ(Element<uint16_t>(EDGESDK_FLOAT16, 0x3c00), 1.0);
  CHECK_EQ(Element<uint16_t>(EDGESDK_FLOAT16, 0x7bff), 65504.0);
  CHECK_EQ(Element<uint16_t>(EDGESDK_FLOAT16, 0x0400), std::ldexp(1.0, -14));
  CHECK_EQ(Element<uint16_t>(EDGESDK_FLOAT16, 0x0001), std::ldexp(1.0, -24));
  CHECK_EQ(Element<uint16_t>(EDGESDK_FLOAT16, 0xc000), -2.0);
  CHECK(std::isinf(Element<uint16_t>(EDGESDK_FLOAT16, 0xfc00)));
  CHECK(std::isnan(Element<uint16_t>(EDGESDK_FLOAT16, 0x7e00)));
}

TEST(integers_are_read_as_strtoll_does) {
  for (const char* text : {"42", " -7,", "+0", "x", "", "-", "9223372036854775807", "0b101",
                           "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
                           "123456789012345678901234567890 ", "\t\n 15)"}) {
    char* wanted_end = nullptr;
    const char* end = nullptr;
    CHECK_EQ(edgert::ParseInteger(text, &end),
             static_cast<int64_t>(strtoll(text, &wanted_end, 10)));
    // A compiler of C23 has strtoll read binary numbers, which nobody here writes.
    if (strchr(text, 'b') == nullptr) CHECK_EQ(end - text, wanted_end - text);
  }
  CHECK_EQ(edgert::ParseInteger("0x50005", nullptr, 16), 0x50005);
  CHECK_EQ(edgert::ParseInteger("fF", nullptr, 16), 255);
}

}  // namespace

int main(int argc, char** argv) { return check::Main(argc, argv); }
