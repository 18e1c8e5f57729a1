#include "boxes.h"

#include <algorithm>
#include <cmath>

namespace {

// As PP-OCR has them.
constexpr float kIsText = 0.3f;          // a pixel's probability
constexpr float kMinProbability = 0.5f;  // a box's mean
constexpr float kUnclip = 1.6f;
constexpr float kMinSide = 3.0f;
constexpr float kVertical = 1.5f;  // what is so much higher than wide is read downwards

Point operator+(Point a, Point b) { return {a.x + b.x, a.y + b.y}; }
Point operator-(Point a, Point b) { return {a.x - b.x, a.y - b.y}; }
Point operator*(float k, Point a) { return {k * a.x, k * a.y}; }
float Dot(Point a, Point b) { return a.x * b.x + a.y * b.y; }
float Cross(Point a, Point b) { return a.x * b.y - a.y * b.x; }

// Collects the pixels of text that hang together with `start`, and marks them as seen.
std::vector<int> Flood(const float* map, int width, int height, int start,
                       std::vector<bool>* seen) {
  std::vector<int> found = {start};
  (*seen)[static_cast<std::size_t>(start)] = true;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const int x = found[i] % width, y = found[i] / width;
    for (int ny = std::max(0, y - 1); ny <= std::min(height - 1, y + 1); ++ny) {
      for (int nx = std::max(0, x - 1); nx <= std::min(width - 1, x + 1); ++nx) {
        const int next = ny * width + nx;
        if (map[next] <= kIsText || (*seen)[static_cast<std::size_t>(next)]) continue;
        (*seen)[static_cast<std::size_t>(next)] = true;
        found.push_back(next);
      }
    }
  }
  return found;
}

// Andrew's monotone chain.
std::vector<Point> ConvexHull(std::vector<Point> points) {
  std::sort(points.begin(), points.end(),
            [](Point a, Point b) { return a.x != b.x ? a.x < b.x : a.y < b.y; });
  std::vector<Point> hull;
  for (int side = 0; side < 2; ++side) {
    const std::size_t start = hull.size();
    for (Point point : points) {
      while (hull.size() >= start + 2 &&
             Cross(hull.back() - hull[hull.size() - 2], point - hull.back()) <= 0) {
        hull.pop_back();
      }
      hull.push_back(point);
    }
    hull.pop_back();  // the first of the other side
    std::reverse(points.begin(), points.end());
  }
  return hull;
}

// The smallest rectangle around a convex shape has a side in common with it.
TextBox SmallestRectangle(const std::vector<Point>& hull) {
  TextBox best = {};
  float best_area = INFINITY;
  for (std::size_t i = 0; i < hull.size(); ++i) {
    const Point edge = hull[(i + 1) % hull.size()] - hull[i];
    const float length = std::sqrt(Dot(edge, edge));
    if (length == 0) continue;
    const Point u = (1 / length) * edge, v = {-u.y, u.x};
    float u_min = INFINITY, u_max = -INFINITY, v_min = INFINITY, v_max = -INFINITY;
    for (Point point : hull) {
      u_min = std::min(u_min, Dot(point, u));
      u_max = std::max(u_max, Dot(point, u));
      v_min = std::min(v_min, Dot(point, v));
      v_max = std::max(v_max, Dot(point, v));
    }
    const float area = (u_max - u_min) * (v_max - v_min);
    if (area >= best_area) continue;
    best_area = area;
    best.center = (u_min + u_max) / 2 * u + (v_min + v_max) / 2 * v;
    best.along = u;
    best.width = u_max - u_min;
    best.height = v_max - v_min;
  }
  return best;
}

// Turns a rectangle by quarters until its text would be read: from left to right, or downwards.
void Orient(TextBox* box) {
  if (std::abs(box->along.x) < std::abs(box->along.y)) {
    box->along = {-box->along.y, box->along.x};
    std::swap(box->width, box->height);
  }
  if (box->along.x < 0) box->along = -1 * box->along;
  if (box->height >= kVertical * box->width) {
    box->along = {-box->along.y, box->along.x};
    std::swap(box->width, box->height);
  }
  box->across = {-box->along.y, box->along.x};
}

float Mixed(const Picture& picture, int channel, float x, float y) {
  x = std::clamp(x, 0.0f, static_cast<float>(picture.width - 1));
  y = std::clamp(y, 0.0f, static_cast<float>(picture.height - 1));
  const int x0 = static_cast<int>(x), y0 = static_cast<int>(y);
  const int x1 = std::min(x0 + 1, picture.width - 1), y1 = std::min(y0 + 1, picture.height - 1);
  const float fx = x - static_cast<float>(x0), fy = y - static_cast<float>(y0);
  const float top = (1 - fx) * picture.at(x0, y0)[channel] + fx * picture.at(x1, y0)[channel];
  const float bottom = (1 - fx) * picture.at(x0, y1)[channel] + fx * picture.at(x1, y1)[channel];
  return (1 - fy) * top + fy * bottom;
}

}  // namespace

Point TextBox::corner(int i) const {
  const float w = i == 0 || i == 3 ? -width / 2 : width / 2;
  const float h = i < 2 ? -height / 2 : height / 2;
  return center + w * along + h * across;
}

std::vector<TextBox> FindBoxes(const float* map, int width, int height) {
  std::vector<bool> seen(static_cast<std::size_t>(width) * height);
  std::vector<TextBox> boxes;
  for (int start = 0; start < width * height; ++start) {
    if (map[start] <= kIsText || seen[static_cast<std::size_t>(start)]) continue;
    const std::vector<int> pixels = Flood(map, width, height, start, &seen);
    std::vector<Point> points;
    float sum = 0;
    for (int pixel : pixels) {
      points.push_back({static_cast<float>(pixel % width), static_cast<float>(pixel / width)});
      sum += map[pixel];
    }
    if (pixels.size() < 3) continue;
    TextBox box = SmallestRectangle(ConvexHull(std::move(points)));
    box.probability = sum / static_cast<float>(pixels.size());
    if (std::min(box.width, box.height) < kMinSide || box.probability < kMinProbability) continue;
    const float margin = box.width * box.height * kUnclip / (2 * (box.width + box.height));
    box.width += 2 * margin;
    box.height += 2 * margin;
    Orient(&box);
    boxes.push_back(box);
  }
  // Lines from the top; what stands beside each other in one line from the left.
  std::sort(boxes.begin(), boxes.end(),
            [](const TextBox& a, const TextBox& b) { return a.center.y < b.center.y; });
  for (std::size_t first = 0, end = 0; first < boxes.size(); first = end) {
    while (end < boxes.size() &&
           boxes[end].center.y - boxes[first].center.y < boxes[first].height / 2) {
      ++end;
    }
    std::sort(boxes.begin() + static_cast<std::ptrdiff_t>(first),
              boxes.begin() + static_cast<std::ptrdiff_t>(end),
              [](const TextBox& a, const TextBox& b) { return a.center.x < b.center.x; });
  }
  return boxes;
}

Picture CutOut(const Picture& picture, const TextBox& box, int height, int max_width) {
  const int w = std::max(1, static_cast<int>(std::lround(box.width)));
  const int h = std::max(1, static_cast<int>(std::lround(box.height)));
  Picture upright(w, h);
  for (int y = 0; y < h; ++y) {
    for (int x = 0; x < w; ++x) {
      const float dx = static_cast<float>(x) + 0.5f - static_cast<float>(w) / 2;
      const float dy = static_cast<float>(y) + 0.5f - static_cast<float>(h) / 2;
      const Point at = box.center + dx * box.along + dy * box.across;
      for (int c = 0; c < 3; ++c) {
        upright.at(x, y)[c] = static_cast<std::uint8_t>(Mixed(picture, c, at.x, at.y) + 0.5f);
      }
    }
  }
  const double ratio = static_cast<double>(w) / h;
  const int width = static_cast<int>(std::ceil(height * ratio));
  return Resized(upright, std::clamp(width, 1, max_width), height);
}
