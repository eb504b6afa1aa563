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
  void fill(std::span<const ItemId> order);                             // all items; rank r is order[r]
  std::int32_t best(const Box& within, std::int32_t after = -1) const;  // least rank above after of an item inside, or kNoRank
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
  Bytes at(Section section) const;
  std::pair<Bytes, Section> highest(Section first, Section last,
                                    Bytes above = -1) const;  // and the leftmost section that has it, -1 if none is above

 private:
  Section num_leaves_;
  std::vector<Bytes> top_, added_;  // of a node: highest below it, its own addition included; that addition
};

struct SkylineRules {
  Bytes target = std::numeric_limits<Bytes>::max();  // give up once the height is certain to exceed it
  int num_looks = 0;  // of the first so many items that fit a valley, take one that walls in no section
};

// With a target, items over the section of the highest reach go first, and foresight can be had: an item put into a valley is a
// wall beside it, and what is still to come and sticks out past the wall must lie above it. A section is walled in when the items
// that do not stick out leave it so far below the wall that it ends above the target. Source: the one-machine bound of scheduling,
// items being jobs and the highest wall an item sticks out past its release time (Carlier 1982).
class Skyline {
 public:
  explicit Skyline(const Part& part);

  // Places all items, in every valley the one inside it that stands first in order, as the rules allow; order is a permutation.
  // Returns false when it gave up, because a section is certain to end above the target or because stop, asked now and then, said
  // so: what was not placed then is at kUnplaced.
  bool place(std::span<const ItemId> order, const SkylineRules& rules, const std::function<bool()>& stop, Packing& packing);

  // After a pass that gave up: stacks what was not placed on top of the rest, by birth. Fast, and far from good. O(n log n).
  void stack_rest(Packing& packing) const;

  Section culprit() const { return culprit_; }  // the section certain to exceed the target, or -1

 private:
  struct Valley {
    Bytes height;
    Section first;
    bool operator>(const Valley& other) const { return height != other.height ? height > other.height : first > other.first; }
  };

  void begin(std::span<const ItemId> order, const SkylineRules& rules, Packing& packing);
  std::int32_t choose(Section first, Section last);
  bool walls_in(ItemId item, Bytes top);
  bool underfills(Section first, Section last, Bytes top);
  void put(const Item& item, Section first, Section last);
  Section raise(Section first);
  bool is_current(const Valley& valley) const { return end_[valley.first] != 0 && height_[valley.first] == valley.height; }
  void set_segment(Section before, Section first, Section last, Bytes height);
  Section merge(Section first);

  const Part& part_;
  ItemPool pool_;
  SectionReach reach_;
  Section culprit_ = -1;
  // Of the current pass.
  std::span<const ItemId> order_;
  SkylineRules rules_;
  bool is_watched_ = false;  // there is a target
  const Offset* offsets_ = nullptr;
  std::int64_t work_ = 0;      // since stop was asked
  std::vector<Bytes> change_;  // scratch of underfills()
  // Segment [first, end_[first]) of the skyline at height_[first]; its left neighbour begins at before_[first].
  std::vector<Section> end_, before_;  // end_ is 0 where no segment begins
  std::vector<Bytes> height_;
  std::vector<ItemId> born_before_;  // of a section: number of items with an earlier first
  std::vector<Valley> valleys_;      // heap, lowest first; holds segments that are gone as well
};

}  // namespace olla
