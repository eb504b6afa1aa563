// Offsets for buffers with given lifetimes: buffers alive together must not overlap, and the height should be least.
// The load, the most bytes alive at once, bounds the height from below; on training steps the two are nearly always equal.
#pragma once

#include "olla/base/control.hpp"
#include "olla/layout/problem/buffer.hpp"

namespace olla {

struct LayoutResult {
  std::vector<Offset> offsets;  // of buffer i
  Bytes height = 0;             // of the rounded sizes, as load and bound
  Bytes load = 0;
  Bytes bound = 0;                    // no height is below it; at least the load
  Status status = Status::kFeasible;  // kOptimal when height == bound
};

// There is a layout in any case, and a first greedy pass gets five seconds unless the caller stops it. The same buffers, options
// and seed give the same offsets unless the clock or the caller ended the search. PlanError "sizes": a negative size, or rounded
// sizes that sum to more than kMaxBytes; "alignment": it is below 1; "capacity": it is negative; "fixed", "preferred": an offset
// that cannot be, or fixed ones that collide. O(n log n) for the greedy pass on lifetimes like those of
// training steps.
LayoutResult layout(std::span<const Buffer> buffers, const LayoutOptions& options, Control& control);

}  // namespace olla
