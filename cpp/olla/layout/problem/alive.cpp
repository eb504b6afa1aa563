#include "olla/layout/problem/alive.hpp"

namespace olla {

AliveIndex::AliveIndex(const Part& part) : born_before_(born_before(part)) {
  const auto num_leaves = std::bit_ceil(static_cast<std::uint32_t>(part.num_items() / kPerLeaf + 1));
  height_ = std::bit_width(num_leaves) - 1;
  last_death_.assign(2 * num_leaves, 0);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    death_.push_back(part.items[i].last);
    Section& last = last_death_[num_leaves + static_cast<std::uint32_t>(i / kPerLeaf)];
    last = std::max(last, death_.back());
  }
  for (std::uint32_t node = num_leaves - 1; node > 0; --node) {
    last_death_[node] = std::max(last_death_[2 * node], last_death_[2 * node + 1]);
  }
}

}  // namespace olla
