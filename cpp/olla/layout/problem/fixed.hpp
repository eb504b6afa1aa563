// Offsets that come with the buffers: fixed ones, which a layout must keep, and preferred ones, which it keeps where that costs no
// height.
#pragma once

#include <functional>

#include "olla/layout/problem/buffer.hpp"

namespace olla {

// Of every buffer: its fixed offset; else its preferred one, where that ends at or below the height and collides neither with a
// fixed one nor with a preferred one kept before, first born first; else kFree. Empty where all are free. PlanError "fixed": a
// fixed or preferred offset that is below kFree, no multiple of the alignment or beyond kMaxBytes, or two fixed ones that collide.
// O(n log n).
std::vector<Offset> given_places(std::span<const Buffer> buffers, std::span<const Bytes> sizes, Bytes alignment, Bytes height);

// Moves buffers to their preferred offsets where these are free below the height, until stop says so. O(n) for every buffer that
// lies elsewhere.
void move_to_preferred(std::span<const Buffer> buffers, std::span<const Bytes> sizes, Bytes height,
                       const std::function<bool()>& stop, std::vector<Offset>& offsets);

}  // namespace olla
