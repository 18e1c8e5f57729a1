// protocol.h: the frames that host and agent exchange (README.md), taken apart and put together.
#ifndef EDGESDK_AGENT_PROTOCOL_H_
#define EDGESDK_AGENT_PROTOCOL_H_

#include <stddef.h>
#include <stdint.h>

namespace agent {

constexpr uint16_t kVersion = 1;
constexpr size_t kHeaderBytes = 20;
constexpr uint32_t kMaxPayloadBytes = 1u << 20;
constexpr size_t kMaxText = 1024;

enum class FrameType : uint16_t {
  kPut = 1,
  kDrop = 2,
  kMeasure = 3,
  kHello = 16,
  kResult = 17,
  kError = 18,
};

// CRC-32 of IEEE 802.3, as zlib's crc32().
uint32_t Crc32(const void* data, size_t size);

// Reads the fields of a payload. Past its end everything is 0 and `ok()` false.
class Fields {
 public:
  Fields() : data_(nullptr), left_(0) {}
  Fields(const unsigned char* data, size_t size) : data_(data), left_(size) {}

  template <typename T>
  T Get() {
    T value{};
    Bytes(&value, sizeof(value));
    return value;
  }
  void Bytes(void* to, size_t size);
  // A length of 16 bits and that many bytes. Text that has no room in `size` is an error.
  void Text(char* to, size_t size);

  bool ok() const { return ok_; }
  const unsigned char* rest() const { return data_; }
  size_t left() const { return left_; }

 private:
  const unsigned char* data_;
  size_t left_;
  bool ok_ = true;
};

// A growing block of bytes, used from the front: what waits to be sent.
class Output {
 public:
  Output() = default;
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // A frame is begun, filled with Put and Text, and ended; then it can be sent.
  void Begin(FrameType type);
  template <typename T>
  void Put(T value) {
    Append(&value, sizeof(value));
  }
  void Text(const char* text);
  void End();

  bool empty() const { return start_ == end_; }
  // False when memory was short: the stream is damaged then.
  bool ok() const { return ok_; }
  // Writes what the descriptor takes without blocking, after poll() said POLLOUT. Returns false
  // when nobody reads any more.
  bool Send(int descriptor);

 private:
  void Append(const void* data, size_t size);

  unsigned char* data_ = nullptr;
  size_t capacity_ = 0;
  size_t start_ = 0;
  size_t end_ = 0;
  size_t frame_ = 0;  // where the unfinished frame begins
  bool ok_ = true;
};

// Cuts the incoming bytes into frames.
class Input {
 public:
  enum class State { kFrame, kIncomplete, kDamaged };

  Input();
  ~Input();
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  bool ok() const { return data_ != nullptr; }
  // One read(). Returns 1 when something came, 0 at the end of the channel, -1 for "try again".
  int Receive(int descriptor);
  // The next whole frame; `fields` stays valid until the next call of Receive.
  State Next(FrameType* type, Fields* fields);
  // Why the channel is damaged.
  const char* problem() const { return problem_; }

 private:
  State Damaged(const char* format, ...) __attribute__((format(printf, 2, 3)));

  unsigned char* data_;
  size_t start_ = 0;
  size_t end_ = 0;
  char problem_[160] = {0};
};

}  // namespace agent

#endif  // EDGESDK_AGENT_PROTOCOL_H_
