#include "olla/layout/pipelines/stacks.hpp"

#include <algorithm>

namespace olla {

std::vector<Stack> find_stacks(const Part& part, const Floor& floor, Section short_sections) {
  std::vector<ItemId> by_birth;  // as they stand, even where sections are too coarse to tell
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Item& item = part.items[i];
    if (floor.offsets[i] == kUnplaced && item.last - item.first > short_sections) by_birth.push_back(i);
  }
  std::vector<std::size_t> by_death(by_birth.size()), rank(by_birth.size());
  for (std::size_t k = 0; k < by_death.size(); ++k) by_death[k] = k;
  std::ranges::sort(by_death, [&](std::size_t a, std::size_t b) {
    const Section dies_a = part.items[by_birth[a]].last, dies_b = part.items[by_birth[b]].last;
    return dies_a != dies_b ? dies_a < dies_b : a > b;
  });
  for (std::size_t k = 0; k < by_death.size(); ++k) rank[by_death[k]] = k;

  std::vector<Stack> stacks;
  for (std::size_t k = 0; k < by_birth.size(); ++k) {
    const Item& item = part.items[by_birth[k]];
    if (k == 0 || rank[k] + 1 != rank[k - 1]) stacks.push_back({{}, item.first, item.last, item.last, -1, -1});
    Stack& stack = stacks.back();
    stack.items.push_back(by_birth[k]);
    stack.first_death = std::min(stack.first_death, item.last);
  }
  std::vector<std::int32_t> deaths(stacks.size());
  for (std::size_t k = 0; k < deaths.size(); ++k) deaths[k] = static_cast<std::int32_t>(k);
  std::ranges::stable_sort(deaths, {}, [&](std::int32_t s) { return stacks[s].last_death; });
  std::size_t num_dead = 0;
  for (Stack& stack : stacks) {
    while (num_dead < deaths.size() && stacks[deaths[num_dead]].last_death <= stack.birth) ++num_dead;
    if (num_dead > 0) stack.room = deaths[num_dead - 1];
  }
  for (std::size_t k = 1; k < deaths.size(); ++k) stacks[deaths[k]].before = deaths[k - 1];
  return stacks;
}

}  // namespace olla
