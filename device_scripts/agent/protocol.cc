#include "protocol.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace agent {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are copied as they are");

constexpr char kMagic[] = {'E', 'D', 'G', 'A'};
constexpr size_t kInputBytes = kHeaderBytes + kMaxPayloadBytes;
// POSIX: after POLLOUT, a pipe takes at least PIPE_BUF (512 or more) bytes without blocking.
constexpr size_t kSendBytes = 512;

struct CrcTable {
  uint32_t entries[256];
  constexpr CrcTable() : entries() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0xedb88320u : 0);
      entries[i] = value;
    }
  }
};
constexpr CrcTable kCrc;

template <typename T>
T Load(const unsigned char* at) {
  T value;
  memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace

uint32_t Crc32(const void* data, size_t size) {
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < size; ++i) crc = crc >> 8 ^ kCrc.entries[(crc ^ bytes[i]) & 0xff];
  return ~crc;
}

void Fields::Bytes(void* to, size_t size) {
  if (size > left_) {
    ok_ = false;
    left_ = 0;
    return;
  }
  if (size == 0) return;  // memcpy must not be given NULL, not even for no bytes
  memcpy(to, data_, size);
  data_ += size;
  left_ -= size;
}

void Fields::Text(char* to, size_t size) {
  size_t length = Get<uint16_t>();
  to[0] = '\0';
  if (length >= size) {
    ok_ = false;
    left_ = 0;
    return;
  }
  Bytes(to, length);
  to[ok_ ? length : 0] = '\0';
}

Output::~Output() { free(data_); }

void Output::Append(const void* data, size_t size) {
  if (!ok_) return;
  if (size > capacity_ - end_) {
    size_t capacity = (end_ + size) * 2;
    void* larger = realloc(data_, capacity);
    if (larger == nullptr) {
      ok_ = false;
      return;
    }
    data_ = static_cast<unsigned char*>(larger);
    capacity_ = capacity;
  }
  memcpy(data_ + end_, data, size);
  end_ += size;
}

void Output::Begin(FrameType type) {
  frame_ = end_;
  Append(kMagic, sizeof(kMagic));
  Put(kVersion);
  Put(type);
  Put(uint32_t{0});  // the length and both checksums: see End
  Put(uint32_t{0});
  Put(uint32_t{0});
}

void Output::Text(const char* text) {
  size_t length = strnlen(text, kMaxText);
  Put(static_cast<uint16_t>(length));
  Append(text, length);
}

void Output::End() {
  if (!ok_) return;
  unsigned char* header = data_ + frame_;
  uint32_t length = static_cast<uint32_t>(end_ - frame_ - kHeaderBytes);
  uint32_t payload_crc = Crc32(header + kHeaderBytes, length);
  memcpy(header + 8, &length, sizeof(length));
  memcpy(header + 12, &payload_crc, sizeof(payload_crc));
  uint32_t header_crc = Crc32(header, 16);
  memcpy(header + 16, &header_crc, sizeof(header_crc));
}

bool Output::Send(int descriptor) {
  size_t size = end_ - start_ < kSendBytes ? end_ - start_ : kSendBytes;
  ssize_t written = write(descriptor, data_ + start_, size);
  if (written < 0) return errno == EINTR || errno == EAGAIN;
  start_ += static_cast<size_t>(written);
  if (start_ == end_) start_ = end_ = 0;
  return true;
}

Input::Input() : data_(static_cast<unsigned char*>(malloc(kInputBytes))) {}

Input::~Input() { free(data_); }

int Input::Receive(int descriptor) {
  if (start_ > 0) {
    memmove(data_, data_ + start_, end_ - start_);
    end_ -= start_;
    start_ = 0;
  }
  ssize_t got = read(descriptor, data_ + end_, kInputBytes - end_);
  if (got < 0) return errno == EINTR || errno == EAGAIN ? -1 : 0;
  end_ += static_cast<size_t>(got);
  return got > 0 ? 1 : 0;
}

Input::State Input::Next(FrameType* type, Fields* fields) {
  const unsigned char* header = data_ + start_;
  size_t have = end_ - start_;
  // Said as early as possible: what is no frame may never have the length of a header.
  size_t start = have < sizeof(kMagic) ? have : sizeof(kMagic);
  if (memcmp(header, kMagic, start) != 0) return Damaged("this is no frame of edgesdk");
  if (have < kHeaderBytes) return State::kIncomplete;
  if (Crc32(header, 16) != Load<uint32_t>(header + 16)) {
    return Damaged("the header of a frame has a wrong checksum");
  }
  unsigned version = Load<uint16_t>(header + 4);
  if (version != kVersion) {
    return Damaged("the host speaks version %u, this agent version %u", version,
                   static_cast<unsigned>(kVersion));
  }
  uint32_t length = Load<uint32_t>(header + 8);
  if (length > kMaxPayloadBytes) {
    return Damaged("a frame of %u bytes; at most %u are allowed", static_cast<unsigned>(length),
                   static_cast<unsigned>(kMaxPayloadBytes));
  }
  if (have - kHeaderBytes < length) return State::kIncomplete;
  const unsigned char* payload = header + kHeaderBytes;
  if (Crc32(payload, length) != Load<uint32_t>(header + 12)) {
    return Damaged("a frame of %u bytes has a wrong checksum", static_cast<unsigned>(length));
  }
  *type = static_cast<FrameType>(Load<uint16_t>(header + 6));
  *fields = Fields(payload, length);
  start_ += kHeaderBytes + length;
  return State::kFrame;
}

Input::State Input::Damaged(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(problem_, sizeof(problem_), format, arguments);
  va_end(arguments);
  return State::kDamaged;
}

}  // namespace agent
