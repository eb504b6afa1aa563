// The items of a part that are still to be placed, by lifetime and by rank.
#pragma once

#include "olla/layout/problem/packing.hpp"

namespace olla {

inline constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();

// The items not yet placed, as points (first, last) in a k-d tree. O(log n) for a removal; a query looks at few nodes unless many
// lifetimes straddle its corners.
class ItemPool {
 public:
  struct Box {
    Section min_first, max_first, min_last, max_last;  // all inclusive
  };

  explicit ItemPool(const Part& part);
  void fill(std::span<const ItemId> order);    // the item of rank r is order[r]; others are removed
  std::int32_t best(const Box& within) const;  // least rank of an item inside, or kNoRank
  void remove(ItemId item);

  // Ranks of the items inside, from the least upwards, as long as none is removed.
  class Walk {
   public:
    void start(const ItemPool& pool, const Box& within);
    std::int32_t next();  // kNoRank once there are no more

   private:
    using Entry = std::pair<std::int32_t, std::int32_t>;  // rank, and the node it is the least of; 0: of an item
    void push(std::int32_t rank, std::int32_t node);

    const ItemPool* pool_ = nullptr;
    Box within_{};
    std::vector<Entry> heap_;
  };

 private:
  std::int32_t first_slot(std::int32_t leaf) const;
  bool is_inside(std::int32_t slot, const Box& within) const;
  bool misses(std::int32_t node, const Box& within) const;
  void sort_into_leaves();
  void bound_nodes();

  const Part& part_;
  // A complete binary tree: node k has children 2k and 2k + 1, node 1 is the root, leaf j is node num_leaves_ + j.
  std::int32_t num_leaves_;
  std::vector<Box> box_;
  std::vector<std::int32_t> best_;  // least rank below a node
  std::vector<ItemId> item_;        // of a slot; leaf j owns the slots [first_slot(j), first_slot(j + 1))
  std::vector<std::int32_t> rank_;  // of a slot; kNoRank once removed
  std::vector<std::int32_t> slot_;  // of an item
};

}  // namespace olla
