#include "olla/layout/greedy/item_pool.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <numeric>
#include <tuple>

namespace olla {
namespace {

constexpr std::int32_t kItemsPerLeaf = 4;
constexpr std::size_t kMaxOpen = 80;  // a depth-first walk keeps one node per level aside

}  // namespace

ItemPool::ItemPool(const Part& part)
    : part_(part),
      num_leaves_(static_cast<std::int32_t>(std::bit_ceil(part.items.size() / kItemsPerLeaf + 1))),
      best_(2 * num_leaves_),
      item_(part.items.size()),
      rank_(part.items.size()),
      slot_(part.items.size()) {
  std::iota(item_.begin(), item_.end(), 0);
  sort_into_leaves();
  for (std::size_t slot = 0; slot < item_.size(); ++slot) slot_[item_[slot]] = static_cast<std::int32_t>(slot);
  bound_nodes();
}

std::int32_t ItemPool::first_slot(std::int32_t leaf) const {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(leaf) * std::ssize(item_) / num_leaves_);
}

// Halves the items of every node, by first and by last in turn, level by level.
void ItemPool::sort_into_leaves() {
  const auto by_first = [this](ItemId i) { return std::tuple(part_.items[i].first, part_.items[i].last, i); };
  const auto by_last = [this](ItemId i) { return std::tuple(part_.items[i].last, part_.items[i].first, i); };
  bool use_first = true;
  for (std::int32_t width = num_leaves_; width > 1; width /= 2, use_first = !use_first) {
    for (std::int32_t leaf = 0; leaf < num_leaves_; leaf += width) {
      const auto begin = item_.begin() + first_slot(leaf), end = item_.begin() + first_slot(leaf + width);
      const auto middle = item_.begin() + first_slot(leaf + width / 2);
      if (use_first) {
        std::ranges::nth_element(begin, middle, end, {}, by_first);
      } else {
        std::ranges::nth_element(begin, middle, end, {}, by_last);
      }
    }
  }
}

void ItemPool::bound_nodes() {
  constexpr Section kFar = std::numeric_limits<Section>::max();
  box_.assign(2 * num_leaves_, Box{kFar, -1, kFar, -1});
  for (std::int32_t k = 2 * num_leaves_ - 1; k > 0; --k) {
    Box& box = box_[k];
    const auto include = [&box](const Box& other) {
      box = {std::min(box.min_first, other.min_first), std::max(box.max_first, other.max_first),
             std::min(box.min_last, other.min_last), std::max(box.max_last, other.max_last)};
    };
    if (k < num_leaves_) {
      include(box_[2 * k]);
      include(box_[2 * k + 1]);
      continue;
    }
    for (std::int32_t slot = first_slot(k - num_leaves_); slot < first_slot(k - num_leaves_ + 1); ++slot) {
      const Item& item = part_.items[item_[slot]];
      include({item.first, item.first, item.last, item.last});
    }
  }
}

void ItemPool::fill(std::span<const ItemId> order) {
  if (order.size() < rank_.size()) std::ranges::fill(rank_, kNoRank);
  for (std::size_t r = 0; r < order.size(); ++r) rank_[slot_[order[r]]] = static_cast<std::int32_t>(r);
  for (std::int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
    std::int32_t& best = best_[num_leaves_ + leaf];
    best = kNoRank;
    for (std::int32_t slot = first_slot(leaf); slot < first_slot(leaf + 1); ++slot) best = std::min(best, rank_[slot]);
  }
  for (std::int32_t k = num_leaves_ - 1; k > 0; --k) best_[k] = std::min(best_[2 * k], best_[2 * k + 1]);
}

bool ItemPool::is_inside(std::int32_t slot, const Box& within) const {
  const Item& item = part_.items[item_[slot]];
  return item.first >= within.min_first && item.first <= within.max_first && item.last >= within.min_last &&
         item.last <= within.max_last;
}

bool ItemPool::misses(std::int32_t node, const Box& within) const {
  const Box& box = box_[node];
  return box.max_first < within.min_first || box.min_first > within.max_first || box.max_last < within.min_last ||
         box.min_last > within.max_last;
}

std::int32_t ItemPool::best(const Box& within) const {
  std::array<std::int32_t, kMaxOpen> open;
  std::size_t num_open = 0;
  open[num_open++] = 1;
  std::int32_t best = kNoRank;
  while (num_open > 0) {
    const std::int32_t k = open[--num_open];
    const Box& box = box_[k];
    if (best_[k] >= best || misses(k, within)) continue;
    if (box.min_first >= within.min_first && box.max_first <= within.max_first && box.min_last >= within.min_last &&
        box.max_last <= within.max_last) {
      best = best_[k];
    } else if (k < num_leaves_) {
      const std::int32_t better = best_[2 * k] < best_[2 * k + 1] ? 2 * k : 2 * k + 1;
      open[num_open++] = better ^ 1;
      open[num_open++] = better;
    } else {
      for (std::int32_t slot = first_slot(k - num_leaves_); slot < first_slot(k - num_leaves_ + 1); ++slot) {
        if (rank_[slot] < best && is_inside(slot, within)) best = rank_[slot];
      }
    }
  }
  return best;
}

void ItemPool::Walk::start(const ItemPool& pool, const Box& within) {
  pool_ = &pool;
  within_ = within;
  heap_.clear();
  push(pool.best_[1], 1);
}

void ItemPool::Walk::push(std::int32_t rank, std::int32_t node) {
  if (rank == kNoRank || (node > 0 && pool_->misses(node, within_))) return;
  heap_.emplace_back(rank, node);
  std::ranges::push_heap(heap_, std::greater());
}

std::int32_t ItemPool::Walk::next() {
  while (!heap_.empty()) {
    const auto [rank, node] = heap_.front();
    std::ranges::pop_heap(heap_, std::greater());
    heap_.pop_back();
    if (node == 0) return rank;
    if (node < pool_->num_leaves_) {
      push(pool_->best_[2 * node], 2 * node);
      push(pool_->best_[2 * node + 1], 2 * node + 1);
      continue;
    }
    const std::int32_t leaf = node - pool_->num_leaves_;
    for (std::int32_t slot = pool_->first_slot(leaf); slot < pool_->first_slot(leaf + 1); ++slot) {
      if (pool_->is_inside(slot, within_)) push(pool_->rank_[slot], 0);
    }
  }
  return kNoRank;
}

void ItemPool::remove(ItemId item) {
  const std::int32_t slot = slot_[item];
  const std::int32_t removed = rank_[slot];
  rank_[slot] = kNoRank;
  auto leaf = static_cast<std::int32_t>(static_cast<std::int64_t>(slot) * num_leaves_ / std::ssize(item_));
  while (first_slot(leaf + 1) <= slot) ++leaf;  // the quotient is rounded down
  std::int32_t k = num_leaves_ + leaf;
  if (best_[k] != removed) return;
  best_[k] = *std::min_element(rank_.begin() + first_slot(leaf), rank_.begin() + first_slot(leaf + 1));
  for (k /= 2; k > 0 && best_[k] == removed; k /= 2) best_[k] = std::min(best_[2 * k], best_[2 * k + 1]);
}

}  // namespace olla
