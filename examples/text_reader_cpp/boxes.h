// boxes.h: from the detector's map of text to boxes around lines of text, and to pictures of them.
#ifndef EXAMPLES_TEXT_READER_BOXES_H_
#define EXAMPLES_TEXT_READER_BOXES_H_

#include <vector>

#include "picture.h"

struct Point {
  float x, y;
};

// A rectangle at any angle. `along` points in the direction of reading, `across` to the next line;
// both have the length 1.
struct TextBox {
  Point center, along, across;
  float width, height;
  float probability;

  // From the upper left, clockwise; `i` is 0 to 3.
  Point corner(int i) const;
};

// Finds the boxes in a map of the probability that a pixel belongs to text, row by row. The map's
// text is narrower than the real one, so boxes are widened as the method asks for ("Real-time Scene
// Text Detection with Differentiable Binarization", 2020). In the order of reading.
std::vector<TextBox> FindBoxes(const float* map, int width, int height);

// The part of the picture below a box, turned upright and scaled to a height in pixels, at most
// `max_width` wide.
Picture CutOut(const Picture& picture, const TextBox& box, int height, int max_width);

#endif  // EXAMPLES_TEXT_READER_BOXES_H_
