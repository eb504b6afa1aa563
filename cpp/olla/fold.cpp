#include "olla/fold.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace olla {
namespace {

constexpr Section kMinRepeats = 4;

std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  return x ^ x >> 29;
}

// The least p with which all values equal those p before them (Knuth, Morris, Pratt).
std::size_t least_period(std::span<const std::uint64_t> values) {
  std::vector<std::size_t> border(values.size() + 1, 0);
  for (std::size_t k = 1, length = 0; k < values.size(); ++k) {
    while (length > 0 && values[k] != values[length]) length = border[length];
    if (values[k] == values[length]) ++length;
    border[k + 1] = length;
  }
  return values.size() - border.back();
}

}  // namespace

Fold::Fold(const Part& part) : part_(&part), sorted_(part.items.size()), born_before_(born_before(part)) {
  std::iota(sorted_.begin(), sorted_.end(), 0);
  std::ranges::sort(sorted_, {}, [&](ItemId i) { return std::tuple(part.items[i].first, part.items[i].size, part.items[i].last, i); });
}

std::optional<Fold> Fold::find(const Part& part) {
  Fold fold(part);
  if (!part.fixed.empty() || !fold.find_period() || !fold.find_stretches() || !fold.shorten()) return std::nullopt;
  return fold;
}

// Of the middle half, and from there as far as it goes.
bool Fold::find_period() {
  const Section num_sections = part_->num_sections();
  std::vector<std::uint64_t> births(num_sections, 0);
  for (const Item& item : part_->items) {
    births[item.first] += mixed(mixed(static_cast<std::uint64_t>(item.size)) + static_cast<std::uint64_t>(item.last - item.first));
  }
  begin_ = num_sections / 4;
  end_ = num_sections - begin_;
  if (end_ - begin_ < 2 * kMinRepeats) return false;
  period_ = static_cast<Section>(least_period(std::span(births).subspan(begin_, end_ - begin_)));
  if (period_ > (end_ - begin_) / kMinRepeats) return false;
  while (begin_ > 0 && births[begin_ - 1] == births[begin_ - 1 + period_]) --begin_;
  while (end_ < num_sections && births[end_] == births[end_ - period_]) ++end_;
  return true;
}

// From where on all that is alive was born in what repeats, or outlives it.
bool Fold::find_stretches() {
  Section longest = 1, old = begin_;
  for (const Item& item : part_->items) {
    if (item.first >= end_) break;
    if (item.first >= begin_) longest = std::max(longest, item.last - item.first);
    if (item.first < begin_ && item.last < (begin_ + end_) / 2) old = std::max(old, item.last);
  }
  length_ = (longest + period_ - 1) / period_ * period_;
  from_ = old + length_;
  if (from_ >= end_ || (end_ - from_) / length_ - 1 < kKept + kMinRepeats) return false;
  removed_ = ((end_ - from_) / length_ - 1 - kKept) * length_;
  return true;
}

bool Fold::shorten() {
  const Section cut = from_ + kKept * length_;
  short_.section_load = part_->section_load;
  short_.section_load.erase(short_.section_load.begin() + cut, short_.section_load.begin() + cut + removed_);
  for (const ItemId i : sorted_) {
    Item item = part_->items[i];
    if (item.first >= cut && item.first < cut + removed_) continue;
    if (item.first >= cut) {
      item.first -= removed_;
      item.last -= removed_;
    } else if (item.last > cut + removed_ && item.first < begin_) {
      item.last -= removed_;  // it outlives what repeats
    } else if (item.last > cut && (item.first < begin_ || item.last > cut + length_)) {
      return false;
    }
    short_.items.push_back(item);
  }
  short_.load = short_.bound = std::ranges::max(short_.section_load);
  short_born_before_ = born_before(short_);
  return short_.items.size() * 2 <= part_->items.size();
}

std::vector<Section> Fold::cuts() const {
  std::vector<ItemId> num_alive(short_.section_load.size() + 1, 0);
  for (const Item& item : short_.items) {
    if (item.last - item.first < 2) continue;  // alive on both sides of the cut
    ++num_alive[item.first + 1];
    --num_alive[item.last];
  }
  std::partial_sum(num_alive.begin(), num_alive.end(), num_alive.begin());
  std::vector<Section> cuts(kKept * length_);
  std::iota(cuts.begin(), cuts.end(), from_);
  std::ranges::stable_sort(cuts, {}, [&](Section cut) { return num_alive[cut]; });
  return cuts;
}

Part Fold::stretch(Section cut, const Packing& packing) const {
  Part part;
  part.section_load.assign(short_.section_load.begin() + cut, short_.section_load.begin() + cut + length_);
  for (ItemId i = 0; i < short_born_before_[cut]; ++i) {
    const Item& item = short_.items[i];
    if (item.last <= cut) continue;
    part.items.push_back({0, std::min(length_, item.last - cut), item.size});
    part.fixed.push_back(packing.offsets[i]);
  }
  for (ItemId i = born_before_[cut]; i < born_before_[cut + length_]; ++i) {
    const Item& item = part_->items[sorted_[i]];
    const bool goes_on = item.last > cut + length_;
    const ItemId like = i - (born_before_[cut + length_] - born_before_[cut]);
    part.items.push_back({item.first - cut, goes_on ? length_ : item.last - cut, item.size});
    part.fixed.push_back(goes_on ? packing.offsets[like] : kUnplaced);
  }
  part.load = std::ranges::max(part.section_load);
  part.bound = part.load;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.is_fixed(i)) part.bound = std::max(part.bound, part.fixed[i] + part.items[i].size);
  }
  return part;
}

Packing Fold::unfold(Section cut, const Packing& packing, const Part& stretch, const Packing& repeated) const {
  const ItemId from = born_before_[cut], per_stretch = born_before_[cut + length_] - from;
  const ItemId num_repeated = removed_ / length_ * per_stretch;
  const ItemId num_crossing = stretch.num_items() - per_stretch;
  Packing whole{std::vector<Offset>(sorted_.size()), std::max(packing.height, repeated.height)};
  for (ItemId k = 0; k < std::ssize(sorted_); ++k) {
    const bool before = k < from, is_repeated = !before && k < from + num_repeated;
    whole.offsets[sorted_[k]] = is_repeated ? repeated.offsets[num_crossing + (k - from) % per_stretch]
                                            : packing.offsets[before ? k : k - num_repeated];
  }
  return whole;
}

}  // namespace olla
