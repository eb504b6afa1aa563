// The fixed items of a part, as what the skyline has to build around.
#pragma once

#include "olla/layout/greedy/item_pool.hpp"

namespace olla {

class FixedItems {
 public:
  explicit FixedItems(const Part& part);

  struct FixedItem {
    Offset offset = std::numeric_limits<Offset>::max();
    Item item{0, 0, 0};  // size 0: there is none
    std::int32_t rank = kNoRank;
  };

  void restore();                  // all of them
  void leave_below(Offset floor);  // forgets those that begin below; the floor rises from call to call

  // The lowest that is left among those alive anywhere in [first, last). As fast as the pool.
  FixedItem next(Section first, Section last) const;
  bool empty() const { return offsets_.empty(); }

  // Calls visit(fixed item) by rising offset for those left that are alive anywhere in [first, last), until it says false.
  template <class Visit>
  void each(Section first, Section last, const Visit& visit) {
    walk_.start(pool_, meeting(first, last));
    for (std::int32_t rank = walk_.next(); rank != kNoRank && visit(at(rank)); rank = walk_.next()) {
    }
  }

 private:
  static Part fixed_part(const Part& part);
  static ItemPool::Box meeting(Section first, Section last) {
    return {0, last - 1, first + 1, std::numeric_limits<Section>::max()};
  }
  FixedItem at(std::int32_t rank) const { return {offsets_[rank], part_.items[rank], rank}; }

  const Part part_;                    // the fixed items alone
  const std::vector<Offset> offsets_;  // theirs, rising
  ItemPool pool_;                      // by that rank
  std::vector<ItemId> order_;
  std::int32_t num_left_behind_ = 0;
  ItemPool::Walk walk_;
};

}  // namespace olla
