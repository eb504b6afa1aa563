// Which items of a part are alive in a range of sections.
#pragma once

#include <algorithm>

#include "olla/layout/problem/packing.hpp"

namespace olla {

// The items by birth in blocks, of which the last death is known: a question passes over the blocks that are dead by then.
// O(items / 64) for each besides what it finds, O(items) memory.
class AliveIndex {
 public:
  explicit AliveIndex(const Part& part) : born_before_(born_before(part)), last_death_(part.items.size() / kBlock + 1, 0) {
    for (ItemId i = 0; i < part.num_items(); ++i) {
      death_.push_back(part.items[i].last);
      last_death_[i / kBlock] = std::max(last_death_[i / kBlock], death_.back());
    }
  }

  // Calls visit(item) for the items alive anywhere in [first, last), by birth.
  template <class Visit>
  void each(Section first, Section last, const Visit& visit) const {
    const ItemId end = born_before_[last];
    for (ItemId begin = 0; begin < end; begin += kBlock) {
      if (last_death_[begin / kBlock] <= first) continue;
      for (ItemId i = begin; i < std::min(end, begin + kBlock); ++i) {
        if (death_[i] > first) visit(i);
      }
    }
  }

 private:
  static constexpr ItemId kBlock = 64;
  std::vector<ItemId> born_before_;
  std::vector<Section> death_, last_death_;  // of an item; of a block
};

}  // namespace olla
