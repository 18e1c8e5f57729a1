// A network behind a camera: one thread takes pictures while the other runs the network on the one
// before. Shows how late the results are. Takes no camera: pictures of a folder, or drawn ones.
//
//     camera_loop [--frames N] [--fps F] [--pictures FOLDER] [--network-cpus 2,3] [--camera-cpu 1]
//
// --fps 0 takes the next picture when there is room for it; otherwise a picture for which there is
// no room is dropped, as a camera does.

#include <algorithm>
#include <blazeface.hpp>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "picture.h"

namespace {

using Clock = std::chrono::steady_clock;
using Network = edgesdk_blazeface::Model;

constexpr int kSize = Network::input_input_0_shape[1];  // pixels of the network's square input
constexpr std::size_t kElements = 3 * kSize * kSize;
constexpr float kFaceLogit = 0.4f;  // a probability of 0.6

struct Settings {
  int frames = 300;
  double fps = 30;
  std::string pictures;
  std::vector<int> network_cpus;
  std::vector<int> camera_cpu;
};

int Fail(const std::string& reason) {
  std::fprintf(stderr, "camera_loop: %s\n", reason.c_str());
  return 1;
}

// What the network reads, and when the picture was taken.
struct Frame {
  alignas(edgesdk::kAlignment) float pixels[kElements];
  Clock::time_point taken;
};

// Two frames: the camera writes one while the network reads the other. Nothing is copied or
// allocated after the start.
class DoubleBuffer {
 public:
  // For the camera: a frame to fill, or nullptr when the network has not come for the last one.
  // With `wait` it waits for that.
  Frame* StartFilling(bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) changed_.wait(lock, [this] { return !full_ || closed_; });
    return full_ ? nullptr : &frames_[filling_];
  }

  void FinishFilling() { Set(&full_); }

  // For both: there will be no more frames.
  void Close() { Set(&closed_); }
  bool closed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  // For the network: the next frame, which stays its own until the next call; nullptr at the end.
  Frame* Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return full_ || closed_; });
    if (!full_) return nullptr;
    full_ = false;
    Frame* frame = &frames_[filling_];
    filling_ = 1 - filling_;
    changed_.notify_all();
    return frame;
  }

 private:
  void Set(bool* flag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *flag = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Frame frames_[2];
  int filling_ = 0;
  bool full_ = false;
  bool closed_ = false;
};

// Latencies in steps of a factor of the square root of 2, from 1/16 ms on.
class Histogram {
 public:
  void Add(double ms) {
    const double step = ms > kFirstMs ? 2 * std::log2(ms / kFirstMs) : 0;
    ++counts_[std::min(static_cast<std::size_t>(step), counts_.size() - 1)];
    all_.push_back(ms);
  }

  void Print() {
    if (all_.empty()) return;
    std::sort(all_.begin(), all_.end());
    const int most = *std::max_element(counts_.begin(), counts_.end());
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      if (counts_[i] == 0) continue;
      const double from = kFirstMs * std::pow(2, static_cast<double>(i) / 2);
      const std::string bar(static_cast<std::size_t>((40 * counts_[i] + most - 1) / most), '#');
      std::printf("%9.3f ms %7d %s\n", from, counts_[i], bar.c_str());
    }
    std::printf("median %.3f ms, p99 %.3f ms, worst %.3f ms\n", Part(0.5), Part(0.99), all_.back());
  }

 private:
  double Part(double part) const {
    return all_[static_cast<std::size_t>(part * static_cast<double>(all_.size() - 1))];
  }

  static constexpr double kFirstMs = 1.0 / 16;
  std::vector<int> counts_ = std::vector<int>(40);
  std::vector<double> all_;
};

// Confines this thread, and those that it starts from now on, to some CPUs.
bool Pin(const std::vector<int>& cpus, std::string* error) {
  if (cpus.empty()) return true;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (sched_setaffinity(0, sizeof(set), &set) == 0) return true;
  *error = "this process may not use the CPU " + std::to_string(cpus.front());
#else
  *error = "choosing CPUs is for Linux only";
#endif
  return false;
}

// A box that wanders over stripes.
Picture Drawn(int index) {
  Picture picture(kSize, kSize);
  for (int y = 0; y < kSize; ++y) {
    for (int x = 0; x < kSize; ++x) {
      std::uint8_t* pixel = picture.at(x, y);
      pixel[0] = static_cast<std::uint8_t>(2 * x);
      pixel[1] = static_cast<std::uint8_t>(2 * y);
      pixel[2] = static_cast<std::uint8_t>(4 * (x + index));
    }
  }
  const auto left = static_cast<float>(index % kSize);
  DrawBox(&picture, left, 40, left + 20, 60, {255, 255, 255});
  return picture;
}

bool Pictures(const std::string& folder, std::vector<Picture>* pictures, std::string* error) {
  if (folder.empty()) {
    for (int i = 0; i < kSize; ++i) pictures->push_back(Drawn(i));
    return true;
  }
  std::error_code failure;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failure)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  if (failure || files.empty()) {
    *error = folder + (failure ? ": " + failure.message() : " has no pictures");
    return false;
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    Picture picture;
    if (!ReadPicture(file, &picture, error)) return false;
    pictures->push_back(Resized(picture, kSize, kSize));
  }
  return true;
}

struct Captured {
  int frames = 0;
  int dropped = 0;
};

Captured Capture(const Settings& settings, const std::vector<Picture>& pictures,
                 DoubleBuffer* buffer) {
  Captured captured;
  const auto start = Clock::now();
  for (int i = 0; i < settings.frames && !buffer->closed(); ++i) {
    if (settings.fps > 0) {
      std::this_thread::sleep_until(start + std::chrono::duration_cast<Clock::duration>(
                                                std::chrono::duration<double>(i / settings.fps)));
    }
    ++captured.frames;
    const Clock::time_point taken = Clock::now();
    Frame* frame = buffer->StartFilling(/*wait=*/settings.fps <= 0);
    if (frame == nullptr) {
      ++captured.dropped;
      continue;
    }
    const Picture& picture = pictures[static_cast<std::size_t>(i) % pictures.size()];
    for (std::size_t k = 0; k < kElements; ++k) frame->pixels[k] = picture.rgb[k] / 127.5f - 1.0f;
    frame->taken = taken;
    buffer->FinishFilling();
  }
  buffer->Close();
  return captured;
}

bool SeesFace(edgesdk::Span<const float> logits) {
  return *std::max_element(logits.begin(), logits.end()) > kFaceLogit;
}

bool Parse(int argc, char** argv, Settings* settings) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--frames") {
      settings->frames = std::atoi(value.c_str());
    } else if (name == "--fps") {
      settings->fps = std::atof(value.c_str());
    } else if (name == "--pictures") {
      settings->pictures = value;
    } else if (name == "--network-cpus" || name == "--camera-cpu") {
      std::vector<int>& cpus =
          name == "--camera-cpu" ? settings->camera_cpu : settings->network_cpus;
      std::istringstream list(value);
      for (std::string cpu; std::getline(list, cpu, ',');) cpus.push_back(std::atoi(cpu.c_str()));
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && settings->frames > 0 && settings->fps >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!Parse(argc, argv, &settings)) {
    return Fail(
        "usage: camera_loop [--frames N] [--fps F] [--pictures FOLDER]"
        " [--network-cpus 2,3] [--camera-cpu 1]");
  }
  std::string error;
  std::vector<Picture> pictures;
  if (!Pictures(settings.pictures, &pictures, &error)) return Fail(error);

  static DoubleBuffer buffer;
  Captured captured;
  std::string camera_error;
  std::thread camera([&] {
    if (Pin(settings.camera_cpu, &camera_error)) captured = Capture(settings, pictures, &buffer);
    buffer.Close();
  });

  // The network's own threads start with the first model and keep to these CPUs, too.
  int processed = 0, with_face = 0;
  Histogram latencies;
  if (Pin(settings.network_cpus, &error)) {
    Network network;
    if (!network) error = network.error();
    while (error.empty()) {
      Frame* frame = buffer.Take();
      if (frame == nullptr) break;
      if (!network.bind_input_input_0(frame->pixels) || !network.run()) {
        error = network.error();
        break;
      }
      ++processed;
      with_face += SeesFace(network.output_Identity_0()) || SeesFace(network.output_Identity_1_0());
      latencies.Add(std::chrono::duration<double, std::milli>(Clock::now() - frame->taken).count());
    }
  }
  buffer.Close();
  camera.join();
  if (!camera_error.empty()) error = camera_error;
  if (!error.empty()) return Fail(error);

  std::printf("%d frames: %d processed, %d dropped, %d with a face\n", captured.frames, processed,
              captured.dropped, with_face);
  latencies.Print();
  return 0;
}
