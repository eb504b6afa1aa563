#include "olla/layout/pipelines/place_sharing.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <unordered_map>

#include "olla/base/hash.hpp"

namespace olla {
namespace {

constexpr std::size_t kMaxPlaces = 800, kMaxSections = 2000;
constexpr std::array<Section, 4> kShortSections{4, 2, 8, 16};
constexpr Bytes kMaxExcess = 50;  // the load of the places may be above that of the items by one in so many

// Two sums over what is alive.
struct Signature {
  std::uint64_t first = 0, second = 0;
  auto operator<=>(const Signature&) const = default;

  void change(std::int32_t place, bool is_born) {
    const std::uint64_t a = mixed(2 * static_cast<std::uint64_t>(place) + 1), b = mixed(a + 1);
    first += is_born ? a : -a;
    second += is_born ? b : -b;
  }
};

}  // namespace

std::unique_ptr<PlaceSharing> PlaceSharing::find(const Part& part, const LongLivedBase& base, const LadderOptions& options) {
  if (!part.fixed.empty()) return nullptr;
  std::unique_ptr<PlaceSharing> sharing(new PlaceSharing(part, base));
  for (const Section short_sections : kShortSections) {
    if (!sharing->assign(short_sections) || !sharing->merge()) continue;
    if (sharing->base_.height + sharing->shared_.load > part.load + part.load / kMaxExcess) continue;
    sharing->ladder_ = std::make_unique<Ladder>(sharing->shared_, options);
    return sharing;
  }
  return nullptr;
}

PlaceSharing::Place PlaceSharing::take_place(std::vector<Place>& alike, const Item& item) {
  Place best = -1;
  for (const Place place : alike) {
    if (free_at_[place] > item.first || size_[place] != item.size) continue;
    if (best < 0 || free_at_[place] > free_at_[best]) best = place;
  }
  if (best < 0) {
    best = static_cast<Place>(size_.size());
    alike.push_back(best);
    size_.push_back(item.size);
    free_at_.push_back(0);
  }
  free_at_[best] = item.last;
  return best;
}

// False where there are too many places.
bool PlaceSharing::assign(Section short_sections) {
  place_of_.assign(part_.items.size(), -1);
  size_.clear();
  free_at_.clear();
  std::unordered_map<std::uint64_t, std::vector<Place>> alike;
  std::vector<std::uint64_t> taken(part_.section_load.size() + 1, 0);  // a sum over the places taken for long
  const auto is_short = [&](const Item& item) { return item.last - item.first <= short_sections; };
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    const Item& item = part_.items[i];
    if (base_.offsets[i] != kUnplaced || is_short(item)) continue;
    place_of_[i] = take_place(alike[mixed(static_cast<std::uint64_t>(item.size))], item);
    if (size_.size() > kMaxPlaces) return false;
    taken[item.first] += mixed(static_cast<std::uint64_t>(place_of_[i]) + 1);
    taken[item.last] -= mixed(static_cast<std::uint64_t>(place_of_[i]) + 1);
  }
  std::partial_sum(taken.begin(), taken.end(), taken.begin());
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    const Item& item = part_.items[i];
    if (base_.offsets[i] != kUnplaced || !is_short(item)) continue;
    std::uint64_t key = mixed(static_cast<std::uint64_t>(item.size)) + 1;
    for (Section s = std::max(0, item.first - 1); s < item.last; ++s) key = mixed(key + taken[s]);
    place_of_[i] = take_place(alike[key], item);
    if (size_.size() > kMaxPlaces) return false;
  }
  return 2 * std::ssize(size_) <= part_.num_items();
}

// The part whose items are the places: sections where the same of them are taken are one. False where there are too many.
bool PlaceSharing::merge() {
  shared_ = {};
  places_.clear();
  std::vector<std::vector<Stretch>> lifetimes(size_.size());
  std::set<Signature> known;
  std::vector<ItemId> alive;
  Signature signature;
  for (ItemId next = 0, s = 0; s < part_.num_sections(); ++s) {
    std::erase_if(alive, [&](ItemId i) {
      if (part_.items[i].last > s) return false;
      signature.change(place_of_[i], false);
      return true;
    });
    for (; next < part_.num_items() && part_.items[next].first == s; ++next) {
      if (base_.offsets[next] != kUnplaced) continue;
      alive.push_back(next);
      signature.change(place_of_[next], true);
    }
    if (alive.empty() || !known.insert(signature).second) continue;
    if (known.size() > kMaxSections) return false;
    const Section section = shared_.num_sections();
    shared_.section_load.push_back(0);
    for (const ItemId i : alive) {
      const Place place = place_of_[i];
      std::vector<Stretch>& own = lifetimes[place];
      shared_.section_load.back() += size_[place];
      if (own.empty()) places_.push_back(place);
      if (own.empty() || own.back().last < section) own.push_back({section, section});
      ++own.back().last;
    }
  }
  if (places_.empty()) return false;
  for (const Place place : places_) {
    const std::vector<Stretch>& own = lifetimes[place];
    shared_.items.push_back({own[0].first, own[0].last, size_[place]});
    shared_.later_lives.emplace_back(own.begin() + 1, own.end());
  }
  shared_.load = shared_.bound = std::ranges::max(shared_.section_load);
  return true;
}

void PlaceSharing::lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best) {
  const Bytes before = packing_.height = best.height - base_.height;
  const auto asked = [&](Bytes height) { return stop(std::min(best.height, base_.height + height)); };
  const Bytes enough_above = std::max<Bytes>(0, enough - base_.height);
  ladder_->lower(enough_above, max_nodes, asked, packing_);
  if (packing_.height < before) expand(best);
}

void PlaceSharing::expand(Packing& best) const {
  std::vector<Offset> offset_of(size_.size(), 0);
  for (std::size_t k = 0; k < places_.size(); ++k) offset_of[places_[k]] = base_.height + packing_.offsets[k];
  best.offsets = base_.offsets;
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (best.offsets[i] == kUnplaced) best.offsets[i] = offset_of[place_of_[i]];
  }
  best.height = height_of(part_, best.offsets);
}

}  // namespace olla
