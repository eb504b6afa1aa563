// Stacks along a trail: a hole that wanders through memory, and at each death lies beside what dies.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <unordered_map>

#include "olla/layout/exact/repair.hpp"
#include "olla/layout/pipelines/stack_room.hpp"

namespace olla {

// Where stacks come and go in an order of their own, as the microbatches of interleaved pipelines do, the last scratch buffers of a
// stack fit only beside what dies just then: the hole must lie there at that time, and beside the next stack at the next. A place
// for every size cannot do that.
//
// The order in which rooms get free tells between which two of them the hole has to be at any time. A walk along all these pairs is
// an order of slots in memory: a room has a slot for each time the walk comes by. Then a hole of one size goes from pair to pair,
// from one slot of the room to the other, and each room can be planned by itself. What is short-lived is placed in the end, around
// the stacks.
class StackTrail {
 public:
  // None where there are few stacks, or too many items or stacks alive at once.
  static std::unique_ptr<StackTrail> find(const Part& part, const Floor& floor, std::uint64_t seed);

  // Lowers the packing until its height is at most enough, or the nodes are used up, or stop says so, asked with the present
  // height. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best);

  std::int64_t num_nodes() const { return num_nodes_; }

 private:
  using StackId = StackNeeds::StackId;
  using Room = std::size_t;  // position among the stacks alive at first
  using Slot = std::size_t;  // position in the trail
  struct Turn {              // a room gets free, and a stack is born there
    Room room;
    StackId born;  // -1: none
    Bytes more;    // free than at first, before
  };
  struct Visit {    // of the hole, to the room of a turn: between which slots it comes and goes
    Slot come, go;  // the lower ones
  };
  struct Plan {
    std::vector<Tenancy> tenancies;  // empty: none found so far
    std::size_t num_divisions = 0;   // tried
  };

  StackTrail(const Part& part, const Floor& floor, std::vector<Stack> stacks, std::uint64_t seed);
  void begin(Bytes height, Bytes enough);
  void find_turns(StackId first);
  void attempt(const std::function<bool()>& stop, Packing& best);
  void walk();
  void follow();
  Bytes draw_spare(Bytes free);
  std::size_t plan_rooms(Bytes& spare, const std::function<bool()>& stop);
  Plan* plan(Room room, Bytes spare, const std::function<bool()>& stop);
  std::vector<Tenancy> tenancies_of(Room room) const;
  bool complete(Bytes height, const std::function<bool()>& stop, Packing& best);

  Slot pair(Room a, Room b) const;
  Slot own(Slot lower, Room room) const { return trail_[lower] == room ? lower : lower + 1; }
  Room home() const { return static_cast<Room>(std::ranges::find(alive_, first_) - alive_.begin()); }
  Bytes hole(std::size_t turn) const { return hole_ + turns_[turn].more - least_more_; }

  const Part& part_;
  const Floor floor_;
  StackNeeds needs_;
  StackRoom room_;
  Repair repair_;
  FastRandom random_;
  std::mt19937_64 repair_random_;
  std::vector<ItemId> order_;  // what does not lie on the floor, by birth
  Bytes unit_ = 0;             // of their sizes
  std::int64_t num_nodes_ = 0;

  Bytes height_ = -1;  // to be lowered
  StackId first_ = -1;
  std::vector<StackId> alive_;  // at first
  std::vector<Turn> turns_;
  Bytes least_more_ = 0;       // of turns
  Bytes base_ = 0;             // most bytes of stacks at once, above the floor
  std::vector<Bytes> spares_;  // of a room
  std::unordered_map<std::uint64_t, Plan> plans_;
  std::size_t max_divisions_ = 0;  // of a plan
  int num_stale_ = 0;              // tries with nothing new
  bool is_stale_ = false;
  std::size_t most_planned_ = 0;  // rooms
  std::vector<Bytes> promising_;  // holes with which as many were

  // Of the present try.
  std::vector<Room> trail_;
  std::vector<std::vector<Slot>> slots_;  // of a room
  Slot start_ = 0;                        // the pair where the hole is at first
  std::vector<Visit> visits_;             // of turns
  Bytes hole_ = 0;                        // when it is smallest
  std::vector<Plan*> chosen_;             // of a room
};

}  // namespace olla
