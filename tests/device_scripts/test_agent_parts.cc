// The agent's protocol and store: damaged and hostile input.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "device_state.h"
#include "protocol.h"
#include "store.h"

using agent::Crc32;
using agent::Fields;
using agent::FrameType;
using agent::Input;

namespace {

// A payload under construction.
class Bytes {
 public:
  template <typename T>
  Bytes& Put(T value) {
    const char* at = reinterpret_cast<const char*>(&value);
    text_.append(at, sizeof(value));
    return *this;
  }
  Bytes& Text(const std::string& text) {
    Put(static_cast<uint16_t>(text.size()));
    text_ += text;
    return *this;
  }
  Bytes& Key(char name) {
    text_.append(32, name);
    return *this;
  }
  Bytes& Raw(const std::string& text) {
    text_ += text;
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The fields of a copy on the heap, so that AddressSanitizer sees every read beyond it.
class Copy {
 public:
  explicit Copy(const std::string& text) : data_(text.begin(), text.end()) {}
  Fields fields() const {
    return Fields(reinterpret_cast<const unsigned char*>(data_.data()), data_.size());
  }

 private:
  std::vector<char> data_;
};

std::string Frame(FrameType type, const std::string& payload) {
  agent::Output output;
  output.Begin(type);
  for (char byte : payload) output.Put(byte);
  output.End();
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  std::string frame;
  while (!output.empty()) {
    CHECK(output.Send(ends[1]));
    char part[4096];
    ssize_t got = read(ends[0], part, sizeof(part));
    frame.append(part, static_cast<size_t>(got));
  }
  close(ends[0]);
  close(ends[1]);
  return frame;
}

// What comes of `bytes` on a channel, in pieces of `step` bytes: the frames' payloads, then "|" and
// the problem.
std::string Read(const std::string& bytes, size_t step) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  Input input;
  std::string seen;
  for (size_t at = 0; at < bytes.size(); at += step) {
    size_t size = std::min(step, bytes.size() - at);
    CHECK_EQ(write(ends[1], bytes.data() + at, size), static_cast<ssize_t>(size));
    CHECK_EQ(input.Receive(ends[0]), 1);
    FrameType type;
    Fields fields;
    Input::State state;
    while ((state = input.Next(&type, &fields)) == Input::State::kFrame) {
      seen.append(reinterpret_cast<const char*>(fields.rest()), fields.left());
      seen += ';';
    }
    if (state == Input::State::kDamaged) {
      seen += std::string("|") + input.problem();
      break;
    }
  }
  close(ends[1]);
  close(ends[0]);
  return seen;
}

std::string Put(char key, uint64_t offset, uint64_t total, const std::string& data) {
  return Bytes().Key(key).Put(offset).Put(total).Raw(data).text();
}

struct Numbers {
  uint32_t repeat = 3;
  double min_repeat_ms = 1;
  double timeout_s = 1;
};

std::string Head(const Numbers& numbers, uint16_t count) {
  return Bytes()
      .Put(uint64_t{7})
      .Key('L')
      .Text("symbol")
      .Put(uint32_t{0})
      .Put(numbers.repeat)
      .Put(uint32_t{1})
      .Put(uint32_t{0})
      .Put(numbers.min_repeat_ms)
      .Put(1e-4)
      .Put(numbers.timeout_s)
      .Put(uint64_t{0})
      .Put(uint64_t{1} << 30)
      .Put(count)
      .text();
}

// float32[rows, 2] in the blob 'x'.
std::string Argument(int64_t rows, uint8_t dtype = EDGESDK_FLOAT32) {
  return Bytes()
      .Put(uint8_t{1})
      .Put(dtype)
      .Put(uint8_t{2})
      .Put(rows)
      .Put(int64_t{2})
      .Key('x')
      .text();
}

std::string Said(const char* problem) { return problem == nullptr ? "" : problem; }

std::string DoPut(agent::Store& store, const std::string& payload) {
  return Said(store.Put(Copy(payload).fields()));
}
std::string DoMeasure(agent::Store& store, const std::string& payload) {
  return Said(store.Measure(Copy(payload).fields()));
}
std::string DoDrop(agent::Store& store, char key) {
  return Said(store.Drop(Copy(Bytes().Key(key).text()).fields()));
}

void WriteFile(const std::string& path, const std::string& text) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    mkdir(path.substr(0, at).c_str(), 0755);
  }
  FILE* file = fopen(path.c_str(), "w");
  CHECK(file != nullptr);
  if (file == nullptr) return;
  fputs(text.c_str(), file);
  fclose(file);
}

}  // namespace

TEST(checksum_is_zlibs) {
  CHECK_EQ(Crc32("123456789", 9), 0xcbf43926u);
  CHECK_EQ(Crc32("", 0), 0u);
}

TEST(frames_arrive_in_any_pieces) {
  std::string frames = Frame(FrameType::kPut, "one") + Frame(FrameType::kDrop, "") +
                       Frame(FrameType::kPut, std::string(3000, 'x'));
  std::string wanted = "one;;" + std::string(3000, 'x') + ";";
  for (size_t step : {1, 7, 20, 23, 1000, 100000}) CHECK_EQ(Read(frames, step), wanted);
}

TEST(every_damaged_bit_is_noticed) {
  std::string frame = Frame(FrameType::kPut, "payload");
  for (size_t bit = 0; bit < frame.size() * 8; ++bit) {
    std::string damaged = frame;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    std::string seen = Read(damaged, damaged.size());
    CHECK_EQ(seen.substr(0, 1), "|");
  }
}

TEST(garbage_is_noticed_at_its_first_byte) {
  CHECK_EQ(Read("h", 1), "|this is no frame of edgesdk");
  CHECK_EQ(Read("EDGE", 1), "|this is no frame of edgesdk");
}

TEST(other_versions_and_long_frames_are_refused) {
  std::string frame = Frame(FrameType::kPut, "x");
  auto with = [&frame](size_t at, uint32_t value, size_t size) {
    std::string changed = frame;
    memcpy(&changed[at], &value, size);
    uint32_t crc = Crc32(changed.data(), 16);
    memcpy(&changed[16], &crc, sizeof(crc));
    return Read(changed, changed.size());
  };
  CHECK_EQ(with(4, 2, 2), "|the host speaks version 2, this agent version 1");
  CHECK_EQ(with(8, agent::kMaxPayloadBytes + 1, 4),
           "|a frame of 1048577 bytes; at most 1048576 are allowed");
}

TEST(fields_end_where_the_payload_ends) {
  Copy copy(Bytes().Put(uint16_t{5}).Raw("abc").text());
  char text[8];
  Fields fields = copy.fields();
  fields.Text(text, sizeof(text));
  CHECK(!fields.ok());
  CHECK_TEXT(text, "");
  Copy fitting(Bytes().Text("1234567").Text("12345678").text());
  fields = fitting.fields();
  fields.Text(text, sizeof(text));
  CHECK(fields.ok());
  CHECK_TEXT(text, "1234567");
  fields.Text(text, sizeof(text));  // no room
  CHECK(!fields.ok());
}

TEST(a_request_gets_what_was_put) {
  agent::Store store;
  CHECK_EQ(DoPut(store, Put('L', 0, 4, "lib!")), "");
  CHECK_EQ(DoPut(store, Put('x', 0, 16, "01234567")), "");
  CHECK_EQ(DoPut(store, Put('x', 8, 16, "89abcdef")), "");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(2)), "");
  // Dropped and put anew, while the request still waits.
  CHECK_EQ(DoDrop(store, 'x'), "");
  CHECK_EQ(DoDrop(store, 'L'), "");
  CHECK_EQ(DoPut(store, Put('x', 0, 8, "anewanew")), "");
  agent::Request* request = store.Next();
  CHECK(request != nullptr);
  CHECK_EQ(request->ticket, 7u);
  CHECK_TEXT(request->problem, "");
  CHECK_EQ(std::string(reinterpret_cast<char*>(request->arguments[0].blob->data), 16),
           "0123456789abcdef");
  store.Release(request);
  CHECK(store.Next() == nullptr);
  CHECK_EQ(DoDrop(store, 'L'), "a drop of what is not there");
}

TEST(puts_must_fit_together) {
  CHECK_EQ(DoPut(*std::make_unique<agent::Store>(), "short"), "a put is too short");
  const char* problem = "the parts of a put do not fit together";
  agent::Store store;
  CHECK_EQ(DoPut(store, Put('a', 0, 8, "0123")), "");
  CHECK_EQ(DoPut(store, Put('a', 0, 8, "0123")), problem);
  CHECK_EQ(DoPut(store, Put('a', 4, 9, "0123")), problem);
  CHECK_EQ(DoPut(store, Put('a', 4, 8, "01234")), problem);
  CHECK_EQ(DoPut(store, Put('a', 4, 8, "4567")), "");
  CHECK_EQ(DoPut(store, Put('b', 5, 4, "")), problem);
}

TEST(what_the_device_cannot_do_is_the_requests_problem) {
  agent::Store store;
  CHECK_EQ(DoPut(store, Put('L', 0, uint64_t{1} << 62, "part")), "");
  CHECK_EQ(DoMeasure(store, Head({}, 0)), "");
  agent::Request* request = store.Next();
  CHECK_EQ(std::string(request->problem).substr(0, 47),
           "the device has no memory for 461168601842738790");
  store.Release(request);
  CHECK_EQ(DoPut(store, Put('x', 0, 16, "half....")), "");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(2)), "");
  store.Release(store.Next());
}

TEST(requests_that_break_the_rules) {
  agent::Store store;
  CHECK_EQ(DoMeasure(store, Head({}, 0)), "the library of a request is not there");
  CHECK_EQ(DoPut(store, Put('L', 0, 4, "lib!")), "");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(2)), "the data of an argument are not there");
  CHECK_EQ(DoPut(store, Put('x', 0, 16, "0123456789abcdef")), "");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(3)),
           "the data of an argument do not fit its shape");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(-1)), "a negative dimension");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(int64_t{1} << 62)),
           "an argument that is too large");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(2, 99)), "an unknown data type");
  CHECK_EQ(DoMeasure(store, Head({}, 1) + Argument(2) + "x"), "a request to measure is too long");
  CHECK_EQ(DoMeasure(store, Head({}, 999)), "too many arguments");
  CHECK_EQ(DoMeasure(store, Head({0, 1, 1}, 0)), "a number of samples not allowed");
  CHECK_EQ(DoMeasure(store, Head({1025, 1, 1}, 0)), "a number of samples not allowed");
  CHECK_EQ(DoMeasure(store, Head({3, 1, 0}, 0)), "a time limit that is not allowed");
  CHECK_EQ(DoMeasure(store, Head({3, 1, NAN}, 0)), "a time limit that is not allowed");
  CHECK_EQ(DoMeasure(store, Head({3, -1, 1}, 0)), "a negative number");
  std::string whole = Head({}, 1) + Argument(2);
  for (size_t size = 0; size < whole.size(); ++size) {
    agent::Store other;
    CHECK_EQ(DoPut(other, Put('L', 0, 4, "lib!")), "");
    CHECK_EQ(DoPut(other, Put('x', 0, 16, "0123456789abcdef")), "");
    CHECK(DoMeasure(other, whole.substr(0, size)) != "");
  }
}

TEST(the_queue_has_an_end) {
  agent::Store store;
  CHECK_EQ(DoPut(store, Put('L', 0, 4, "lib!")), "");
  for (uint32_t i = 0; i < agent::kMaxQueued; ++i) CHECK_EQ(DoMeasure(store, Head({}, 0)), "");
  CHECK_EQ(DoMeasure(store, Head({}, 0)), "too many requests wait already");
}

TEST(random_requests_do_no_harm) {
  srand(1);
  for (int round = 0; round < 3000; ++round) {
    agent::Store store;
    DoPut(store, Put('L', 0, 4, "lib!"));
    DoPut(store, Put('x', 0, 16, "0123456789abcdef"));
    std::string payload = Head({}, 2) + Argument(2) + Argument(2);
    for (int i = 0; i < 1 + round % 4; ++i) {
      payload[static_cast<size_t>(rand()) % payload.size()] = static_cast<char>(rand());
    }
    DoMeasure(store, payload);
    if (round % 2 == 0) DoDrop(store, 'x');
  }
}

TEST(the_state_of_a_device_without_sensors_is_unknown) {
  agent::DeviceState state = agent::ReadDeviceState("/nonexistent");
  CHECK_EQ(state.clock_khz, -1);
  CHECK(std::isnan(state.temperature_c));
  CHECK_EQ(static_cast<int>(state.throttled), -1);
}

TEST(the_state_of_a_board) {
  char name[] = "/tmp/edgesdk-sysfs-XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  std::string root = name;
  WriteFile(root + "/devices/system/cpu/cpufreq/policy0/scaling_cur_freq", "600000\n");
  WriteFile(root + "/devices/system/cpu/cpufreq/policy4/scaling_cur_freq", "1500000\n");
  WriteFile(root + "/class/thermal/thermal_zone0/temp", "48686\n");
  WriteFile(root + "/class/thermal/thermal_zone1/temp", "-274000\n");
  WriteFile(root + "/class/thermal/thermal_zone2/temp", "51000\n");
  agent::DeviceState state = agent::ReadDeviceState(name);
  CHECK_EQ(state.clock_khz, 1500000);
  CHECK_EQ(state.temperature_c, 51.0);
  CHECK_EQ(static_cast<int>(state.throttled), -1);

  // A fan that turns is no throttling.
  WriteFile(root + "/class/thermal/cooling_device0/type", "gpio-fan\n");
  WriteFile(root + "/class/thermal/cooling_device0/cur_state", "1\n");
  CHECK_EQ(static_cast<int>(agent::ReadDeviceState(name).throttled), -1);
  WriteFile(root + "/class/thermal/cooling_device1/type", "cpufreq-cpu0\n");
  WriteFile(root + "/class/thermal/cooling_device1/cur_state", "0\n");
  CHECK_EQ(static_cast<int>(agent::ReadDeviceState(name).throttled), 0);
  WriteFile(root + "/class/thermal/cooling_device1/cur_state", "2\n");
  CHECK_EQ(static_cast<int>(agent::ReadDeviceState(name).throttled), 1);

  // The Raspberry Pi's word: throttled once since the start, and now.
  WriteFile(root + "/class/thermal/cooling_device1/cur_state", "0\n");
  WriteFile(root + "/devices/platform/soc/soc:firmware/get_throttled", "e0000\n");
  CHECK_EQ(static_cast<int>(agent::ReadDeviceState(name).throttled), 0);
  WriteFile(root + "/devices/platform/soc/soc:firmware/get_throttled", "e0004\n");
  CHECK_EQ(static_cast<int>(agent::ReadDeviceState(name).throttled), 1);
  CHECK_EQ(system(("rm -rf " + root).c_str()), 0);
}

int main(int argc, char** argv) { return check::Main(argc, argv); }
