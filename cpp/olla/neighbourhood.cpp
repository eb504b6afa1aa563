#include "olla/neighbourhood.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr double kMinFree = 12, kMaxFree = 80;
constexpr std::int64_t kNodesPerTry = 1000, kNodesPerSetup = 50;
constexpr int kTriesPerTarget = 100;  // without success
constexpr double kFirstAmbition = 0.25;

}  // namespace

void Neighbourhood::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  double ambition = kFirstAmbition;
  offsets_ = best.offsets;
  while (best.height > enough && num_nodes_ < end && !asked()) {
    // Nearer the present height after a target could not be had.
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
    ambition = reached ? std::min(1.0, 2 * ambition) : std::max(ambition / 2, 0.01);
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

// Frees the late item and others around a section of its lifetime: by turns those that lie nearest as a whole, and those of any
// length that are alive nearest.
void Neighbourhood::free_around(ItemId late) {
  const Item& item = part_.items[late];
  const auto centre = static_cast<Section>(item.first + static_cast<Section>(below(item.last - item.first)));
  const bool whole = random_() % 2 == 0;
  std::vector<std::pair<double, ItemId>> near;
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (i == late) continue;
    const Item& other = part_.items[i];
    const Section far = std::max(std::abs(other.first - centre), std::abs(other.last - 1 - centre));
    const Section gap = std::max({0, other.first - centre, centre - other.last + 1});
    near.emplace_back((whole ? far : gap) + static_cast<double>(below(1000)) / 1000, i);
  }
  const auto count =
      std::min(near.size(), static_cast<std::size_t>(num_wanted_ * (0.6 + 0.8 * static_cast<double>(below(1000)) / 1000)));
  std::ranges::nth_element(near, near.begin() + static_cast<std::ptrdiff_t>(count));
  free_.assign(1, late);
  for (std::size_t k = 0; k < count; ++k) free_.push_back(near[k].second);
  is_free_.assign(part_.items.size(), false);
  for (const ItemId i : free_) is_free_[i] = true;
}

// The free items between what the others leave them. Between two births or deaths of free items, what the others occupy at any time
// is out of reach at all times: a free item alive then is alive throughout.
Part Neighbourhood::sub_part(Bytes target, std::vector<Offset>& fixed) const {
  std::vector<Section> times;
  for (const ItemId i : free_) times.insert(times.end(), {part_.items[i].first, part_.items[i].last});
  std::ranges::sort(times);
  times.erase(std::ranges::unique(times).begin(), times.end());
  const auto position = [&](Section time) { return static_cast<Section>(std::ranges::lower_bound(times, time) - times.begin()); };
  Part part;
  part.section_load.assign(times.size() - 1, 0);
  for (const ItemId i : free_) {
    const Item& item = part_.items[i];
    part.items.push_back({position(item.first), position(item.last), item.size});
    for (Section s = part.items.back().first; s < part.items.back().last; ++s) part.section_load[s] += item.size;
  }
  fixed.assign(free_.size(), kUnplaced);
  using Range = std::pair<Offset, Offset>;
  std::vector<std::vector<Range>> taken(part.section_load.size());
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    const Item& item = part_.items[i];
    if (is_free_[i] || item.last <= times.front() || item.first >= times.back() || offsets_[i] >= target) continue;
    const Section last = std::min(position(item.last), part.num_sections());
    for (Section s = std::max(0, position(item.first + 1) - 1); s < last; ++s) {
      if (part.section_load[s] > 0) taken[s].emplace_back(offsets_[i], std::min(target, offsets_[i] + item.size));
    }
  }
  for (Section s = 0; s < std::ssize(taken); ++s) {
    std::ranges::sort(taken[s]);
    for (std::size_t k = 0; k < taken[s].size();) {
      auto [low, high] = taken[s][k];
      for (++k; k < taken[s].size() && taken[s][k].first <= high; ++k) high = std::max(high, taken[s][k].second);
      part.items.push_back({s, s + 1, high - low});
      part.section_load[s] += high - low;
      fixed.push_back(low);
    }
  }
  part.load = std::ranges::max(part.section_load);
  return part;
}

Fit Neighbourhood::repack(Bytes target, std::int64_t max_nodes, const std::function<bool()>& stop) {
  std::vector<Offset> fixed;
  const Part part = sub_part(target, fixed);
  ExactSearch search(part, fixed, {}, random_());
  const Fit fit = search.decide(target, {max_nodes, stop});
  num_nodes_ += kNodesPerSetup + search.num_nodes();
  if (fit != Fit::kFits) return fit;
  for (std::size_t k = 0; k < free_.size(); ++k) offsets_[free_[k]] = search.offsets()[k];
  return fit;
}

}  // namespace olla
