// What is short of room while stacks are born and die.
#pragma once

#include "olla/layout/pipelines/stacks.hpp"

namespace olla {

// Scratch and gradients that fit only if the free space lies where they need it: those alive when less than the largest of them
// would be free, at a capacity.
class StackNeeds {
 public:
  using StackId = std::int32_t;

  StackNeeds(const Part& part, const Floor& floor, std::vector<Stack> stacks);

  void begin(Bytes capacity);  // above the floor

  const std::vector<Stack>& stacks() const { return stacks_; }
  const std::vector<StackId>& deaths() const { return deaths_; }  // stacks by last death
  StackId room_of(StackId stack, StackId present) const;
  std::vector<StackId> alive_with(StackId stack) const;

  // For the capacity.
  StackId first_tight() const;  // the first stack in whose time something is short of room; the last where nothing is
  const std::vector<ItemId>& tight(StackId stack) const { return tight_[stack]; }            // from its birth to the next
  const std::vector<ItemId>& last_tight(StackId stack) const { return last_tight_[stack]; }  // around its death
  const std::vector<Bytes>& gaps() const {
    return gaps_;
  }  // ascending: what these would fill, alone or with what dies or is unborn

 private:
  const Part& part_;
  const std::vector<Stack> stacks_;
  std::vector<StackId> deaths_;
  std::vector<Section> births_;  // of items of stacks
  std::vector<ItemId> others_;   // what is short-lived and not on the floor
  std::vector<Bytes> load_;      // above the floor
  std::vector<std::vector<ItemId>> tight_, last_tight_;
  std::vector<Bytes> gaps_;
};

}  // namespace olla
