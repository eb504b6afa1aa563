#include "olla/layout/exact/neighbourhood.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr double kMinFree = 12, kMaxFree = 80;
constexpr std::int64_t kNodesPerTry = 1000;
constexpr int kTriesPerTarget = 100;  // without success
constexpr double kMinAmbition = 0.01;
constexpr std::int64_t kItemsPerNode = 200;  // looked at, in the time of a node

}  // namespace

void Neighbourhood::lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes() + max_nodes;
  offsets_ = best.offsets;
  while (best.height > enough && num_nodes() < end && !asked()) {
    // The target moves closer to the present height after a miss.
    const auto share = static_cast<Bytes>(ambition_ * static_cast<double>(best.height - enough));
    const bool reached = reach(best.height - std::max<Bytes>(1, share), end, asked);
    if (const Bytes height = height_of(part_, offsets_); height < best.height) best = {offsets_, height};
    if (reached) {
      ambition_ = std::min(1.0, 2 * ambition_);
    } else if (num_nodes() < end) {
      ambition_ = std::max(ambition_ / 2, kMinAmbition);
    }
  }
}

bool Neighbourhood::reach(Bytes target, std::int64_t end, const std::function<bool()>& stop) {
  if (!find_late(target)) return true;
  for (int tries = 0; tries < kTriesPerTarget && num_nodes() < end && !stop(); ++tries) {
    const ItemId late = late_[below(late_.size())];
    if (part_.is_fixed(late)) return false;
    free_around(late);
    const Fit fit = repair_.place(free_, target, {std::min(kNodesPerTry, end - num_nodes()), stop}, random_(), offsets_);
    if (fit == Fit::kFits) {
      tries = 0;
      std::erase_if(late_, [&](ItemId item) { return !is_late(item, target); });
      if (late_.empty()) return true;
    }
    // Frees more items if these provably cannot fit, fewer if the search ended undecided.
    const double change = fit == Fit::kNever ? 1.15 : fit == Fit::kUnknown ? 0.95 : 1;
    num_wanted_ = std::clamp(num_wanted_ * change, kMinFree, kMaxFree);
  }
  return false;
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
  for (Section reach = 1;; reach *= 4) {
    found.clear();
    const Section first = std::max(0, centre - reach), last = reach < end - centre ? centre + reach : end;
    repair_.alive().each(first, last, [&](ItemId other) {
      const Item& o = part_.items[other];
      const bool counts = kind != Kind::kWhole || (o.first >= first && o.last <= last) || (first == 0 && last == end);
      if (other != late && counts && !part_.is_fixed(other)) found.push_back(other);
    });
    if (found.size() >= wanted || (first == 0 && last == end)) break;
  }
  const Offset level = found.empty() ? 0 : offsets_[found[below(found.size())]];
  std::vector<std::pair<double, ItemId>> near;
  for (const ItemId other : found)
    near.emplace_back(distance(other, kind, centre, level) + static_cast<double>(below(1000)) / 1000, other);
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

}  // namespace olla
