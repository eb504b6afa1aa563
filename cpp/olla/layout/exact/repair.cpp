#include "olla/layout/exact/repair.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr std::int64_t kNodesPerSetup = 50, kItemsPerNode = 10;  // what takes as long as a node

Section position(std::span<const Section> times, Section time) {
  return static_cast<Section>(std::ranges::lower_bound(times, time) - times.begin());
}

}  // namespace

Fit Repair::place(std::span<const ItemId> free, Bytes target, const ExactBudget& budget, std::uint64_t seed,
                  std::vector<Offset>& offsets) {
  const Part part = sub_part(free, target, offsets);
  ExactSearch search(part, {}, seed);
  const Fit fit = search.decide(target, budget);
  num_nodes_ += kNodesPerSetup + part.num_items() / kItemsPerNode + search.num_nodes();
  if (fit != Fit::kFits) return fit;
  for (std::size_t k = 0; k < free.size(); ++k) offsets[free[k]] = search.offsets()[k];
  return fit;
}

// The free items, with the space of the others as fixed items. A section lies between consecutive births or deaths of free items:
// space taken by another item at any time of it counts as taken throughout, as a free item alive then is alive throughout.
Part Repair::sub_part(std::span<const ItemId> free, Bytes target, const std::vector<Offset>& offsets) const {
  std::vector<Section> times;
  for (const ItemId i : free) times.insert(times.end(), {part_.items[i].first, part_.items[i].last});
  sort_unique(times);
  Part part;
  part.section_load.assign(times.size() - 1, 0);
  for (const ItemId i : free) {
    const Item& item = part_.items[i];
    part.items.push_back({position(times, item.first), position(times, item.last), item.size});
    for (Section s = part.items.back().first; s < part.items.back().last; ++s) part.section_load[s] += item.size;
  }
  part.fixed.assign(free.size(), kUnplaced);
  std::vector<ItemId> others;
  alive_.each(times.front(), times.back(), [&](ItemId i) {
    if (offsets[i] != kUnplaced && offsets[i] < target) others.push_back(i);
  });
  for (const ItemId i : free) std::erase(others, i);
  std::ranges::sort(others, {}, [&](ItemId i) { return offsets[i]; });
  std::vector<std::vector<std::pair<Offset, Offset>>> taken(part.section_load.size());
  for (const ItemId i : others) {
    const Item& item = part_.items[i];
    const Offset low = offsets[i], high = std::min(target, low + item.size);
    const Section last = std::min(position(times, item.last), part.num_sections());
    for (Section s = std::max(0, position(times, item.first + 1) - 1); s < last; ++s) {
      if (part.section_load[s] == 0) continue;
      if (taken[s].empty() || taken[s].back().second < low) {
        taken[s].emplace_back(low, high);
      } else {
        taken[s].back().second = std::max(taken[s].back().second, high);
      }
    }
  }
  for (Section s = 0; s < std::ssize(taken); ++s) {
    for (const auto& [low, high] : taken[s]) {
      part.items.push_back({s, s + 1, high - low});
      part.section_load[s] += high - low;
      part.fixed.push_back(low);
    }
  }
  part.load = std::ranges::max(part.section_load);
  return part;
}

}  // namespace olla
