// Which items of a part are alive in a range of sections.
#pragma once

#include <algorithm>
#include <bit>

#include "olla/layout/problem/packing.hpp"

namespace olla {

// A complete binary tree over the items by birth that knows the last death below every node. O(items) memory; a question costs
// O(log n) for every item found, and often much less.
class AliveIndex {
 public:
  explicit AliveIndex(const Part& part);

  // Calls visit(item) for the items alive anywhere in [first, last), by birth.
  template <class Visit>
  void each(Section first, Section last, const Visit& visit) const {
    const ItemId end = born_before_[last];
    for (std::int32_t node = 1; node > 0;) {
      const std::int32_t level = std::bit_width(static_cast<std::uint32_t>(node)) - 1;
      const std::int32_t begin = (node - (1 << level)) << (height_ - level);  // of its leaves
      if (begin * kPerLeaf >= end) return;
      if (last_death_[node] > first) {
        if (level < height_) {
          node *= 2;
          continue;
        }
        for (ItemId i = begin * kPerLeaf; i < std::min(end, (begin + 1) * kPerLeaf); ++i) {
          if (death_[i] > first) visit(i);
        }
      }
      while (node % 2 == 1) node /= 2;
      if (node > 0) ++node;
    }
  }

 private:
  static constexpr std::int32_t kPerLeaf = 32;
  int height_;
  std::vector<Section> death_, last_death_;  // of an item; of a node
  std::vector<ItemId> born_before_;
};

}  // namespace olla
