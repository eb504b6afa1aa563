#include "olla/layout/pipelines/ring.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace olla {
namespace {

constexpr ItemId kMaxItems = 400;  // of a stretch, for the exact search
constexpr std::int64_t kNodesPerTry = 1500, kItemsPerNode = 10;
constexpr int kTriesPerTarget = 20;  // without success
constexpr double kMinAmbition = 0.02;
constexpr std::array<double, 4> kWidths{0.7, 1, 1.5, 2};  // stretches around the cut that are packed freely

}  // namespace

bool Ring::suits(const Part& part, const Repetition& repeats) {
  const Section first = repeats.settled, last = first + repeats.length;
  if (!part.fixed.empty() || last + repeats.length > repeats.end) return false;
  ItemId num_alive = 0;
  for (ItemId i = 0; i < repeats.born_before[last]; ++i) num_alive += part.items[i].last > first;
  return num_alive <= kMaxItems;
}

Ring::Ring(const Part& part, const Repetition& repeats, std::uint64_t seed)
    : part_(part), repeats_(repeats), repair_(part), random_(seed) {
  for (ItemId i = 0; i < repeats.born_before[std::min(repeats.settled + repeats.length, repeats.end)]; ++i) early_.push_back(i);
  for (ItemId i = repeats.born_before[repeats.end - repeats.length]; i < part.num_items(); ++i) late_.push_back(i);
  std::ranges::sort(early_, {}, [&](ItemId i) { return std::tuple(-part.items[i].last, part.items[i].size, part.items[i].first); });
  match_early();
}

// Pairs of what was born before the repetition, and what dies a stretch later with the same size and lives no shorter. Backwards in
// time as long as the sizes of what dies repeat.
void Ring::match_early() {
  const auto dying = [&](Section s) {
    return std::ranges::equal_range(early_, -s, {}, [&](ItemId i) { return -part_.items[i].last; });
  };
  for (Section s = repeats_.settled; s > 0; --s) {
    const auto here = dying(s), later = dying(s + repeats_.length);
    const auto size = [&](ItemId i) { return part_.items[i].size; };
    if (!std::ranges::equal(here, later, {}, size, size)) return;
    for (std::size_t k = 0; k < here.size(); ++k) {
      const Item &item = part_.items[here[k]], &like = part_.items[later[k]];
      const Section shift = like.first - item.first;
      if (item.first < repeats_.begin ? shift > repeats_.length : shift != repeats_.length) return;
      if (item.first < repeats_.begin) early_likes_.emplace_back(here[k], later[k]);
    }
  }
}

void Ring::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const std::function<bool()> asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes() + max_nodes;
  while (best.height > enough && num_nodes() < end && !asked()) {
    const auto share = static_cast<Bytes>(ambition_ * static_cast<double>(best.height - enough));
    if (reach({best.height - std::max<Bytes>(1, share), end, asked})) {
      best.offsets = offsets_;
      best.height = height_of(part_, offsets_);
      ambition_ = std::min(1.0, 2 * ambition_);
      num_tries_ = 0;
    } else if (++num_tries_ == kTriesPerTarget) {
      ambition_ = ambition_ > kMinAmbition ? ambition_ / 2 : 1;
      num_tries_ = 0;
    }
  }
}

bool Ring::reach(const Limits& limits) {
  cut_ = repeats_.settled + static_cast<Section>(below(repeats_.length));
  if (!find_state(limits) || !close(limits)) return false;
  lay();
  const auto extend = [&](std::span<const ItemId> order) {
    return repair_.extend(order, limits.target, {limits.end - num_nodes(), limits.stop}, random_, offsets_);
  };
  return extend(late_) && extend(early_);
}

Fit Ring::search(const Part& part, std::span<const Offset> fixed, const Limits& limits, std::vector<Offset>& offsets) {
  ExactSearch exact(part, fixed, {}, random_());
  const Fit fit = exact.decide(limits.target, {std::min(kNodesPerTry, limits.end - num_nodes()), limits.stop});
  num_nodes_ += exact.num_nodes() + part.num_items() / kItemsPerNode;
  if (fit == Fit::kFits) offsets = exact.offsets();
  return fit;
}

// Some sections around the cut, packed freely.
bool Ring::find_state(const Limits& limits) {
  const auto half = static_cast<Section>(kWidths[below(kWidths.size())] * repeats_.length / 2);
  const Section first = std::max(0, cut_ - half), last = std::min(part_.num_sections(), cut_ + half + 1);
  Part part;
  part.section_load.assign(part_.section_load.begin() + first, part_.section_load.begin() + last);
  part.load = std::ranges::max(part.section_load);
  std::vector<ItemId> position(repeats_.born_before[last], kUnplaced);
  repair_.alive().each(first, last, [&](ItemId i) {
    const Item& item = part_.items[i];
    position[i] = part.num_items();
    part.items.push_back({std::max(0, item.first - first), std::min(item.last, last) - first, item.size});
  });
  std::vector<Offset> offsets;
  if (search(part, {}, limits, offsets) != Fit::kFits) return false;
  crossing_.clear();
  state_.clear();
  for (ItemId k = 0; k < repeats_.born_before[cut_]; ++k) {
    const ItemId i = repeats_.sorted[k];
    if (part_.items[i].last <= cut_) continue;
    crossing_.push_back(k);
    state_.push_back(offsets[position[i]]);
  }
  return true;
}

// One stretch between two times the same state.
bool Ring::close(const Limits& limits) {
  const Section length = repeats_.length;
  const ItemId from = repeats_.born_before[cut_], to = repeats_.born_before[cut_ + length];
  Part part;
  part.section_load.assign(part_.section_load.begin() + cut_, part_.section_load.begin() + cut_ + length);
  part.load = std::ranges::max(part.section_load);
  std::vector<Offset> fixed = state_;
  for (const ItemId k : crossing_) {
    const Item& item = part_.items[repeats_.sorted[k]];
    part.items.push_back({0, std::min(length, item.last - cut_), item.size});
  }
  for (ItemId k = from; k < to; ++k) {
    const Item& item = part_.items[repeats_.sorted[k]];
    const bool goes_on = item.last > cut_ + length;
    part.items.push_back({item.first - cut_, goes_on ? length : item.last - cut_, item.size});
    fixed.push_back(goes_on ? state_[std::ranges::lower_bound(crossing_, k - (to - from)) - crossing_.begin()] : kUnplaced);
  }
  if (search(part, fixed, limits, stretch_) != Fit::kFits) return false;
  stretch_.erase(stretch_.begin(), stretch_.begin() + std::ssize(crossing_));
  return true;
}

// Copies of the stretch, forwards and backwards, for all that was born in what repeats, and for what was born after that with the
// sizes of its likes and lives no longer than they.
void Ring::lay() {
  const std::vector<ItemId>&sorted = repeats_.sorted, &born_before = repeats_.born_before;
  const ItemId from = born_before[cut_], per_stretch = static_cast<ItemId>(stretch_.size());
  offsets_.assign(part_.items.size(), kUnplaced);
  for (std::size_t k = 0; k < crossing_.size(); ++k) offsets_[sorted[crossing_[k]]] = state_[k];
  ItemId like = (born_before[repeats_.begin] - from) % per_stretch;
  if (like < 0) like += per_stretch;
  for (ItemId k = born_before[repeats_.begin]; k < born_before[repeats_.last]; ++k, like = like + 1 < per_stretch ? like + 1 : 0) {
    const Item &item = part_.items[sorted[k]], &other = part_.items[sorted[from + like]];
    if (item.size == other.size && item.last - item.first <= other.last - other.first) offsets_[sorted[k]] = stretch_[like];
  }
  for (const auto& [item, later] : early_likes_) offsets_[item] = offsets_[later];
}

}  // namespace olla
