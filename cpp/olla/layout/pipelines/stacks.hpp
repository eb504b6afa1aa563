// Stacks: items born one after the other that die in the opposite order, as what a microbatch keeps from its forward to its
// backward.
#pragma once

#include "olla/layout/pipelines/floor.hpp"

namespace olla {

struct Stack {
  std::vector<ItemId> items;  // by birth
  Section birth, first_death, last_death;
  std::int32_t room;    // the stack, born earlier, that was the last to die before this one's birth; -1: none
  std::int32_t before;  // the stack that dies just before this one; -1: none
};

// Stacks by birth, of all that does not lie on the floor and is alive in more sections than a short-lived item.
std::vector<Stack> find_stacks(const Part& part, const Floor& floor, Section short_sections);

}  // namespace olla
