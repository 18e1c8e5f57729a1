#include "store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "../launcher/npy.h"
#include "integer.h"
#include "platform.h"

namespace agent {
namespace {

constexpr size_t kKeyBytes = sizeof(Blob::key);
constexpr uint8_t kOutputFlag = 1;

// Linux promises memory that it does not have and then kills somebody: ask before.
bool HasMemory(uint64_t bytes) {
  FILE* file = fopen("/proc/meminfo", "r");
  if (file == nullptr) return true;
  char line[128];
  bool enough = true;
  const char* name = "MemAvailable:";
  while (fgets(line, sizeof(line), file) != nullptr) {
    if (strncmp(line, name, strlen(name)) != 0) continue;
    enough = bytes / 1024 < static_cast<uint64_t>(edgert::ParseInteger(line + strlen(name)));
  }
  fclose(file);
  return enough;
}

template <typename T>
T* New() {
  void* memory = malloc(sizeof(T));
  return memory != nullptr ? new (memory) T() : nullptr;
}

void Delete(Blob* blob) {
  edgert::FreeAligned(blob->data);
  free(blob);
}

void Describe(const unsigned char* key, char* text) {
  for (size_t i = 0; i < 6; ++i) snprintf(text + 2 * i, 3, "%02x", key[i]);
}

}  // namespace

Store::~Store() {
  while (Request* request = Next()) Release(request);
  while (blobs_ != nullptr) {
    Blob* next = blobs_->next;
    Delete(blobs_);
    blobs_ = next;
  }
}

const char* Store::Put(Fields fields) {
  unsigned char key[kKeyBytes];
  fields.Bytes(key, sizeof(key));
  uint64_t offset = fields.Get<uint64_t>();
  uint64_t total = fields.Get<uint64_t>();
  if (!fields.ok()) return "a put is too short";
  Blob* blob = Find(key);
  if (blob == nullptr) {
    blob = New<Blob>();
    if (blob == nullptr) return "the agent has no memory left";
    memcpy(blob->key, key, sizeof(key));
    blob->total = total;
    blob->next = blobs_;
    blobs_ = blob;
    if (HasMemory(total)) blob->data = static_cast<unsigned char*>(edgert::AllocateAligned(total));
    if (blob->data == nullptr) {
      snprintf(blob->problem, sizeof(blob->problem),
               "the device has no memory for %" PRIu64 " bytes", total);
    }
  }
  if (blob->total != total || offset != blob->received || fields.left() > total - offset) {
    return "the parts of a put do not fit together";
  }
  size_t size = fields.left();
  if (blob->data != nullptr) fields.Bytes(blob->data + offset, size);
  blob->received += size;
  return nullptr;
}

const char* Store::Drop(Fields fields) {
  unsigned char key[kKeyBytes];
  fields.Bytes(key, sizeof(key));
  Blob* blob = fields.ok() ? Find(key) : nullptr;
  if (blob == nullptr) return "a drop of what is not there";
  blob->dropped = true;
  Use(blob);
  Unuse(blob);
  return nullptr;
}

const char* Store::Measure(Fields fields) {
  if (queued_ >= kMaxQueued) return "too many requests wait already";
  Request* request = New<Request>();
  if (request == nullptr) return "the agent has no memory left";
  ++queued_;
  (last_ != nullptr ? last_->next : first_) = request;
  last_ = request;

  unsigned char library[kKeyBytes];
  request->ticket = fields.Get<uint64_t>();
  fields.Bytes(library, sizeof(library));
  fields.Text(request->symbol, sizeof(request->symbol));
  request->number = fields.Get<uint32_t>();
  request->repeat = fields.Get<uint32_t>();
  request->warmup = fields.Get<uint32_t>();
  request->threads = fields.Get<uint32_t>();
  request->min_repeat_ms = fields.Get<double>();
  request->tolerance = fields.Get<double>();
  request->timeout_s = fields.Get<double>();
  request->flush_cache_bytes = fields.Get<uint64_t>();
  request->memory_limit_bytes = fields.Get<uint64_t>();
  uint32_t count = fields.Get<uint16_t>();
  if (!fields.ok()) return "a request to measure is too short";
  if (request->repeat < 1 || request->repeat > kMaxSamples)
    return "a number of samples not allowed";
  if (!(request->timeout_s > 0 && request->timeout_s <= kMaxTimeoutS)) {
    return "a time limit that is not allowed";
  }
  if (!(request->min_repeat_ms >= 0 && request->tolerance >= 0)) return "a negative number";
  if (count > kMaxArguments) return "too many arguments";
  request->library = Find(library);
  if (request->library == nullptr) return "the library of a request is not there";
  Use(request->library);
  for (uint32_t i = 0; i < count; ++i) {
    const char* problem = ReadArgument(&fields, request, i);
    if (problem != nullptr) return problem;
  }
  if (fields.left() > 0) return "a request to measure is too long";
  Check(request);
  return nullptr;
}

const char* Store::ReadArgument(Fields* fields, Request* request, uint32_t index) {
  Argument& argument = request->arguments[index];
  argument.is_output = (fields->Get<uint8_t>() & kOutputFlag) != 0;
  uint8_t dtype = fields->Get<uint8_t>();
  argument.dtype = static_cast<edgesdk_dtype>(dtype);
  argument.ndim = fields->Get<uint8_t>();
  if (dtype < EDGESDK_FLOAT32 || dtype > EDGESDK_BOOL) return "an unknown data type";
  if (argument.ndim > static_cast<int32_t>(kMaxDims)) return "an argument with too many dimensions";
  uint64_t size = launcher::DtypeBytes(argument.dtype);
  for (int32_t i = 0; i < argument.ndim; ++i) {
    int64_t dim = fields->Get<int64_t>();
    if (dim < 0) return "a negative dimension";
    argument.shape[i] = dim;
    if (__builtin_mul_overflow(size, static_cast<uint64_t>(dim), &size)) {
      return "an argument that is too large";
    }
  }
  unsigned char key[kKeyBytes];
  fields->Bytes(key, sizeof(key));
  if (!fields->ok()) return "a request to measure is too short";
  argument.blob = Find(key);
  if (argument.blob == nullptr) return "the data of an argument are not there";
  Use(argument.blob);
  request->num_arguments = index + 1;
  if (argument.blob->total != size) return "the data of an argument do not fit its shape";
  return nullptr;
}

// What can only be known here and costs this request alone.
void Store::Check(Request* request) {
  const Blob* wanted = request->library;
  for (uint32_t i = 0; wanted != nullptr; ++i) {
    char name[13];
    Describe(wanted->key, name);
    if (wanted->problem[0] != '\0') {
      snprintf(request->problem, sizeof(request->problem), "%s (data %s)", wanted->problem, name);
    } else if (wanted->received != wanted->total) {
      snprintf(request->problem, sizeof(request->problem),
               "only %" PRIu64 " of %" PRIu64 " bytes of the data %s are there", wanted->received,
               wanted->total, name);
    }
    wanted = i < request->num_arguments ? request->arguments[i].blob : nullptr;
  }
}

Request* Store::Next() {
  Request* request = first_;
  if (request == nullptr) return nullptr;
  first_ = request->next;
  if (first_ == nullptr) last_ = nullptr;
  --queued_;
  return request;
}

void Store::Release(Request* request) {
  if (request->library != nullptr) Unuse(request->library);
  for (uint32_t i = 0; i < request->num_arguments; ++i) Unuse(request->arguments[i].blob);
  free(request);
}

Blob* Store::Find(const unsigned char* key) {
  Blob* blob = blobs_;
  while (blob != nullptr && (blob->dropped || memcmp(blob->key, key, kKeyBytes) != 0)) {
    blob = blob->next;
  }
  return blob;
}

void Store::Unuse(Blob* blob) {
  if (--blob->users > 0 || !blob->dropped) return;
  Blob** link = &blobs_;
  while (*link != blob) link = &(*link)->next;
  *link = blob->next;
  Delete(blob);
}

}  // namespace agent
