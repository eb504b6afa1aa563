#include "olla/layout/greedy/squeaky_wheel.hpp"

#include <algorithm>
#include <cmath>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr int kNumLooks = 16;
constexpr int kNumRounds = 30;  // of an episode, without a better packing

}  // namespace

std::vector<double> item_keys(const Part& part, const KeyWeights& weights) {
  std::vector<double> keys;
  keys.reserve(part.items.size());
  for (const Item& item : part.items) {
    keys.push_back(weights.size * std::log(static_cast<double>(item.size)) + weights.width * std::log(item.last - item.first));
  }
  if (weights.crowd > 0) {
    const SectionReach load(part.section_load);
    for (ItemId i = 0; i < part.num_items(); ++i) {
      const Item& item = part.items[i];
      keys[i] += weights.crowd * std::log(static_cast<double>(load.highest(item.first, item.last).first));
    }
  }
  return keys;
}

std::vector<ItemId> by_key(const Part& part, std::span<const double> keys) {
  std::vector<ItemId> order;
  order.reserve(keys.size());
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (!part.is_fixed(i)) order.push_back(i);
  }
  std::ranges::sort(order, [&](ItemId i, ItemId j) { return keys[i] != keys[j] ? keys[i] > keys[j] : i < j; });
  return order;
}

void SqueakyWheel::find_kinds() {
  const auto look = [&](ItemId i) { return std::pair(part_.items[i].size, part_.items[i].last - part_.items[i].first); };
  kind_.resize(part_.items.size());
  const std::vector<ItemId> alike = sorted_by(part_.items.size(), look);
  std::int32_t kind = 0;
  for (std::size_t k = 0; k < alike.size(); ++k) {
    if (k > 0 && look(alike[k]) != look(alike[k - 1])) ++kind;
    kind_[alike[k]] = kind;
  }
  rise_.resize(kind + 1);
}

void SqueakyWheel::improve(Packing& best, const SqueakyOptions& options, const StopAt& stop) {
  const auto spent = [&] { return best.height <= options.enough || num_placed_ >= options.max_placements || stop(best.height); };
  if (kind_.empty()) find_kinds();
  for (; !spent(); ++episode_) {
    const double stride = 0.05 * std::exp(uniform() * std::log(100.0));
    std::vector<double> keys = item_keys(part_, episode_ < kSkylineKeys.size() ? kSkylineKeys[episode_] : random_weights());
    const double share = episode_ % 2 == 0 ? 1 : ambition_;
    bool improved = false;
    for (int round = 0; round < kNumRounds && !spent(); ++round) {
      const auto lower = static_cast<Bytes>(share * static_cast<double>(best.height - options.enough));
      const SkylineRules rules{best.height - std::max(Bytes{1}, lower), options.use_foresight ? kNumLooks : 0};
      Packing packing;
      num_placed_ += part_.num_items();
      if (skyline_.place(by_key(part_, keys), rules, [&] { return stop(best.height); }, packing)) {
        if (packing.height < best.height) best = std::move(packing);
        improved = true;
        round = 0;
      } else {
        raise_keys(packing, stride, episode_ % 2 == 1, keys);
      }
    }
    if (share < 1 && !improved) ambition_ /= 2;
  }
}

KeyWeights SqueakyWheel::random_weights() {
  const double size = 2 * uniform(), width = 2 * uniform();
  return {size, width, std::max(0.0, 16 * uniform() - 8)};
}

void SqueakyWheel::raise_keys(const Packing& packing, double stride, bool all_alike, std::vector<double>& keys) {
  const Section culprit = skyline_.culprit();
  if (all_alike) std::ranges::fill(rise_, 0);
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    const Item& item = part_.items[i];
    const bool late = packing.offsets[i] == kUnplaced && item.first <= culprit && culprit < item.last;
    if (!late) continue;
    double& rise = all_alike ? rise_[kind_[i]] : keys[i];
    if (!all_alike || rise == 0) rise += stride * uniform();
  }
  if (!all_alike) return;
  for (ItemId i = 0; i < part_.num_items(); ++i) keys[i] += rise_[kind_[i]];
}

}  // namespace olla
