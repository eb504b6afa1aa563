// Skyline greedy: fill the lowest valley of the skyline with the best item whose lifetime lies inside it; where none does, raise
// the valley to its lower neighbour. Fixed items are built around: what lies below them must end there. Source: best fit for strip
// packing (Burke, Kendall, Whitwell 2004), here with fixed columns.
#pragma once

#include <functional>
#include <queue>

#include "olla/layout/greedy/fixed_items.hpp"

namespace olla {

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

// With a target, items alive in the section of the highest reach go first, and foresight is possible: an item put into a valley
// forms a wall beside it, and items to come that extend past the wall must lie above it. A section is walled in when the items
// that do not extend past leave it so far below the wall that it must end above the target. Source: the one-machine bound of
// scheduling, items being jobs, and the highest wall that an item extends past its release time (Carlier 1982).
class Skyline {
 public:
  explicit Skyline(const Part& part);

  // Places all items, in every valley the one inside it that stands first in order, as the rules allow; order is a permutation of
  // the items that are not fixed.
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
    auto operator<=>(const Valley&) const = default;
  };

  void begin(std::span<const ItemId> order, const SkylineRules& rules, Packing& packing);
  std::int32_t choose(Section first, Section last);
  bool walls_in(ItemId item, Bytes top);
  bool underfills(Section first, Section last, Bytes top);
  void count_fixed(Section first, Section last, Bytes top);
  bool pass_fixed(Section first, Section last);
  void put(const Item& item, Section first, Section last);
  Section raise(Section first);
  bool is_current(const Valley& valley) const { return end_[valley.first] != 0 && height_[valley.first] == valley.height; }
  void set_segment(Section before, Section first, Section last, Bytes height);
  Section merge(Section first);

  const Part& part_;
  ItemPool pool_;
  ItemPool::Walk walk_;
  FixedItems fixed_items_;
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
  std::vector<ItemId> born_before_;                                           // of a section: number of items with an earlier first
  std::priority_queue<Valley, std::vector<Valley>, std::greater<>> valleys_;  // lowest first; also segments that are gone
};

}  // namespace olla
