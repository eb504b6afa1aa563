// How the stacks that follow each other in one room lie there, while a hole comes and goes.
#pragma once

#include <functional>
#include <map>

#include "olla/base/hash.hpp"
#include "olla/layout/pipelines/short_fit.hpp"
#include "olla/layout/pipelines/stack_needs.hpp"

namespace olla {

// A stack's time in a room. A room has one slot or more, each of them between slots of other rooms.
struct Tenancy {
  using SlotId = std::int32_t;
  struct Hole {        // at one end of a slot
    SlotId slot = -1;  // -1: none is there
    bool is_low = false;
    Bytes bytes = 0;
  };
  struct Place {
    SlotId slot;
    Bytes at;  // above the lower end of the slot, from which the hole is left out
    ItemId item;
  };
  StackNeeds::StackId stack;
  Hole birth, death;  // where the hole lies when the stack has been born, and when it dies

  // Planned.
  std::vector<Bytes> widths;  // of slots, the hole left out
  std::vector<Place> places;
};

// Plans a room by itself: the hole is as large, and comes and goes where and when it is said to, and around the slots are walls.
// The hole goes from one slot to another where the next stack fills the other slots with other sums of sizes.
class StackRoom {
 public:
  using StackId = StackNeeds::StackId;

  StackRoom(const Part& part, const StackNeeds& needs, std::uint64_t seed);

  // For the present capacity of the needs. What has died when the first stack has been born counts no more.
  void begin(StackId first);

  // Lays out the stacks that follow each other, with so much room unused at any time. Slots are as wide at first as a division of
  // the first stack at random makes them. False where none of so many divisions suits all the stacks.
  bool plan(std::vector<Tenancy>& tenancies, std::size_t num_slots, Bytes spare, std::size_t max_divisions,
            const std::function<bool()>& stop);

  Bytes bytes(StackId stack) const { return bytes_[stack]; }
  std::int64_t num_nodes() const { return num_nodes_; }

 private:
  using SlotId = Tenancy::SlotId;
  struct Choice {  // where what is born last lies, and how much room beside it stays free
    SlotId slot;
    Bytes gap;
    int num_tries = 0;
    bool has_done = false;  // for some division
  };
  // Stacks of the same sizes by birth. The last born is not among the items.
  struct Kind {
    struct Sum {
      Bytes bytes;
      std::uint32_t items;  // a bit for each of the small ones
    };
    std::vector<std::size_t> large, small;  // positions in a stack
    std::vector<Sum> sums;                  // of small ones, ascending
  };

  std::size_t kind_of(const std::vector<ItemId>& items);
  void divide(StackId stack, Bytes spare, std::vector<Bytes>& widths);
  bool pass_on_widths(std::vector<Tenancy>& tenancies, Bytes spare) const;
  bool settle(Tenancy& tenancy, std::vector<Choice>& choices, Bytes spare);
  bool fill(const Tenancy& tenancy, const Choice& choice, Bytes spare);
  bool fill_from(SlotId slot, const Kind& kind, SlotId host, std::uint32_t taken, Bytes spare);
  bool lay(Tenancy& tenancy, Bytes gap);
  void arrange(Tenancy& tenancy, Bytes gap);
  bool fits(const Tenancy& tenancy, const Tenancy::Hole& hole, std::span<const ItemId> tight);

  SlotId host_of(const Tenancy& tenancy) const { return std::max(0, tenancy.birth.slot); }
  Bytes a_gap() { return needs_.gaps()[random_.below(needs_.gaps().size())]; }
  Bytes size_of(ItemId item) const { return part_.items[item].size; }

  const Part& part_;
  const StackNeeds& needs_;
  ShortFit fit_;
  FastRandom random_;
  std::int64_t num_nodes_ = 0, num_fills_ = 0;
  // Of a stack.
  std::vector<std::vector<ItemId>> items_;  // by birth
  std::vector<std::size_t> kinds_of_;       // position in kinds_
  std::vector<Bytes> bytes_;
  std::vector<std::vector<ItemId>> tight_;  // before the last item is there
  std::map<std::vector<Bytes>, std::size_t> kinds_by_sizes_;
  std::vector<Kind> kinds_;
  // Of the stack in hand.
  std::vector<SlotId> slots_;  // of its items
  std::vector<Bytes> left_;    // of slots
  int num_sums_left_ = 0;
  std::vector<std::uint32_t> small_;  // of slots: small items there
};

}  // namespace olla
