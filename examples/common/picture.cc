#include "picture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#define STBI_ONLY_JPEG
#define STBI_ONLY_BMP
#include <stb_image.h>
#define STB_IMAGE_WRITE_IMPLEMENTATION
#include <stb_image_write.h>

namespace {

constexpr int kJpegQuality = 92;

bool EndsWith(const std::string& text, const char* end) {
  const std::size_t size = std::strlen(end);
  return text.size() >= size && text.compare(text.size() - size, size, end) == 0;
}

void FillBox(Picture* picture, int left, int top, int right, int bottom, Color color) {
  for (int y = std::max(top, 0); y < std::min(bottom, picture->height); ++y) {
    for (int x = std::max(left, 0); x < std::min(right, picture->width); ++x) {
      std::uint8_t* pixel = picture->at(x, y);
      pixel[0] = color.red;
      pixel[1] = color.green;
      pixel[2] = color.blue;
    }
  }
}

// The source pixels that one pixel of the result is made of, and how much of each.
struct Weights {
  int first;
  std::vector<float> of;
};

std::vector<Weights> TriangleFilter(int from, int to) {
  const double scale = static_cast<double>(from) / to;
  const double reach = std::max(scale, 1.0);
  std::vector<Weights> filter(static_cast<std::size_t>(to));
  for (int i = 0; i < to; ++i) {
    const double center = (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - reach + 0.5));
    const int end = std::min(from, static_cast<int>(center + reach + 0.5));
    Weights& weights = filter[static_cast<std::size_t>(i)];
    weights.first = first;
    double sum = 0;
    for (int k = first; k < end; ++k) {
      const double weight = std::max(0.0, 1.0 - std::abs((k + 0.5 - center) / reach));
      weights.of.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (float& weight : weights.of) weight = static_cast<float>(weight / sum);
  }
  return filter;
}

std::uint8_t Rounded(float value) {
  return static_cast<std::uint8_t>(std::clamp(value + 0.5f, 0.0f, 255.0f));
}

}  // namespace

bool ReadPicture(const std::string& path, Picture* picture, std::string* error) {
  int width = 0, height = 0, channels = 0;
  stbi_uc* pixels = stbi_load(path.c_str(), &width, &height, &channels, 3);
  if (pixels == nullptr) {
    *error = path + " cannot be read: " + stbi_failure_reason();
    return false;
  }
  *picture = Picture(width, height);
  std::copy_n(pixels, picture->rgb.size(), picture->rgb.begin());
  stbi_image_free(pixels);
  return true;
}

bool WritePicture(const std::string& path, const Picture& picture, std::string* error) {
  const int width = picture.width, height = picture.height;
  const void* data = picture.rgb.data();
  const bool jpeg = EndsWith(path, ".jpg") || EndsWith(path, ".jpeg");
  const int ok = jpeg ? stbi_write_jpg(path.c_str(), width, height, 3, data, kJpegQuality)
                      : stbi_write_png(path.c_str(), width, height, 3, data, 3 * width);
  if (ok == 0) *error = path + " cannot be written";
  return ok != 0;
}

Picture Resized(const Picture& picture, int width, int height) {
  const std::vector<Weights> columns = TriangleFilter(picture.width, width);
  const std::vector<Weights> rows = TriangleFilter(picture.height, height);
  Picture wide(width, picture.height);
  for (int y = 0; y < wide.height; ++y) {
    for (int x = 0; x < width; ++x) {
      const Weights& weights = columns[static_cast<std::size_t>(x)];
      float sum[3] = {};
      const std::uint8_t* pixel = picture.at(weights.first, y);
      for (float weight : weights.of) {
        for (int c = 0; c < 3; ++c) sum[c] += weight * *pixel++;
      }
      for (int c = 0; c < 3; ++c) wide.at(x, y)[c] = Rounded(sum[c]);
    }
  }
  Picture result(width, height);
  for (int y = 0; y < height; ++y) {
    const Weights& weights = rows[static_cast<std::size_t>(y)];
    for (int x = 0; x < width; ++x) {
      float sum[3] = {};
      int row = weights.first;
      for (float weight : weights.of) {
        const std::uint8_t* pixel = wide.at(x, row++);
        for (int c = 0; c < 3; ++c) sum[c] += weight * pixel[c];
      }
      for (int c = 0; c < 3; ++c) result.at(x, y)[c] = Rounded(sum[c]);
    }
  }
  return result;
}

void DrawPoint(Picture* picture, float x, float y, Color color) {
  const int size = std::max(2, std::max(picture->width, picture->height) / 200);
  const int left = static_cast<int>(std::lround(x)) - size / 2;
  const int top = static_cast<int>(std::lround(y)) - size / 2;
  FillBox(picture, left, top, left + size, top + size, color);
}

void DrawLine(Picture* picture, float x0, float y0, float x1, float y1, Color color) {
  const int steps = std::max(1, static_cast<int>(std::hypot(x1 - x0, y1 - y0)));
  for (int i = 0; i <= steps; ++i) {
    const float part = static_cast<float>(i) / steps;
    DrawPoint(picture, x0 + part * (x1 - x0), y0 + part * (y1 - y0), color);
  }
}

void DrawBox(Picture* picture, float left, float top, float right, float bottom, Color color) {
  DrawLine(picture, left, top, right, top, color);
  DrawLine(picture, right, top, right, bottom, color);
  DrawLine(picture, right, bottom, left, bottom, color);
  DrawLine(picture, left, bottom, left, top, color);
}
