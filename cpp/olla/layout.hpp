// Offsets for buffers with given lifetimes: buffers alive together must not overlap, and the height should be least.
// The load, the most bytes alive at once, bounds the height from below; on training steps the two are nearly always equal.
#pragma once

#include "olla/control.hpp"
#include "olla/types.hpp"

namespace olla {

inline constexpr Offset kFree = -1;  // any offset will do

struct Buffer {
  std::int64_t lower, upper;  // alive during [lower, upper); never alive, and at offset 0, when lower >= upper or size == 0
  Bytes size;
  Offset fixed = kFree;      // where it must lie
  Offset preferred = kFree;  // where it lies if that costs no height, as far as is found
};

struct LayoutOptions {
  Bytes alignment = 1;  // every offset is a multiple of it: sizes are rounded up to it first
  std::uint64_t seed = 0;
  Bytes capacity = 0;   // any height up to it is enough; 0 asks for the least height
  int num_threads = 1;  // of the exact search and of the beam
  std::int64_t max_placements =
      2'000'000;  // effort of the squeaky wheel, passes times items, and of ejection: deterministic, unlike the clock
  std::int64_t max_nodes = 4'000'000;  // effort of the exact search and of large neighbourhoods
  bool use_enumeration = true;         // tiny parts are solved exactly
  bool use_fold = true;                // what repeats itself is packed once
  bool use_births = true;              // long-lived buffers by birth, as an allocator would
  bool use_squeaky_wheel = true;
  bool use_foresight = true;  // in the squeaky wheel
  bool use_exact = true;      // search that can prove
  bool use_neighbourhood = true;
  bool use_beam = true;  // what repeats itself is also placed in the order of time
};

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
