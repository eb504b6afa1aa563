#include "olla/neighbourhood.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr double kMinFree = 12, kMaxFree = 80;
constexpr std::int64_t kNodesPerTry = 1000, kNodesPerSetup = 50;
constexpr int kTriesPerTarget = 100;  // without success
constexpr double kMinAmbition = 0.01;
constexpr std::int64_t kItemsPerNode = 200, kWallsPerNode = 10;  // looked at, in the time of a node

}  // namespace

void Neighbourhood::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  offsets_ = best.offsets;
  while (best.height > enough && num_nodes_ < end && !asked()) {
    // Nearer the present height after a target could not be had.
    const auto share = static_cast<Bytes>(ambition_ * static_cast<double>(best.height - enough));
    const bool reached = reach(best.height - std::max<Bytes>(1, share), end, asked);
    if (height() < best.height) best = {offsets_, height()};
    if (reached) {
      ambition_ = std::min(1.0, 2 * ambition_);
    } else if (num_nodes_ < end) {
      ambition_ = std::max(ambition_ / 2, kMinAmbition);
    }
  }
}

bool Neighbourhood::reach(Bytes target, std::int64_t end, const std::function<bool()>& stop) {
  if (!find_late(target)) return true;
  for (int tries = 0; tries < kTriesPerTarget && num_nodes_ < end && !stop(); ++tries) {
    const ItemId late = late_[below(late_.size())];
    if (part_.is_fixed(late)) return false;
    free_around(late);
    const Fit fit = repack(target, std::min(kNodesPerTry, end - num_nodes_), stop);
    if (fit == Fit::kFits) {
      tries = 0;
      std::erase_if(late_, [&](ItemId item) { return !is_late(item, target); });
      if (late_.empty()) return true;
    }
    // More items where no packing of these is low enough, fewer where the search did not find out.
    const double change = fit == Fit::kNever ? 1.15 : fit == Fit::kUnknown ? 0.95 : 1;
    num_wanted_ = std::clamp(num_wanted_ * change, kMinFree, kMaxFree);
  }
  return false;
}

Bytes Neighbourhood::height() const {
  Bytes height = 0;
  for (ItemId i = 0; i < part_.num_items(); ++i) height = std::max(height, offsets_[i] + part_.items[i].size);
  return height;
}

bool Neighbourhood::find_late(Bytes target) {
  late_.clear();
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (is_late(i, target)) late_.push_back(i);
  }
  num_nodes_ += part_.num_items() / kItemsPerNode;
  return !late_.empty();
}

// Frees the late item and others around a section of its lifetime.
void Neighbourhood::free_around(ItemId late) {
  const Item& item = part_.items[late];
  const auto centre = static_cast<Section>(item.first + static_cast<Section>(below(item.last - item.first)));
  const auto kind = static_cast<Kind>(random_() % 3);
  const auto wanted = static_cast<std::size_t>(num_wanted_ * (0.6 + 0.8 * static_cast<double>(below(1000)) / 1000));
  std::vector<ItemId> found;
  const Section end = part_.num_sections();
  for (Section reach = 1; ; reach *= 4) {
    found.clear();
    const Section first = std::max(0, centre - reach), last = reach < end - centre ? centre + reach : end;
    alive_.each(first, last, [&](ItemId other) {
      const Item& o = part_.items[other];
      const bool counts = kind != Kind::kWhole || (o.first >= first && o.last <= last) || (first == 0 && last == end);
      if (other != late && counts && !part_.is_fixed(other)) found.push_back(other);
    });
    if (found.size() >= wanted || (first == 0 && last == end)) break;
  }
  const Offset level = found.empty() ? 0 : offsets_[found[below(found.size())]];
  std::vector<std::pair<double, ItemId>> near;
  for (const ItemId other : found) near.emplace_back(distance(other, kind, centre, level) + static_cast<double>(below(1000)) / 1000, other);
  const auto count = static_cast<std::ptrdiff_t>(std::min(near.size(), wanted));
  std::ranges::nth_element(near, near.begin() + count);
  free_.assign(1, late);
  for (std::ptrdiff_t k = 0; k < count; ++k) free_.push_back(near[static_cast<std::size_t>(k)].second);
  num_nodes_ += std::ssize(found) / kItemsPerNode;
}

double Neighbourhood::distance(ItemId item, Kind kind, Section centre, Offset level) const {
  const auto [first, last, size] = part_.items[item];
  const Offset offset = offsets_[item];
  if (kind == Kind::kWhole) return std::max(std::abs(first - centre), std::abs(last - 1 - centre));
  if (kind == Kind::kAlive) return std::max({0, first - centre, centre - last + 1});
  return static_cast<double>(std::max({Offset{0}, offset - level, level - offset - size}));
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
  add_walls(target, times, part, fixed);
  part.load = std::ranges::max(part.section_load);
  return part;
}

void Neighbourhood::add_walls(Bytes target, std::span<const Section> times, Part& part, std::vector<Offset>& fixed) const {
  const auto position = [&](Section time) { return static_cast<Section>(std::ranges::lower_bound(times, time) - times.begin()); };
  std::vector<ItemId> others;
  alive_.each(times.front(), times.back(), [&](ItemId i) {
    if (offsets_[i] < target) others.push_back(i);
  });
  for (const ItemId i : free_) std::erase(others, i);
  std::ranges::sort(others, {}, [&](ItemId i) { return offsets_[i]; });
  std::vector<std::vector<std::pair<Offset, Offset>>> taken(part.section_load.size());
  for (const ItemId i : others) {
    const Item& item = part_.items[i];
    const Offset low = offsets_[i], high = std::min(target, low + item.size);
    const Section last = std::min(position(item.last), part.num_sections());
    for (Section s = std::max(0, position(item.first + 1) - 1); s < last; ++s) {
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
      fixed.push_back(low);
    }
  }
}

Fit Neighbourhood::repack(Bytes target, std::int64_t max_nodes, const std::function<bool()>& stop) {
  std::vector<Offset> fixed;
  const Part part = sub_part(target, fixed);
  ExactSearch search(part, fixed, {}, random_());
  const Fit fit = search.decide(target, {max_nodes, stop});
  num_nodes_ += kNodesPerSetup + part.num_items() / kWallsPerNode + search.num_nodes();
  if (fit != Fit::kFits) return fit;
  for (std::size_t k = 0; k < free_.size(); ++k) offsets_[free_[k]] = search.offsets()[k];
  return fit;
}

}  // namespace olla
