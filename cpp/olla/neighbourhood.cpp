#include "olla/neighbourhood.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr double kMinFree = 12, kMaxFree = 160;
constexpr std::int64_t kNodesPerTry = 6000;
constexpr int kTriesPerTarget = 150;  // without a late item less

}  // namespace

void Neighbourhood::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  double ambition = 1;
  offsets_ = best.offsets;
  while (best.height > enough && num_nodes_ < end && !asked()) {
    // The target is what is enough, or nearer the present height after it could not be had.
    const auto share = static_cast<Bytes>(ambition * static_cast<double>(best.height - enough));
    const Bytes target = best.height - std::max<Bytes>(1, share);
    bool reached = false;
    for (int tries = 0; tries < kTriesPerTarget && num_nodes_ < end && !asked(); ++tries) {
      if (!find_late(target)) {
        reached = true;
        break;
      }
      const std::size_t num_late = late_.size();
      free_around(late_[below(num_late)]);
      const Fit fit = repack(target, std::min(kNodesPerTry, end - num_nodes_), asked);
      if (fit == Fit::kFits) tries = 0;
      // More items where no packing of these is low enough, fewer where the search did not find out.
      const double change = fit == Fit::kNever ? 1.15 : fit == Fit::kUnknown ? 0.95 : 1;
      num_wanted_ = std::clamp(num_wanted_ * change, kMinFree, kMaxFree);
    }
    if (height() < best.height) best = {offsets_, height()};
    ambition = reached ? 1 : ambition < 0.05 ? 1 : ambition / 2;
  }
}

Bytes Neighbourhood::height() const {
  Bytes height = 0;
  for (ItemId i = 0; i < part_.num_items(); ++i) height = std::max(height, offsets_[i] + part_.items[i].size);
  return height;
}

bool Neighbourhood::find_late(Bytes target) {
  late_.clear();
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (offsets_[i] + part_.items[i].size > target) late_.push_back(i);
  }
  return !late_.empty();
}

// Frees the late item and those whose lifetimes overlap a window of sections in its own; those that are born or die in the window
// first, as many as are wanted.
void Neighbourhood::free_around(ItemId late) {
  const Item& item = part_.items[late];
  const auto centre = static_cast<Section>(item.first + static_cast<Section>(below(item.last - item.first)));
  const auto distance = [&](ItemId i) {  // to its farther end; far for those that only pass by
    const Item& other = part_.items[i];
    return std::max(std::abs(other.first - centre), std::abs(other.last - 1 - centre));
  };
  std::vector<std::pair<Section, ItemId>> near;
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (i != late) near.emplace_back(distance(i), i);
  }
  const auto count = std::min(near.size(), static_cast<std::size_t>(num_wanted_ * (0.6 + 0.8 * static_cast<double>(below(1000)) / 1000)));
  std::ranges::nth_element(near, near.begin() + static_cast<std::ptrdiff_t>(count));
  free_.assign(1, late);
  for (std::size_t k = 0; k < count; ++k) free_.push_back(near[k].second);
  is_free_.assign(part_.items.size(), false);
  for (const ItemId i : free_) is_free_[i] = true;
}

// The free items and what overlaps them make a problem of their own.
Fit Neighbourhood::repack(Bytes target, std::int64_t max_nodes, const std::function<bool()>& stop) {
  std::vector<Section> covered(part_.num_sections() + 1, 0);  // by free items
  for (const ItemId i : free_) ++covered[part_.items[i].first], --covered[part_.items[i].last];
  std::vector<Section> num_covered(part_.num_sections() + 1, 0);  // before a section
  for (Section s = 0, open = 0; s < part_.num_sections(); ++s) {
    open += covered[s];
    num_covered[s + 1] = num_covered[s] + (open > 0);
  }
  std::vector<Buffer> buffers;
  std::vector<Bytes> sizes;
  std::vector<ItemId> items;
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    const Item& item = part_.items[i];
    const Bytes size = is_free_[i] ? item.size : std::min(item.size, target - offsets_[i]);
    if (size <= 0 || num_covered[item.first] == num_covered[item.last]) continue;
    // Times without free items vanish.
    buffers.push_back({num_covered[item.first], num_covered[item.last], size});
    sizes.push_back(size);
    items.push_back(i);
  }
  std::vector<std::pair<ItemId, Offset>> moved;
  for (const Part& part : reduce(buffers, sizes)) {
    std::vector<Offset> fixed;
    for (const std::int32_t b : part.buffers) fixed.push_back(is_free_[items[b]] ? kUnplaced : offsets_[items[b]]);
    ExactSearch search(part, fixed, {}, random_());
    const Fit fit = search.decide(target, {max_nodes, stop});
    num_nodes_ += std::max<std::int64_t>(100, search.num_nodes());
    if (fit != Fit::kFits) return fit;
    for (ItemId i = 0; i < part.num_items(); ++i) moved.emplace_back(items[part.buffers[i]], search.offsets()[i]);
  }
  for (const auto& [item, offset] : moved) offsets_[item] = offset;
  return Fit::kFits;
}

}  // namespace olla
