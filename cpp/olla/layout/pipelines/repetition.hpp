// Where a part repeats itself, as pipelines of microbatches do.
#pragma once

#include <optional>

#include "olla/layout/problem/packing.hpp"

namespace olla {

// In the sections [begin, end) the births repeat, sizes and lifetimes alike, but for what outlives all of it.
struct Repetition {
  Section begin = 0, end = 0;
  Section last = 0;     // up to here sizes still repeat, though lifetimes do not
  Section settled = 0;  // from here to the end all that is alive was born in what repeats, or outlives it
  Section period = 0;
  Section length = 0;               // the least multiple of the period that no item born there outlives
  std::vector<ItemId> sorted;       // items by birth, size and lifetime: alike ones stand alike in alike sections
  std::vector<ItemId> born_before;  // of a section

  // None where the period is too long to tell.
  static std::optional<Repetition> find(const Part& part);
};

}  // namespace olla
