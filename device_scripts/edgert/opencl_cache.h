// opencl_cache.h: built programs in files, so that only the first load of a model compiles.
#ifndef EDGERT_OPENCL_CACHE_H_
#define EDGERT_OPENCL_CACHE_H_

#include <stddef.h>
#include <stdint.h>

namespace edgert {
namespace opencl {

// What a built program depends on, as 128 bits: two sums (FNV-1a) that start differently.
class Key {
 public:
  void Add(const void* data, size_t bytes);
  void Add(const char* text);  // with its end, so that "a", "bc" is not "ab", "c"
  uint64_t first() const { return first_; }
  uint64_t second() const { return second_; }

 private:
  uint64_t first_ = 0xcbf29ce484222325u;
  uint64_t second_ = 0x84222325cbf29ce4u;
};

// Where a program may be kept: beside the library that holds this code, which is only read, and in
// the user's folder.
struct CachePlaces {
  char shipped[1024];  // "": unknown
  char own[1024];      // "": nowhere
  char why_not[160];   // why `own` is empty
};

// `folder` is the program's choice, or nullptr: EDGESDK_CACHE_DIR, or the folder that the system
// has for this.
void FindPlaces(const char* model, const Key& key, const char* folder, CachePlaces* places);

// The content of a file that WriteCache made for `key`; nullptr if there is none, or if it is
// damaged. The caller frees it with free().
unsigned char* ReadCache(const char* path, const Key& key, size_t* bytes);

// Writes the file and the folders above it; readers see all of it or nothing. Returns false with a
// reason.
bool WriteCache(const char* path, const Key& key, const unsigned char* data, size_t bytes,
                char* reason, size_t reason_bytes);

}  // namespace opencl
}  // namespace edgert

#endif  // EDGERT_OPENCL_CACHE_H_
