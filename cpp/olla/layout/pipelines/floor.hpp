// What outlives nearly all else, put below it.
#pragma once

#include <vector>

#include "olla/layout/problem/packing.hpp"

namespace olla {

struct Floor {
  std::vector<Offset> offsets;  // of what lies on the floor; kUnplaced of all other items
  Bytes height = 0;
};

// Items alive in more than half of the sections that could be alive in all of them without a higher load, longest lifetimes first:
// what is left to pack has their height less, at no loss to the load. Nothing lies there where that would take long to find.
Floor find_floor(const Part& part);

}  // namespace olla
