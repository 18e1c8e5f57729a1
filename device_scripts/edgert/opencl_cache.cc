#include "opencl_cache.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "platform.h"

#if defined(_WIN32)
#include <direct.h>
#include <process.h>
#include <windows.h>
#else
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace edgert {
namespace opencl {
namespace {

constexpr char kMagic[8] = {'E', 'D', 'G', 'E', 'C', 'L', '1', '\n'};

struct Header {
  char magic[8];
  uint64_t first;
  uint64_t second;
  uint64_t bytes;
  uint64_t sum;  // of the content
};

#if defined(_WIN32)

constexpr const char* kHome = "LOCALAPPDATA";
constexpr const char* kBelowHome = "edgesdk/opencl";

bool MakeFolder(const char* path) { return _mkdir(path) == 0 || errno == EEXIST; }
bool Replace(const char* from, const char* to) {
  return MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING) != 0;
}
int ProcessId() { return _getpid(); }
bool LibraryFolder(char*, size_t) { return false; }

#else

constexpr const char* kHome = "HOME";
constexpr const char* kBelowHome = ".cache/edgesdk/opencl";

bool MakeFolder(const char* path) { return mkdir(path, 0700) == 0 || errno == EEXIST; }
bool Replace(const char* from, const char* to) { return rename(from, to) == 0; }
int ProcessId() { return static_cast<int>(getpid()); }

// The folder of the library, or program, that this code is in.
bool LibraryFolder(char* folder, size_t bytes) {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&kMagic), &info) == 0 || info.dli_fname == nullptr) {
    return false;
  }
  const char* slash = strrchr(info.dli_fname, '/');
  int length = slash == nullptr ? 0 : static_cast<int>(slash - info.dli_fname);
  int written = slash == nullptr ? snprintf(folder, bytes, ".")
                                 : snprintf(folder, bytes, "%.*s", length, info.dli_fname);
  return written >= 0 && static_cast<size_t>(written) < bytes;
}

#endif

uint64_t Sum(uint64_t sum, const void* data, size_t bytes) {
  const unsigned char* each = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) sum = (sum ^ each[i]) * 0x100000001b3u;
  return sum;
}

uint64_t SumOf(const void* data, size_t bytes) { return Sum(Key().first(), data, bytes); }

// Writes the folder that programs are kept in, or why there is none.
bool OwnFolder(const char* folder, char* text, size_t bytes, char* why_not, size_t why_not_bytes) {
  char buffer[900];
  const char* below = "";
  if (folder == nullptr || folder[0] == '\0') {
    folder = Environment("EDGESDK_CACHE_DIR", buffer, sizeof(buffer));
  }
  if (folder == nullptr || folder[0] == '\0') {
    folder = Environment("XDG_CACHE_HOME", buffer, sizeof(buffer));
    below = "/edgesdk/opencl";
  }
  if (folder == nullptr || folder[0] == '\0') {
    folder = Environment(kHome, buffer, sizeof(buffer));
    if (folder == nullptr || folder[0] == '\0') {
      snprintf(why_not, why_not_bytes, "%s is not set, nor is EDGESDK_CACHE_DIR", kHome);
      return false;
    }
    size_t used = strlen(folder);
    int written = snprintf(text, bytes, "%.*s/%s", static_cast<int>(used), folder, kBelowHome);
    return written >= 0 && static_cast<size_t>(written) < bytes;
  }
  int written = snprintf(text, bytes, "%s%s", folder, below);
  if (written >= 0 && static_cast<size_t>(written) < bytes) return true;
  snprintf(why_not, why_not_bytes, "the folder's name is too long");
  return false;
}

void MakeFoldersOf(const char* path) {
  char folder[1024];
  if (snprintf(folder, sizeof(folder), "%s", path) >= static_cast<int>(sizeof(folder))) return;
  for (char* at = folder + 1; *at != '\0'; ++at) {
    if (*at != '/') continue;
    *at = '\0';
    MakeFolder(folder);  // opening the file tells what failed
    *at = '/';
  }
}

}  // namespace

void Key::Add(const void* data, size_t bytes) {
  first_ = Sum(first_, data, bytes);
  second_ = Sum(second_, data, bytes);
}

void Key::Add(const char* text) { Add(text, strlen(text) + 1); }

void FindPlaces(const char* model, const Key& key, const char* folder, CachePlaces* places) {
  *places = CachePlaces{};
  char name[200];
  snprintf(name, sizeof(name), "%.100s-%016llx%016llx.clbin", model,
           static_cast<unsigned long long>(key.first()),
           static_cast<unsigned long long>(key.second()));
  char found[800];
  if (LibraryFolder(found, sizeof(found))) {
    snprintf(places->shipped, sizeof(places->shipped), "%s/%s", found, name);
  }
  if (OwnFolder(folder, found, sizeof(found), places->why_not, sizeof(places->why_not))) {
    snprintf(places->own, sizeof(places->own), "%s/%s", found, name);
  }
}

unsigned char* ReadCache(const char* path, const Key& key, size_t* bytes) {
  FILE* file = fopen(path, "rb");
  if (file == nullptr) return nullptr;
  Header header;
  unsigned char* data = nullptr;
  bool good = fread(&header, sizeof(header), 1, file) == 1 &&
              memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.first == key.first() &&
              header.second == key.second() && header.bytes > 0 && header.bytes < SIZE_MAX;
  if (good) {
    // A damaged size would ask for any amount of memory.
    long start = ftell(file);
    good = fseek(file, 0, SEEK_END) == 0 &&
           static_cast<uint64_t>(ftell(file) - start) == header.bytes &&
           fseek(file, start, SEEK_SET) == 0;
  }
  if (good) {
    data = static_cast<unsigned char*>(malloc(static_cast<size_t>(header.bytes)));
    good = data != nullptr && fread(data, static_cast<size_t>(header.bytes), 1, file) == 1 &&
           SumOf(data, static_cast<size_t>(header.bytes)) == header.sum;
  }
  fclose(file);
  if (good) {
    *bytes = static_cast<size_t>(header.bytes);
    return data;
  }
  free(data);
  return nullptr;
}

bool WriteCache(const char* path, const Key& key, const unsigned char* data, size_t bytes,
                char* reason, size_t reason_bytes) {
  MakeFoldersOf(path);
  // Threads of one process do not write at the same time: the caller holds a lock.
  char temporary[1100];
  snprintf(temporary, sizeof(temporary), "%s.%d", path, ProcessId());
  FILE* file = fopen(temporary, "wb");
  if (file == nullptr) {
    snprintf(reason, reason_bytes, "cannot write %.600s: %s", temporary, strerror(errno));
    return false;
  }
  Header header{};
  memcpy(header.magic, kMagic, sizeof(kMagic));
  header.first = key.first();
  header.second = key.second();
  header.bytes = bytes;
  header.sum = SumOf(data, bytes);
  bool good = fwrite(&header, sizeof(header), 1, file) == 1 && fwrite(data, bytes, 1, file) == 1;
  int error = errno;
  if (fclose(file) != 0 && good) {
    good = false;
    error = errno;
  }
  if (good && !Replace(temporary, path)) {
    good = false;
    error = errno;
  }
  if (good) return true;
  remove(temporary);
  snprintf(reason, reason_bytes, "cannot write %.600s: %s", path, strerror(error));
  return false;
}

}  // namespace opencl
}  // namespace edgert
