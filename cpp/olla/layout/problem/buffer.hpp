// A layout problem: buffers with lifetimes and sizes, and how hard to look for their offsets.
#pragma once

#include "olla/base/types.hpp"

namespace olla {

inline constexpr Offset kFree = -1;  // any offset will do

struct Buffer {
  std::int64_t lower, upper;  // alive during [lower, upper); never alive, and at offset 0, when lower >= upper or size == 0
  Bytes size;
  Offset fixed = kFree;      // where it must lie
  Offset preferred = kFree;  // where it lies if that costs no height, as far as is found
};

// One switch for every search, so that each can be left out and its weight measured (bench/layout/ablate_layout.py).
struct LayoutOptions {
  Bytes alignment = 1;  // every offset is a multiple of it: sizes are rounded up to it first
  std::uint64_t seed = 0;
  Bytes capacity = 0;                       // any height up to it is enough; 0 asks for the least height
  int num_threads = 1;                      // of the exact search and of the beam
  std::int64_t max_placements = 2'000'000;  // effort of the squeaky wheel, passes times items: deterministic, unlike the clock
  std::int64_t max_nodes = 4'000'000;       // effort of the exact search and of what is built on it
  bool use_enumeration = true;              // tiny parts are solved exactly
  bool use_keys = true;                     // skyline best fit by other keys than the area
  bool use_births = true;                   // long-lived buffers by birth, as an allocator would
  bool use_squeaky_wheel = true;
  bool use_foresight = true;      // in the squeaky wheel
  bool use_exact = true;          // ladder: search that can prove
  bool use_neighbourhood = true;  // some buffers placed anew by the exact search
  bool use_beam = true;           // what repeats itself is also placed in the order of time
};

}  // namespace olla
