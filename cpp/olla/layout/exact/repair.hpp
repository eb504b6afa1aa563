// Places some items of a packing anew, around all the others, by the exact search.
#pragma once

#include "olla/layout/exact/exact.hpp"

namespace olla {

// Which items of a part are alive in a range of sections. They are stored by birth in blocks with their last death: a query skips
// the blocks that are dead by then. O(items / 64) for each besides what it finds, O(items) memory.
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

class Repair {
 public:
  explicit Repair(const Part& part) : part_(part), alive_(part) {}

  // Gives the free items offsets at which they end at or below the target, or leaves the offsets as they are. The other items
  // keep their offsets; those at kUnplaced are ignored.
  Fit place(std::span<const ItemId> free, Bytes target, const ExactBudget& budget, std::uint64_t seed,
            std::vector<Offset>& offsets);

  const AliveIndex& alive() const { return alive_; }
  std::int64_t num_nodes() const { return num_nodes_; }  // in all, and what takes as long

 private:
  Part sub_part(std::span<const ItemId> free, Bytes target, const std::vector<Offset>& offsets) const;

  const Part& part_;
  const AliveIndex alive_;
  std::int64_t num_nodes_ = 0;
};

}  // namespace olla
