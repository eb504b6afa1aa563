// What the extension module needs from the allocator of a device.
#pragma once

#include <stdexcept>

#include "memory.hpp"

namespace olla::replay {

// The device has no room for an arena: Python gets torch's own OutOfMemoryError, which users catch to shrink their batch.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The planned memory of the device; it lives as long as the process.
Memory& memory();

// Puts the planning allocator in front of the device's present one. Nothing changes for threads without an open window.
// It stays: tensors remember the allocator that made them. Throws std::runtime_error when torch refuses.
void install();

}  // namespace olla::replay
