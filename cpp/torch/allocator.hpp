// What the extension module needs from the allocator of a device.
#pragma once

#include "memory.hpp"

namespace olla::replay {

// The planned memory of the device; it lives as long as the process.
Memory& memory();

// Puts the planning allocator in front of the device's present one. Nothing changes for threads without an open window.
// It stays: tensors remember the allocator that made them. Throws std::runtime_error when torch refuses.
void install();

}  // namespace olla::replay
