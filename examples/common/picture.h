// picture.h: pictures for the examples: read, write, scale, draw.
#ifndef EXAMPLES_PICTURE_H_
#define EXAMPLES_PICTURE_H_

#include <cstdint>
#include <string>
#include <vector>

// Red, green, blue for each pixel, row by row from the top.
struct Picture {
  int width = 0;
  int height = 0;
  std::vector<std::uint8_t> rgb;

  Picture() = default;
  Picture(int w, int h) : width(w), height(h), rgb(3 * static_cast<std::size_t>(w) * h) {}
  std::uint8_t* at(int x, int y) { return &rgb[3 * (static_cast<std::size_t>(y) * width + x)]; }
  const std::uint8_t* at(int x, int y) const {
    return &rgb[3 * (static_cast<std::size_t>(y) * width + x)];
  }
};

struct Color {
  std::uint8_t red, green, blue;
};

// Reads a PNG, JPEG or BMP file. False on failure, with the reason in *error.
bool ReadPicture(const std::string& path, Picture* picture, std::string* error);

// Writes PNG, or JPEG when the name ends so. False on failure, with the reason in *error.
bool WritePicture(const std::string& path, const Picture& picture, std::string* error);

// Scales with a triangle filter, whose width grows when shrinking, so that nothing flickers; the
// same as "bilinear" of Pillow.
Picture Resized(const Picture& picture, int width, int height);

// What is drawn outside of the picture is left out.
void DrawLine(Picture* picture, float x0, float y0, float x1, float y1, Color color);
void DrawBox(Picture* picture, float left, float top, float right, float bottom, Color color);
void DrawPoint(Picture* picture, float x, float y, Color color);

#endif  // EXAMPLES_PICTURE_H_
