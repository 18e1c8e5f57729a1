// Reads the text in a picture with three networks of PP-OCR (PaddlePaddle, 2023) in one program:
// one finds lines, one sees which are upside down, one reads.
//
//     text_reader CHARACTERS.txt IN.jpg [OUT.png]
//
// One line on stdout for each line found: probability, a tab, and the text in UTF-8. OUT shows
// where.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <text_detection.hpp>
#include <text_direction.hpp>
#include <text_recognition.hpp>
#include <utility>
#include <vector>

#include "boxes.h"
#include "picture.h"

namespace {

using Detection = edgesdk_text_detection::Model;
using Direction = edgesdk_text_direction::Model;
using Recognition = edgesdk_text_recognition::Model;

// The sizes are those that the networks were compiled for.
constexpr int kMapWidth = Detection::input_x_shape[3], kMapHeight = Detection::input_x_shape[2];
constexpr int kLineHeight = Recognition::input_x_shape[2];
constexpr int kLineWidth = Recognition::input_x_shape[3];
constexpr int kDirectionWidth = Direction::input_x_shape[3];
constexpr int kSteps = Recognition::output_softmax_11_tmp_0_shape[1];
constexpr int kNumCharacters = Recognition::output_softmax_11_tmp_0_shape[2];
static_assert(Direction::input_x_shape[2] == kLineHeight);

constexpr float kUpsideDown = 0.9f;
constexpr float kReadable = 0.5f;
constexpr Color kRed = {230, 40, 40};

int Fail(const std::string& reason) {
  std::fprintf(stderr, "text_reader: %s\n", reason.c_str());
  return 1;
}

// One character a line. The network counts from 1, has "nothing" before and the space behind them.
bool ReadCharacters(const char* path, std::vector<std::string>* characters) {
  std::ifstream file(path);
  characters->assign(1, "");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    characters->push_back(line);
  }
  characters->push_back(" ");
  return characters->size() == kNumCharacters;
}

// Writes a picture into the upper left corner of an input: planes of blue, green and red, as these
// networks were trained with, from -1 to 1, and 0 beyond the picture.
void Fill(const Picture& picture, edgesdk::Span<float> input, int width, int height) {
  std::fill(input.begin(), input.end(), 0.0f);
  for (int plane = 0; plane < 3; ++plane) {
    for (int y = 0; y < picture.height; ++y) {
      float* row = input.data() + (plane * height + y) * width;
      for (int x = 0; x < picture.width; ++x) {
        row[x] = picture.at(x, y)[2 - plane] / 127.5f - 1.0f;
      }
    }
  }
}

// The boxes in pixels of the picture.
bool FindLines(Detection* network, const Picture& picture, std::vector<TextBox>* lines) {
  const float scale = std::max(static_cast<float>(picture.width) / kMapWidth,
                               static_cast<float>(picture.height) / kMapHeight);
  const int width = std::clamp(static_cast<int>(picture.width / scale), 1, kMapWidth);
  const int height = std::clamp(static_cast<int>(picture.height / scale), 1, kMapHeight);
  Fill(Resized(picture, width, height), network->input_x(), kMapWidth, kMapHeight);
  if (!network->run()) return false;
  *lines = FindBoxes(network->output_sigmoid_0_tmp_0().data(), kMapWidth, kMapHeight);
  for (TextBox& line : *lines) {
    line.center = {(line.center.x + 0.5f) * scale, (line.center.y + 0.5f) * scale};
    line.width *= scale;
    line.height *= scale;
  }
  return true;
}

// Turns the box when its text is upside down.
bool TurnUpright(Direction* network, const Picture& picture, TextBox* line) {
  Fill(CutOut(picture, *line, kLineHeight, kDirectionWidth), network->input_x(), kDirectionWidth,
       kLineHeight);
  if (!network->run()) return false;
  if (network->output_save_infer_model_scale_0_tmp_1()[1] > kUpsideDown) {
    line->along = {-line->along.x, -line->along.y};
    line->across = {-line->across.x, -line->across.y};
  }
  return true;
}

// The network looks at the line in steps from left to right and gives the probability of each
// character for each. What stays the same over several steps counts once, "nothing" separates
// (connectionist temporal classification).
bool ReadLine(Recognition* network, const Picture& line, const std::vector<std::string>& characters,
              std::string* text, float* probability) {
  Fill(line, network->input_x(), kLineWidth, kLineHeight);
  if (!network->run()) return false;
  const float* step = network->output_softmax_11_tmp_0().data();
  text->clear();
  float sum = 0;
  int count = 0;
  std::ptrdiff_t last = 0;
  for (int i = 0; i < kSteps; ++i, step += kNumCharacters) {
    const std::ptrdiff_t best = std::max_element(step, step + kNumCharacters) - step;
    if (best != 0 && best != last) {
      *text += characters[static_cast<std::size_t>(best)];
      sum += step[best];
      ++count;
    }
    last = best;
  }
  *probability = count > 0 ? sum / static_cast<float>(count) : 0.0f;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return Fail("usage: text_reader CHARACTERS.txt IN [OUT]");
  std::vector<std::string> characters;
  if (!ReadCharacters(argv[1], &characters)) {
    return Fail(std::string(argv[1]) + " is not the network's list of characters");
  }
  Picture picture;
  std::string error;
  if (!ReadPicture(argv[2], &picture, &error)) return Fail(error);

  Detection detection;
  Direction direction;
  Recognition recognition;
  if (!detection) return Fail(detection.error());
  if (!direction) return Fail(direction.error());
  if (!recognition) return Fail(recognition.error());

  std::vector<TextBox> lines;
  if (!FindLines(&detection, picture, &lines)) return Fail(detection.error());
  Picture shown = picture;
  for (TextBox& line : lines) {
    if (!TurnUpright(&direction, picture, &line)) return Fail(direction.error());
    std::string text;
    float probability = 0;
    const Picture upright = CutOut(picture, line, kLineHeight, kLineWidth);
    if (!ReadLine(&recognition, upright, characters, &text, &probability)) {
      return Fail(recognition.error());
    }
    if (probability < kReadable) continue;
    std::printf("%.3f\t%s\n", probability, text.c_str());
    for (int i = 0; i < 4; ++i) {
      const Point from = line.corner(i), to = line.corner((i + 1) % 4);
      DrawLine(&shown, from.x, from.y, to.x, to.y, kRed);
    }
  }
  if (argc == 4 && !WritePicture(argv[3], shown, &error)) return Fail(error);
  return 0;
}
