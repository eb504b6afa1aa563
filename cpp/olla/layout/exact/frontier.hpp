// The items a partial packing has not placed yet, and what is known of where they can go. The exact search works on it.
#pragma once

#include "olla/layout/problem/packing.hpp"

namespace olla {

// A height or size in units of the search: 32 bits, as many are handled at once.
using Level = std::int32_t;
inline constexpr Level kMaxLevel = 1 << 28;             // no capacity is above it
inline constexpr Level kNoLevel = 4 * (kMaxLevel - 1);  // none is as high as this, nor is a sum of two capacities

struct ExactRules {          // each of them prunes or reorders: answers do not depend on them
  bool use_machine = true;   // the one-machine bound of every section; else only its load
  bool use_table = true;     // failed states are remembered
  bool use_split = true;     // groups of open items that no lifetime joins are solved one by one
  bool use_twins = true;     // equal items are interchangeable
  bool use_tightest = true;  // branch where the fewest items can come next; else always at the lowest offset
};

// base: the highest top below the item. release: a lower bound on its offset. A postponed item is known not to lie at the release
// it had then; it will rest on an item that is still open, and cannot be placed before that.
struct Open {
  Level base, release, size;
  Section first, last;
  ItemId item;
  bool postponed;
};

// Two hash sums over shape and base of every open item, which determine the packings that complete a group.
struct StateHash {
  std::uint64_t slot = 0, check = 0;
  bool operator==(const StateHash&) const = default;
};

// Open items connected by overlapping lifetimes, at [begin, end) of the stack by first section.
struct Group {
  std::int32_t begin, end;
  std::int32_t limit;  // the stack is free from there on
  Section first, last;
  Section raised_first, raised_last;  // sections where releases rose when the group came about
  StateHash hash;
};

// Stack of groups. Placing an item at its release copies the rest of its group to the end of the stack, so that nothing has to be
// undone. Every item rests on the floor, on another item or on a fixed one: a packing pushed down is a packing.
class Frontier {
 public:
  // Fixed items stay.
  Frontier(const Part& part, const ExactRules& rules);

  // All free items, with nothing placed, sizes rounded up to the unit. False when they cannot fit.
  bool start(Level capacity, Bytes unit, Group& all);

  // The groups that are left after item x of the group (a position) went to its release; false when one of them cannot fit. Every
  // item that overlaps x must end above that release at the earliest. O(items in the group + their widths).
  bool place(const Group& group, std::int32_t x, std::vector<Group>& rest);

  // No packing has x at its release, nor its twins: they rest on something else. False when the group cannot fit.
  bool postpone(const Group& group, std::int32_t x);

  // Raises the postponed items to the lowest top they can rest on. False when the group cannot fit.
  bool settle(const Group& group);

  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  const Open& open(std::int32_t x) const { return open_[x]; }
  static bool meet(const Open& a, const Open& b) { return a.first < b.last && b.first < a.last; }

  std::span<const std::int32_t> by_release(const Group& g) const { return {order_.data() + g.begin, order_.data() + g.end}; }
  std::span<const ItemId> free_items() const { return free_; }
  Section culprit() const { return culprit_; }  // where the last bound that failed did so, or -1

  struct FixedLife {
    Section first, last;
    Level offset, size;
  };
  std::span<const FixedLife> fixed_lives() const { return fixed_lives_; }
  // Fixed lives as jobs: takes those released at or after release from the end of what is left, adds them to the sections of work.
  static void add_fixed(std::span<const FixedLife>& left, Level release, Section first, Section last, std::vector<Level>& work);

 private:
  struct Window {
    Level begin, end;  // starts that keep clear of fixed items, both inclusive
  };

  void find_windows();
  Level fit(ItemId item, Level above) const;          // lowest start at or above
  Level next_window(ItemId item, Level above) const;  // lowest start above it that rests on a fixed item
  StateHash hash(const Open& open) const;
  void sort(const Group& group);
  void deal(const Group& group, std::int32_t x, std::int32_t base, std::span<Group> rest);
  bool overfull(const Group& group, Section first, Section last);
  Level raised_release(const Open& open, Level rest, bool& on_fixed) const;
  void reserve(std::size_t size);

  const Part& part_;
  const ExactRules rules_;
  std::vector<ItemId> free_;
  std::vector<std::int32_t> shape_;     // of an item; the same for items of equal lifetime and size
  std::vector<FixedLife> fixed_lives_;  // by offset
  Csr<Window> windows_;                 // of shape k, rising; the last has no end. None where nothing is fixed
  Level capacity_ = 0;
  Section culprit_ = -1;
  // The stack: open items, per group their positions by release, and per position the group it is dealt to and whether it rose.
  std::vector<Open> open_;
  std::vector<std::int32_t> order_, group_of_;
  std::vector<char> rose_;
  // Scratch.
  std::vector<Level> work_;
  std::vector<std::int32_t> risen_, calm_, cursor_;
  std::vector<std::pair<std::int32_t, Level>> pending_;
};

}  // namespace olla
