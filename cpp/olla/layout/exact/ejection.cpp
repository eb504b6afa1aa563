#include "olla/layout/exact/ejection.hpp"

#include <cmath>

namespace olla {
namespace {

constexpr double kFirstAmbition = 0.3, kMaxAmbition = 0.5, kMinAmbition = 1e-3;
constexpr double kAreaPower = 1.25;  // a large item is harder to place than small ones of its area
constexpr int kPatience = 3000;      // items placed since the pool was smallest
constexpr int kQuestion = 16;        // items placed between two looks at the clock

}  // namespace

Ejection::Ejection(const Part& part, std::uint64_t seed) : part_(part), alive_(part), random_(seed), ambition_(kFirstAmbition) {
  for (const Item& item : part.items) {
    area_.push_back(std::pow(static_cast<double>(item.size) * (item.last - item.first), kAreaPower));
  }
}

void Ejection::lower(Bytes enough, std::int64_t max_work, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_work_ + max_work;
  enough = std::max(enough, part_.bound);
  while (best.height > enough && num_work_ < end && !asked()) {
    if (target_ >= best.height || patience_ == 0) aim(best, enough);
    if (reach(end, asked)) {
      best.offsets = offsets_;
      best.height = height_of(part_, offsets_);
      ambition_ = std::min(kMaxAmbition, 1.1 * ambition_);
    } else if (patience_ == 0) {
      ambition_ = std::max(kMinAmbition, ambition_ / 2);
    }
  }
}

// A new target, from the best packing.
void Ejection::aim(const Packing& best, Bytes enough) {
  const auto share = static_cast<Bytes>(ambition_ * static_cast<double>(best.height - enough));
  target_ = best.height - std::max<Bytes>(1, share);
  offsets_ = best.offsets;
  num_work_ += part_.num_items();
  times_.assign(part_.items.size(), 1);
  pool_.clear();
  pool_area_ = 0;
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (offsets_[i] + part_.items[i].size > target_) eject(i);
  }
  least_area_ = std::numeric_limits<double>::infinity();
  patience_ = kPatience;
}

void Ejection::eject(ItemId item) {
  offsets_[item] = kUnplaced;
  pool_.push_back(item);
  pool_area_ += area_[item];
}

// Whether all of the pool found a place.
bool Ejection::reach(std::int64_t end, const std::function<bool()>& stop) {
  while (!pool_.empty()) {
    if (num_work_ >= end || (patience_ % kQuestion == 0 && stop())) return false;
    if (!put(take())) {
      patience_ = 0;
      return false;
    }
    --patience_;
    if (pool_area_ < least_area_) {
      least_area_ = pool_area_;
      patience_ = kPatience;
    }
    if (patience_ == 0) return false;
  }
  return true;
}

ItemId Ejection::take() {
  std::swap(pool_[random_() % pool_.size()], pool_.back());
  const ItemId item = pool_.back();
  pool_.pop_back();
  pool_area_ = pool_.empty() ? 0 : pool_area_ - area_[item];
  return item;
}

bool Ejection::put(ItemId item) {
  const Bytes size = part_.items[item].size;
  Cost cost;
  const Offset offset = cheapest(item, cost);
  if (cost.num_fixed > 0 || offset > target_ - size) return false;
  if (cost.num_items > 0) {
    for (const ItemId other : near_) {
      if (offsets_[other] < offset + size && offset < offsets_[other] + part_.items[other].size) eject(other);
    }
  }
  offsets_[item] = offset;
  ++times_[item];
  return true;
}

void Ejection::Cost::add(const Step& step) {
  const int sign = step.is_in_way ? 1 : -1;
  num_items += sign;
  if (step.is_fixed) num_fixed += sign;
  area += sign * step.area;
}

// What was placed often is worth more: else two items would displace each other for ever.
Ejection::Step Ejection::step(ItemId item, Offset at, bool is_in_way) const {
  const bool is_fixed = part_.is_fixed(item);
  return {at, is_fixed ? 0 : times_[item] * area_[item], is_in_way, is_fixed};
}

// The offset, on the floor or on another item, where the items in the way cost least; one of those at random.
Offset Ejection::cheapest(ItemId item, Cost& least) {
  const auto [first, last, size] = part_.items[item];
  near_.clear();
  steps_.clear();
  Cost cost;
  alive_.each(first, last, [&](ItemId other) {
    const Offset offset = offsets_[other];
    if (offset == kUnplaced) return;
    near_.push_back(other);
    if (offset < size) {
      cost.add(step(other, 0, true));
    } else if (offset < target_) {
      steps_.push_back(step(other, offset - size + 1, true));
    }
    if (const Offset end = offset + part_.items[other].size; end <= target_ - size) steps_.push_back(step(other, end, false));
  });
  num_work_ += std::ssize(near_);
  sort_steps();
  least = cost;
  Offset where = 0;
  std::uint64_t num_ties = 1;
  for (std::size_t k = 0; k < steps_.size();) {
    const Offset at = steps_[k].at;
    bool is_top = false;
    for (; k < steps_.size() && steps_[k].at == at; ++k) {
      is_top = is_top || !steps_[k].is_in_way;
      cost.add(steps_[k]);
    }
    if (!is_top || cost.key() > least.key()) continue;
    num_ties = cost.key() < least.key() ? 1 : num_ties + 1;
    if (num_ties == 1 || random_() % num_ties == 0) where = at;
    least = cost;
  }
  return where;
}

// Into about as many buckets of offsets as there are steps, which lie about evenly; then every bucket.
void Ejection::sort_steps() {
  const auto width = static_cast<std::uint64_t>(target_) / (steps_.size() + 1) + 1;
  const auto bucket = [shift = std::bit_width(width - 1)](const Step& s) { return static_cast<std::size_t>(s.at >> shift); };
  bucket_.assign(steps_.size() + 3, 0);
  for (const Step& s : steps_) ++bucket_[bucket(s) + 1];
  for (std::size_t k = 1; k < bucket_.size(); ++k) bucket_[k] += bucket_[k - 1];
  sorted_.resize(steps_.size());
  for (const Step& s : steps_) sorted_[bucket_[bucket(s)]++] = s;
  std::swap(steps_, sorted_);
  std::size_t begin = 0;
  for (std::size_t k = 0; begin < steps_.size(); ++k) {
    const auto end = static_cast<std::size_t>(bucket_[k]);
    std::ranges::sort(steps_.begin() + static_cast<std::ptrdiff_t>(begin), steps_.begin() + static_cast<std::ptrdiff_t>(end), {},
                      &Step::at);
    begin = end;
  }
}

}  // namespace olla
