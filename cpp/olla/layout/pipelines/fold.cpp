#include "olla/layout/pipelines/fold.hpp"

#include <algorithm>
#include <numeric>

namespace olla {
namespace {

constexpr Section kMinRemoved = 4;  // stretches

}  // namespace

std::optional<Fold> Fold::find(const Part& part, const Repetition& repeats) {
  Fold fold(part, repeats);
  if (!part.fixed.empty() || !fold.find_stretches() || !fold.shorten()) return std::nullopt;
  return fold;
}

bool Fold::find_stretches() {
  length_ = repeats_->length;
  from_ = repeats_->settled + length_;
  const Section end = repeats_->end;
  if (from_ >= end || (end - from_) / length_ - 1 < kKept + kMinRemoved) return false;
  removed_ = ((end - from_) / length_ - 1 - kKept) * length_;
  return true;
}

bool Fold::shorten() {
  const Section cut = from_ + kKept * length_;
  short_.section_load = part_->section_load;
  short_.section_load.erase(short_.section_load.begin() + cut, short_.section_load.begin() + cut + removed_);
  for (const ItemId i : repeats_->sorted) {
    Item item = part_->items[i];
    if (item.first >= cut && item.first < cut + removed_) continue;
    if (item.first >= cut) {
      item.first -= removed_;
      item.last -= removed_;
    } else if (item.last > cut + removed_ && item.first < repeats_->begin) {
      item.last -= removed_;  // it outlives what repeats
    } else if (item.last > cut && (item.first < repeats_->begin || item.last > cut + length_)) {
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
  for (ItemId i = repeats_->born_before[cut]; i < repeats_->born_before[cut + length_]; ++i) {
    const Item& item = part_->items[repeats_->sorted[i]];
    const bool goes_on = item.last > cut + length_;
    const ItemId like = i - (repeats_->born_before[cut + length_] - repeats_->born_before[cut]);
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
  const ItemId from = repeats_->born_before[cut], per_stretch = repeats_->born_before[cut + length_] - from;
  const ItemId num_repeated = removed_ / length_ * per_stretch;
  const ItemId num_crossing = stretch.num_items() - per_stretch;
  Packing whole{std::vector<Offset>(repeats_->sorted.size()), std::max(packing.height, repeated.height)};
  for (ItemId k = 0; k < std::ssize(repeats_->sorted); ++k) {
    const bool before = k < from, is_repeated = !before && k < from + num_repeated;
    whole.offsets[repeats_->sorted[k]] =
        is_repeated ? repeated.offsets[num_crossing + (k - from) % per_stretch] : packing.offsets[before ? k : k - num_repeated];
  }
  return whole;
}

}  // namespace olla
