// Best fit offline: buffers are placed one after the other, each into the smallest hole left by the buffers placed before it that
// live at the same time. Source: SmartPool (arXiv 1903.06631), section 3; the tree that finds the holes is ours.
#pragma once

#include "olla/base/control.hpp"
#include "olla/layout/problem/buffer.hpp"

namespace olla {

enum class Hole : std::uint8_t {
  kBest,   // the smallest hole that is large enough, the lowest of several
  kLowest  // the lowest hole that is large enough
};

struct FitResult {
  std::vector<Offset> offsets;  // of buffer i; 0 if it is never alive or has no bytes
  Bytes height = 0;             // largest end of a buffer, its size rounded up to the alignment
};

// Places buffers in the given order, a permutation of them. Once stopped, it stacks the rest on top. PlanError as layout() says.
// A placement looks at the placed buffers in groups of about a hundred, and opens those that are alive together with the buffer
// only in part or leave a hole that is large enough; O(n) memory.
FitResult fit_in_order(std::span<const Buffer> buffers, std::span<const std::int32_t> order, Hole rule, Bytes alignment,
                       Control& control);

// SmartPool's order: buffers that outlive the iteration first, then by falling size; the earlier born first among equals.
std::vector<std::int32_t> smartpool_order(std::span<const Buffer> buffers, std::span<const std::uint8_t> outlives);

}  // namespace olla
