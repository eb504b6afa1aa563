// Long-lived items in the order of their births, each in the smallest hole that is large enough, as an allocator would: where the
// same sizes return again and again, as the microbatches of a pipeline do, each finds the hole its like has left.
#pragma once

#include "olla/layout/problem/packing.hpp"

namespace olla {

// Offsets of the items that are alive in more than so many sections; kUnplaced for others. For parts without fixed items.
// O(n log n).
std::vector<Offset> fit_by_birth(const Part& part, Section short_sections);

}  // namespace olla
