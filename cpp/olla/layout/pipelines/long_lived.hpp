// Long-lived items are packed first, at the bottom: all others then see a lower problem with the same load.
#pragma once

#include <vector>

#include "olla/layout/problem/packing.hpp"

namespace olla {

struct LongLivedBase {
  std::vector<Offset> offsets;  // of item i where it lies in the base, else kUnplaced
  Bytes height = 0;             // of the base; all other items lie above
};

// Items alive in more than half of the sections that could be alive in all of them without a higher load, longest lifetimes first.
// The base is empty where it would take long to find. O(items * sections), at most 10^8 steps.
LongLivedBase find_base(const Part& part);

}  // namespace olla
