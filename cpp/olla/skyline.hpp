// Skyline greedy: fill the lowest valley of the skyline with the best item whose lifetime lies inside it; where none does, raise
// the valley to its lower neighbour. Source: best fit for strip packing (Burke, Kendall, Whitwell 2004), here with fixed columns.
#pragma once

#include <functional>

#include "olla/packing.hpp"

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
  void fill(std::span<const ItemId> order);    // all items; rank r is order[r]
  std::int32_t best(const Box& within) const;  // least rank of an item inside, or kNoRank
  void remove(ItemId item);

 private:
  std::int32_t first_slot(std::int32_t leaf) const;
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

// Of every section: the height it is certain to reach, that is its load and the bytes wasted below its skyline.
class SectionReach {
 public:
  explicit SectionReach(std::span<const Bytes> section_load);
  void raise(Section first, Section last, Bytes bytes);
  std::pair<Bytes, Section> highest(Section first, Section last) const;  // and the leftmost section that has it

 private:
  Section num_leaves_;
  std::vector<Bytes> top_, added_;  // of a node: highest below it, its own addition included; that addition
};

enum class Attention : std::uint8_t {
  kNone,      // any item inside the valley
  kCritical,  // one over the section of highest reach, where that section must not be raised any more
  kAlways     // one over the section of highest reach
};

struct SkylineRules {
  Attention attention = Attention::kNone;
  Bytes target = kMaxBytes;  // give up once the height is certain to exceed it; without attention it is not watched
};

class Skyline {
 public:
  explicit Skyline(const Part& part);

  // Places all items; of those the rules allow in a valley, the one standing first in order goes first. order is a permutation.
  // Returns false when it gave up, at the target or because stop, asked every few thousand placements, said so:
  // what was not placed then is at kUnplaced.
  bool place(std::span<const ItemId> order, const SkylineRules& rules, const std::function<bool()>& stop, Packing& packing);

  Section culprit() const { return culprit_; }  // the section certain to exceed the target, or -1

 private:
  struct Valley {
    Bytes height;
    Section first;
    bool operator>(const Valley& other) const { return height != other.height ? height > other.height : first > other.first; }
  };

  std::int32_t choose(Section first, Section last, const SkylineRules& rules) const;
  void put(const Item& item, Section first, Section last);
  Section raise(Section first);
  bool is_current(const Valley& valley) const { return end_[valley.first] != 0 && height_[valley.first] == valley.height; }
  void set_segment(Section before, Section first, Section last, Bytes height);
  Section merge(Section first);

  const Part& part_;
  ItemPool pool_;
  SectionReach reach_;
  Section culprit_ = -1;
  // Segment [first, end_[first]) of the skyline at height_[first]; its left neighbour begins at before_[first].
  std::vector<Section> end_, before_;  // end_ is 0 where no segment begins
  std::vector<Bytes> height_;
  std::vector<Valley> valleys_;  // heap, lowest first; holds segments that are gone as well
};

}  // namespace olla
