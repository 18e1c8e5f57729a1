// store.h: what the host has sent and not taken back: blobs, and requests in their order.
#ifndef EDGESDK_AGENT_STORE_H_
#define EDGESDK_AGENT_STORE_H_

#include "candidate.h"
#include "protocol.h"

namespace agent {

constexpr uint32_t kMaxQueued = 64;
constexpr double kMaxTimeoutS = 3600;

// Each function returns nullptr, or what the host has done against the protocol. What only this
// device cannot do, such as having no memory, becomes the `problem` of a blob or a request.
class Store {
 public:
  Store() = default;
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const char* Put(Fields fields);
  const char* Drop(Fields fields);
  const char* Measure(Fields fields);

  // The oldest request, now the caller's: it goes back with Release. nullptr if there is none.
  Request* Next();
  void Release(Request* request);

 private:
  Blob* Find(const unsigned char* key);
  void Use(Blob* blob) { ++blob->users; }
  void Unuse(Blob* blob);
  const char* ReadArgument(Fields* fields, Request* request, uint32_t index);
  void Check(Request* request);

  Blob* blobs_ = nullptr;
  Request* first_ = nullptr;
  Request* last_ = nullptr;
  uint32_t queued_ = 0;
};

}  // namespace agent

#endif  // EDGESDK_AGENT_STORE_H_
