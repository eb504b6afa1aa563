// Packings of one part for tests of what lowers them.
#pragma once

#include "buffers.hpp"
#include "olla/layout/greedy/by_birth.hpp"
#include "olla/layout/problem/packing.hpp"

namespace olla {

// The first of its parts.
inline Part part_of(const std::vector<Buffer>& buffers) { return reduce(buffers, rounded_sizes(buffers, 1)).front(); }

inline Part one_part(std::vector<Buffer> buffers) {
  buffers.push_back({-1, 1000, 1});  // joins all into one part
  return part_of(buffers);
}

inline Packing by_birth(const Part& part) {
  Packing packing{fit_by_birth(part, 0)};
  packing.height = height_of(part, packing.offsets);
  return packing;
}

inline void check_packing(const Part& part, const Packing& packing) {
  std::vector<Buffer> buffers;
  for (const Item& item : part.items) buffers.push_back({item.first, item.last, item.size});
  LayoutResult result{packing.offsets, packing.height, part.load, part.load};
  if (result.height == result.load) result.status = Status::kOptimal;
  check_layout(buffers, result, 1);
}

}  // namespace olla
