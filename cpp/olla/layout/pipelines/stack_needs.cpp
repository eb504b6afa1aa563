#include "olla/layout/pipelines/stack_needs.hpp"

#include <algorithm>
#include <numeric>

namespace olla {

StackNeeds::StackNeeds(const Part& part, const Floor& floor, std::vector<Stack> stacks)
    : part_(part), stacks_(std::move(stacks)), deaths_(stacks_.size()), load_(part.section_load.size() + 1, 0) {
  std::vector<bool> is_of_stack(part.items.size(), false);
  for (const Stack& stack : stacks_) {
    for (const ItemId i : stack.items) {
      is_of_stack[i] = true;
      births_.push_back(part.items[i].first);
    }
  }
  std::iota(deaths_.begin(), deaths_.end(), 0);
  std::ranges::stable_sort(deaths_, {}, [&](StackId s) { return stacks_[s].last_death; });
  std::ranges::sort(births_);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (floor.offsets[i] != kUnplaced) continue;
    load_[part.items[i].first] += part.items[i].size;
    load_[part.items[i].last] -= part.items[i].size;
    if (!is_of_stack[i]) others_.push_back(i);
  }
  std::partial_sum(load_.begin(), load_.end(), load_.begin());
}

void StackNeeds::begin(Bytes capacity) {
  tight_.assign(stacks_.size(), {});
  last_tight_.assign(stacks_.size(), {});
  gaps_.assign(1, 0);
  Bytes largest = 0;
  for (const ItemId i : others_) largest = std::max(largest, part_.items[i].size);
  for (const ItemId i : others_) {
    const Item& item = part_.items[i];
    const Bytes most = *std::max_element(load_.begin() + item.first, load_.begin() + item.last);
    if (capacity - most >= largest) continue;
    gaps_.push_back(item.size);
    const auto born = std::ranges::upper_bound(stacks_, item.first, {}, &Stack::birth) - stacks_.begin();
    if (born > 0) {
      tight_[born - 1].push_back(i);
      for (const ItemId of_stack : stacks_[born - 1].items) {
        const Item& later = part_.items[of_stack];
        if (later.first > item.first) gaps_.push_back(std::max<Bytes>(0, item.size - later.size));
      }
    }
    auto dead = std::ranges::lower_bound(deaths_, item.last, {}, [&](StackId s) { return stacks_[s].last_death; });
    while (dead != deaths_.end() && stacks_[*dead].birth >= item.first) ++dead;
    if (dead == deaths_.end()) continue;
    const Stack& stack = stacks_[*dead];
    for (const ItemId of_stack : stack.items) {
      const Section death = part_.items[of_stack].last;
      if (death >= item.first && death <= item.last) gaps_.push_back(std::max<Bytes>(0, item.size - part_.items[of_stack].size));
    }
    const auto last_birth = std::ranges::lower_bound(births_, stack.first_death);
    if (last_birth != births_.begin() && item.last > *std::prev(last_birth)) last_tight_[*dead].push_back(i);
  }
  std::ranges::sort(gaps_);
  gaps_.erase(std::ranges::unique(gaps_).begin(), gaps_.end());
}

StackNeeds::StackId StackNeeds::first_tight() const {
  StackId first = 0;
  while (first + 1 < std::ssize(stacks_) && tight_[first].empty()) ++first;
  return first;
}

// The stack in whose room this one will be born, of those born until the present one; -1: none.
StackNeeds::StackId StackNeeds::room_of(StackId stack, StackId present) const {
  while (stack > present) stack = stacks_[stack].room;
  return stack;
}

// When it has just been born, by death.
std::vector<StackNeeds::StackId> StackNeeds::alive_with(StackId stack) const {
  std::vector<StackId> alive;
  std::ranges::copy_if(deaths_, std::back_inserter(alive),
                       [&](StackId s) { return s <= stack && stacks_[s].last_death > stacks_[stack].birth; });
  return alive;
}

}  // namespace olla
