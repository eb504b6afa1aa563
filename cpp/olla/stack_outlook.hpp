// Partial packings of stacks, judged by what is still to come.
#pragma once

#include "olla/short_fit.hpp"
#include "olla/stacks.hpp"

namespace olla {

// Knows what is short of room and when, for a capacity; which stacks are alive when the present one has been born; and which rooms
// will follow each other as stacks die in them. By that it says whether and how well a packing of what is alive goes on.
class StackOutlook {
 public:
  using StackId = std::int32_t;
  struct Cell {
    Offset first, last;
    ItemId item;
  };
  static constexpr std::size_t kMaxAlive = 64;  // stacks

  StackOutlook(const Part& part, const Floor& floor, std::vector<Stack> stacks);

  void begin(Bytes capacity);        // above the floor
  StackId first_tight() const;       // the first stack in whose time something is short of room; the last where nothing is
  void look_ahead(StackId present);  // from the birth of this stack to that of the next

  // Whether what is tight until the next birth fits between the cells, which stand by address.
  bool holds(const std::vector<Cell>& cells);
  // Highest where most stacks would find the hole when they die, and most of the rooms that follow each other lie side by side.
  double score(const std::vector<Cell>& cells);

  const std::vector<Stack>& stacks() const { return stacks_; }
  StackId stack_of(ItemId item) const { return stack_of_[item]; }  // -1: short-lived, or on the floor
  const std::vector<StackId>& alive() const { return alive_; }     // by death
  StackId dying() const { return dying_; }                         // the next to die, of those there are already
  const std::vector<Bytes>& gaps() const { return gaps_; }         // holes that what is tight would fill
  StackId room_of(StackId stack, StackId present) const;

 private:
  bool would_hold(const std::vector<Cell>& cells, StackId stack, StackId room);

  const Part& part_;
  const std::vector<Stack> stacks_;
  std::vector<StackId> stack_of_;  // of an item
  std::vector<StackId> deaths_;    // stacks by last death
  std::vector<Section> births_;    // of items of stacks
  std::vector<ItemId> others_;     // what is short-lived and not on the floor
  std::vector<Bytes> load_;        // above the floor
  ShortFit fit_;

  // For a capacity.
  Bytes capacity_ = 0, crumb_ = 0;
  std::vector<std::vector<ItemId>> tight_, last_tight_;  // of a stack: from its birth to the next; around its death
  std::vector<Bytes> gaps_;

  // Of the present stack.
  StackId present_ = 0, dying_ = 0;
  std::vector<StackId> alive_;
  std::vector<std::int32_t> local_;                       // position of a stack there
  std::vector<std::pair<StackId, StackId>> successions_;  // a room, and the stack alive now that dies after what dies there
  std::vector<std::uint64_t> needed_;                     // of the position of a room: positions of rooms to lie beside
};

}  // namespace olla
