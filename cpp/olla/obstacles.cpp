#include "olla/obstacles.hpp"

#include <algorithm>
#include <numeric>

namespace olla {

Obstacles::Obstacles(const Part& part) : part_(fixed_part(part)), offsets_(part_.fixed), pool_(part_) {
  std::vector<ItemId> order(part_.items.size());
  std::iota(order.begin(), order.end(), 0);
  pool_.fill(order);
}

// By rising offset.
Part Obstacles::fixed_part(const Part& part) {
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

Obstacles::Obstacle Obstacles::next(Section first, Section last, Offset from) const {
  return after(first, last, static_cast<std::int32_t>(std::ranges::lower_bound(offsets_, from) - offsets_.begin()) - 1);
}

Obstacles::Obstacle Obstacles::after(Section first, Section last, std::int32_t rank) const {
  constexpr Section kFar = std::numeric_limits<Section>::max();
  const std::int32_t next = pool_.best({0, last - 1, first + 1, kFar}, rank);
  return next == kNoRank ? Obstacle{} : Obstacle{offsets_[next], part_.items[next], next};
}

}  // namespace olla
