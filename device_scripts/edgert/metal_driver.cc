#include "metal_driver.h"

#include <stdio.h>

#include "driver_library.h"

namespace edgert {
namespace metal {
namespace {

// In no file of its own since macOS 11, and yet opened by this name.
constexpr const char* kLibraries[] = {"/System/Library/Frameworks/Metal.framework/Metal"};

// The runtime's functions are found in the libraries that the framework needs itself.
bool Accept(void* library, void* result, char* why_not, size_t bytes) {
  Driver* driver = static_cast<Driver*>(result);
  const char* missing = nullptr;
  void* address;
#define EDGERT_METAL_OPTIONAL(result, name, parameters) \
  address = FindSymbol(library, #name);                 \
  memcpy(&driver->name, &address, sizeof(address));
#define EDGERT_METAL_NEEDED(result, name, parameters) \
  EDGERT_METAL_OPTIONAL(result, name, parameters)     \
  if (address == nullptr && missing == nullptr) missing = #name;
  EDGERT_METAL_FUNCTIONS(EDGERT_METAL_NEEDED, EDGERT_METAL_OPTIONAL)
#undef EDGERT_METAL_NEEDED
#undef EDGERT_METAL_OPTIONAL
  if (missing != nullptr) {
    snprintf(why_not, bytes, " (has no %s)", missing);
    return false;
  }
#define EDGERT_METAL_REGISTER(member, selector) \
  driver->selectors.member = driver->sel_registerName(selector);
  EDGERT_METAL_SELECTORS(EDGERT_METAL_REGISTER)
#undef EDGERT_METAL_REGISTER
  return true;
}

}  // namespace

const char* Driver::Text(Object string) const {
  const char* text = string == nullptr ? nullptr : Send<const char*>(string, selectors.utf8);
  return text == nullptr ? "" : text;
}

bool LoadDriver(Driver* driver, char* error, size_t error_bytes) {
  LibrarySearch search{"EDGESDK_METAL_LIBRARY", kLibraries,
                       sizeof(kLibraries) / sizeof(kLibraries[0])};
  char tried[900];
  if (FindLibrary(search, Accept, driver, tried, sizeof(tried))) return true;
  snprintf(error, error_bytes, "no Metal, which Apple's systems have: cannot use %s", tried);
  return false;
}

}  // namespace metal
}  // namespace edgert
