#include "olla/layout/greedy/fixed_items.hpp"

#include <algorithm>
#include <numeric>

namespace olla {

FixedItems::FixedItems(const Part& part) : part_(fixed_part(part)), offsets_(part_.fixed), pool_(part_), order_(offsets_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  restore();
}

void FixedItems::restore() {
  pool_.fill(order_);
  num_left_behind_ = 0;
}

void FixedItems::leave_below(Offset floor) {
  while (num_left_behind_ < std::ssize(offsets_) && offsets_[num_left_behind_] < floor) pool_.remove(num_left_behind_++);
}

// By rising offset.
Part FixedItems::fixed_part(const Part& part) {
  std::vector<ItemId> ids;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.is_fixed(i)) ids.push_back(i);
  }
  std::ranges::stable_sort(ids, {}, [&](ItemId i) { return part.fixed[i]; });
  Part fixed;
  for (const ItemId i : ids) {
    fixed.items.push_back(part.items[i]);
    fixed.fixed.push_back(part.fixed[i]);
  }
  return fixed;
}

FixedItems::FixedItem FixedItems::next(Section first, Section last) const {
  const std::int32_t rank = pool_.best(meeting(first, last));
  return rank == kNoRank ? FixedItem{} : at(rank);
}

}  // namespace olla
