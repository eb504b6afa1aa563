// Whether a part repeats itself, as pipelines of microbatches do.
#pragma once

#include "olla/layout/problem/packing.hpp"

namespace olla {

// Whether births, sizes and lifetimes alike, repeat at least four times over the middle half of the sections. O(n).
bool births_repeat(const Part& part);

}  // namespace olla
