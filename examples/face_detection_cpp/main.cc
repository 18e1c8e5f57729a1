// Finds faces in a picture and draws a box around each: BlazeFace for the front camera, as
// published in MediaPipe ("BlazeFace: Sub-millisecond Neural Face Detection on Mobile GPUs", 2019).
//
//     face_detection IN.jpg OUT.png [THRESHOLD]
//
// One line on stdout for each face: probability, and left, top, right, bottom in pixels.

#include <algorithm>
#include <blazeface.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "picture.h"

namespace {

using Network = edgesdk_blazeface::Model;

constexpr int kSize = 128;          // pixels of the network's square input
constexpr float kThreshold = 0.6f;  // of the probability, where the caller gives none
constexpr float kSameFace = 0.3f;   // boxes that overlap by more are one face
constexpr int kNumPoints = 6;       // eyes, nose, mouth, ears
constexpr Color kGreen = {40, 220, 60};
constexpr Color kYellow = {255, 210, 0};

static_assert(Network::input_input_0_shape[1] == kSize && Network::input_input_0_shape[2] == kSize);
static_assert(Network::output_Identity_0_shape[1] == 16 * 16 * 2);
static_assert(Network::output_Identity_1_0_shape[1] == 8 * 8 * 6);

// In pixels of the picture.
struct Face {
  float probability;
  float left, top, right, bottom;
  float points[kNumPoints][2];
};

int Fail(const std::string& reason) {
  std::fprintf(stderr, "face_detection: %s\n", reason.c_str());
  return 1;
}

// Writes the picture into the upper left corner of the network's input, -1 to 1, as large as it
// fits without distortion. Returns the pixels of the picture for each of the input's.
float Fill(const Picture& picture, edgesdk::Span<float> input) {
  const float scale = static_cast<float>(std::max(picture.width, picture.height)) / kSize;
  const int width = std::max(1, static_cast<int>(std::lround(picture.width / scale)));
  const int height = std::max(1, static_cast<int>(std::lround(picture.height / scale)));
  const Picture small = Resized(picture, width, height);
  std::fill(input.begin(), input.end(), 0.0f);
  for (int y = 0; y < height; ++y) {
    float* row = input.data() + 3 * kSize * y;
    for (int i = 0; i < 3 * width; ++i) row[i] = small.at(0, y)[i] / 127.5f - 1.0f;
  }
  return scale;
}

// The network looks at the picture on a grid, with some boxes in each cell. For each it gives the
// logit of the probability, and relative to the cell's center, in pixels of the input: the box's
// center and size, and the points.
void Decode(edgesdk::Span<const float> scores, edgesdk::Span<const float> boxes, int grid,
            int per_cell, float threshold, float scale, std::vector<Face>* faces) {
  for (int i = 0; i < grid * grid * per_cell; ++i) {
    const float probability = 1.0f / (1.0f + std::exp(-scores[i]));
    if (!(probability >= threshold)) continue;
    const int cell = i / per_cell;
    const float cell_x = (cell % grid + 0.5f) * kSize / grid;
    const float cell_y = (cell / grid + 0.5f) * kSize / grid;
    const float* box = boxes.data() + i * (4 + 2 * kNumPoints);
    const float x = cell_x + box[0], y = cell_y + box[1];
    Face face = {};
    face.probability = probability;
    face.left = (x - box[2] / 2) * scale;
    face.top = (y - box[3] / 2) * scale;
    face.right = (x + box[2] / 2) * scale;
    face.bottom = (y + box[3] / 2) * scale;
    for (int k = 0; k < kNumPoints; ++k) {
      face.points[k][0] = (cell_x + box[4 + 2 * k]) * scale;
      face.points[k][1] = (cell_y + box[5 + 2 * k]) * scale;
    }
    faces->push_back(face);
  }
}

// The area that two boxes share, of the area that they cover together.
float Overlap(const Face& a, const Face& b) {
  const float width = std::min(a.right, b.right) - std::max(a.left, b.left);
  const float height = std::min(a.bottom, b.bottom) - std::max(a.top, b.top);
  if (width <= 0 || height <= 0) return 0;
  const float area_a = (a.right - a.left) * (a.bottom - a.top);
  const float area_b = (b.right - b.left) * (b.bottom - b.top);
  return width * height / (area_a + area_b - width * height);
}

// Non-maximum suppression: of boxes around the same face the most probable one stays.
std::vector<Face> Suppress(std::vector<Face> faces) {
  std::stable_sort(faces.begin(), faces.end(),
                   [](const Face& a, const Face& b) { return a.probability > b.probability; });
  std::vector<Face> kept;
  for (const Face& face : faces) {
    const bool is_new = std::none_of(kept.begin(), kept.end(), [&](const Face& other) {
      return Overlap(face, other) > kSameFace;
    });
    if (is_new) kept.push_back(face);
  }
  return kept;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return Fail("usage: face_detection IN OUT [THRESHOLD]");
  const float threshold = argc == 4 ? std::strtof(argv[3], nullptr) : kThreshold;
  if (!(threshold > 0 && threshold < 1)) return Fail("THRESHOLD lies between 0 and 1");

  Picture picture;
  std::string error;
  if (!ReadPicture(argv[1], &picture, &error)) return Fail(error);

  Network network;
  if (!network) return Fail(network.error());
  edgesdk::Span<float> input = network.input_input_0();
  if (input.empty()) return Fail(network.error());
  const float scale = Fill(picture, input);
  if (!network.run()) return Fail(network.error());

  std::vector<Face> faces;
  Decode(network.output_Identity_0(), network.output_Identity_2_0(), 16, 2, threshold, scale,
         &faces);
  Decode(network.output_Identity_1_0(), network.output_Identity_3_0(), 8, 6, threshold, scale,
         &faces);
  faces = Suppress(std::move(faces));

  for (const Face& face : faces) {
    std::printf("%.4f %.2f %.2f %.2f %.2f\n", face.probability, face.left, face.top, face.right,
                face.bottom);
    DrawBox(&picture, face.left, face.top, face.right, face.bottom, kGreen);
    for (const auto& point : face.points) DrawPoint(&picture, point[0], point[1], kYellow);
  }
  if (!WritePicture(argv[2], picture, &error)) return Fail(error);
  return 0;
}
