/* edgesdk_model.hpp: the C API of edgesdk_model.h as a C++17 class.
 *
 * Each bundle has a NAME.hpp with a class for its own network, which names and types inputs and
 * outputs; this is its base. For a network `net` with an input `x` and an output `scores`:
 *
 *     #include <net.hpp>
 *
 *     edgesdk_net::Model model;
 *     if (!model) return fail(model.error());
 *     for (float& value : model.input_x()) value = next_pixel();
 *     if (!model.run()) return fail(model.error());
 *     for (float score : model.output_scores()) use(score);
 *
 * Nothing here throws, and none of it needs exceptions or RTTI: what can fail returns false or an
 * empty span, and error() then has the reason. Objects are moved, never copied; a model serves one
 * thread at a time.
 */
#ifndef EDGESDK_MODEL_HPP_
#define EDGESDK_MODEL_HPP_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "edgesdk_model.h"

namespace edgesdk {

/* 16-bit floats, as their bits: C++17 has no arithmetic for them. */
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

/* A view of consecutive elements, as std::span of C++20. */
template <typename T>
class Span {
 public:
  constexpr Span() noexcept = default;
  constexpr Span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
  template <std::size_t N>
  constexpr Span(T (&array)[N]) noexcept : data_(array), size_(N) {}
  /* Of anything that has data() and size(): std::vector, std::array, std::span, another Span. */
  template <typename Container, typename = std::enable_if_t<std::is_convertible_v<
                                    decltype(std::declval<Container&>().data()), T*>>>
  constexpr Span(Container&& container) noexcept
      : data_(container.data()), size_(container.size()) {}

  constexpr T* data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T& operator[](std::size_t index) const noexcept { return data_[index]; }
  constexpr T* begin() const noexcept { return data_; }
  constexpr T* end() const noexcept { return data_ + size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/* The edgesdk_dtype whose elements are T. */
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<edgesdk_dtype, EDGESDK_FLOAT32> {};
template <>
struct DTypeOf<double> : std::integral_constant<edgesdk_dtype, EDGESDK_FLOAT64> {};
template <>
struct DTypeOf<Float16> : std::integral_constant<edgesdk_dtype, EDGESDK_FLOAT16> {};
template <>
struct DTypeOf<BFloat16> : std::integral_constant<edgesdk_dtype, EDGESDK_BFLOAT16> {};
template <>
struct DTypeOf<std::int8_t> : std::integral_constant<edgesdk_dtype, EDGESDK_INT8> {};
template <>
struct DTypeOf<std::int16_t> : std::integral_constant<edgesdk_dtype, EDGESDK_INT16> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<edgesdk_dtype, EDGESDK_INT32> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<edgesdk_dtype, EDGESDK_INT64> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<edgesdk_dtype, EDGESDK_UINT8> {};
template <>
struct DTypeOf<std::uint16_t> : std::integral_constant<edgesdk_dtype, EDGESDK_UINT16> {};
template <>
struct DTypeOf<std::uint32_t> : std::integral_constant<edgesdk_dtype, EDGESDK_UINT32> {};
template <>
struct DTypeOf<std::uint64_t> : std::integral_constant<edgesdk_dtype, EDGESDK_UINT64> {};
template <>
struct DTypeOf<bool> : std::integral_constant<edgesdk_dtype, EDGESDK_BOOL> {};

/* As edgesdk_options; zero means the default. */
struct Options {
  std::int32_t num_threads = 0;
  std::int32_t device_index = 0;
  void* device_stream = nullptr;
};

/* Where data begins that is used in place; elsewhere each run copies it. */
inline constexpr std::size_t kAlignment = 64;

class Model {
 public:
  using Open = edgesdk_status (*)(std::uint32_t, const edgesdk_options*, edgesdk_model**);

  /* Opens a network with its opening function, edgesdk_open_NAME. Converts to false on failure. */
  explicit Model(Open open, const Options& options = {}) noexcept {
    edgesdk_options c_options = {};
    c_options.struct_size = sizeof(c_options);
    c_options.num_threads = options.num_threads;
    c_options.device_index = options.device_index;
    c_options.device_stream = options.device_stream;
    c_options.error_buffer = error_;
    c_options.error_buffer_size = sizeof(error_);
    status_ = open(EDGESDK_ABI_VERSION, &c_options, &handle_);
  }

  ~Model() { close(); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  Model(Model&& other) noexcept { take(other); }
  Model& operator=(Model&& other) noexcept {
    if (this != &other) {
      close();
      take(other);
    }
    return *this;
  }

  /* Is it open? */
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /* The kind and the reason of the last failure; EDGESDK_OK and "" if there was none. The text is
   * valid until the next call. */
  edgesdk_status status() const noexcept { return status_; }
  const char* error() const noexcept { return error_; }

  /* For what only the C API has (layers, memory, profiling). It stays this object's own. */
  edgesdk_model* handle() const noexcept { return handle_; }

  const char* name() const noexcept { return edgesdk_model_name(handle_); }
  const char* target() const noexcept { return edgesdk_model_target(handle_); }
  std::int32_t num_threads() const noexcept { return edgesdk_model_num_threads(handle_); }
  std::int32_t num_inputs() const noexcept { return edgesdk_model_num_inputs(handle_); }
  std::int32_t num_outputs() const noexcept { return edgesdk_model_num_outputs(handle_); }

  /* The fixed shapes that the network was compiled for, numbered from 0, and the one in use: that
   * of the inputs, outputs and runs below. Each keeps its own memory and bindings. */
  std::int32_t num_variants() const noexcept { return edgesdk_model_num_variants(handle_); }
  std::int32_t variant() const noexcept { return edgesdk_model_variant(handle_); }
  [[nodiscard]] bool select_variant(std::int32_t variant) noexcept {
    return opened() && done(edgesdk_model_select_variant(handle_, variant));
  }

  /* Selects the variant whose input `index` has this shape, the first of them if there are several.
   * False if there is none. */
  [[nodiscard]] bool select_shape(std::int32_t index, Span<const std::int64_t> shape) noexcept {
    if (!opened()) return false;
    for (std::int32_t i = 0; i < num_variants(); ++i) {
      edgesdk_tensor_info info = {};
      if (!done(edgesdk_model_variant_input_info(handle_, i, index, &info))) return false;
      bool same = static_cast<std::size_t>(info.ndim) == shape.size();
      for (std::int32_t k = 0; same && k < info.ndim; ++k) {
        same = info.shape[k] == shape[static_cast<std::size_t>(k)];
      }
      if (same) return select_variant(i);
    }
    fail(EDGESDK_ERROR_INVALID_ARGUMENT, "the model was not compiled for this shape");
    return false;
  }

  /* Memory of this object for an input, which the next runs read: write the values there, nothing
   * is copied afterwards. It stays the same until the object goes. Empty on failure. */
  template <typename T>
  Span<T> input(std::int32_t index) noexcept {
    edgesdk_tensor_info info = {};
    void* data = nullptr;
    std::size_t size_bytes = 0;
    if (!check<T>("input", index, edgesdk_model_input_info(handle_, index, &info), info) ||
        !done(edgesdk_model_own_input(handle_, index, &data, &size_bytes))) {
      return {};
    }
    return {static_cast<T*>(data), size_bytes / sizeof(T)};
  }

  /* Makes the next runs read an input from the caller's memory, which must live that long. Aligned
   * to kAlignment it is used in place. */
  template <typename T>
  [[nodiscard]] bool bind_input(std::int32_t index, Span<const T> data) noexcept {
    edgesdk_tensor_info info = {};
    return check<T>("input", index, edgesdk_model_input_info(handle_, index, &info), info) &&
           done(edgesdk_model_set_input(handle_, index, data.data(), data.size_bytes()));
  }

  /* Makes the next runs write an output to the caller's memory, under the same rules. An empty
   * span goes back to the model's own memory. */
  template <typename T>
  [[nodiscard]] bool bind_output(std::int32_t index, Span<T> data) noexcept {
    edgesdk_tensor_info info = {};
    return check<T>("output", index, edgesdk_model_output_info(handle_, index, &info), info) &&
           done(edgesdk_model_set_output(handle_, index, data.data(), data.size_bytes()));
  }

  /* Runs the network once; all outputs are written when it returns. */
  [[nodiscard]] bool run() noexcept { return opened() && done(edgesdk_model_run(handle_)); }

  /* An output of the last run, until the next one. Empty on failure. */
  template <typename T>
  Span<const T> output(std::int32_t index) noexcept {
    edgesdk_tensor_info info = {};
    const void* data = nullptr;
    std::size_t size_bytes = 0;
    if (!check<T>("output", index, edgesdk_model_output_info(handle_, index, &info), info) ||
        !done(edgesdk_model_get_output(handle_, index, &data, &size_bytes))) {
      return {};
    }
    return {static_cast<const T*>(data), size_bytes / sizeof(T)};
  }

 private:
  bool opened() noexcept {
    if (handle_ == nullptr && status_ == EDGESDK_OK) {
      fail(EDGESDK_ERROR_INVALID_ARGUMENT, "the model was moved away");
    }
    return handle_ != nullptr;
  }

  template <typename T>
  bool check(const char* kind, std::int32_t index, edgesdk_status status,
             const edgesdk_tensor_info& info) noexcept {
    if (!opened() || !done(status)) return false;
    if (info.dtype == DTypeOf<T>::value) return true;
    status_ = EDGESDK_ERROR_INVALID_ARGUMENT;
    std::snprintf(error_, sizeof(error_), "%s %d has elements of another type", kind,
                  static_cast<int>(index));
    return false;
  }

  bool done(edgesdk_status status) noexcept {
    if (status != EDGESDK_OK) fail(status, edgesdk_model_last_error(handle_));
    return status == EDGESDK_OK;
  }

  void fail(edgesdk_status status, const char* reason) noexcept {
    status_ = status;
    std::snprintf(error_, sizeof(error_), "%s", reason);
  }

  void close() noexcept { edgesdk_model_close(std::exchange(handle_, nullptr)); }

  void take(Model& other) noexcept {
    handle_ = std::exchange(other.handle_, nullptr);
    status_ = std::exchange(other.status_, EDGESDK_OK);
    for (std::size_t i = 0; i < sizeof(error_); ++i) error_[i] = other.error_[i];
    other.error_[0] = '\0';
  }

  edgesdk_model* handle_ = nullptr;
  edgesdk_status status_ = EDGESDK_OK;
  char error_[512] = "";
};

}  // namespace edgesdk

#endif /* EDGESDK_MODEL_HPP_ */
