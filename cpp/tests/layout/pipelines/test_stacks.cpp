#include "olla/layout/pipelines/stacks.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

std::vector<Stack> stacks_of(const Part& part, Section short_sections) {
  return find_stacks(part, {std::vector<Offset>(part.items.size(), kUnplaced), 0}, short_sections);
}

}  // namespace

TEST(what_dies_in_the_opposite_order_is_a_stack) {
  // Three of two: the second dies first, the third is born after that.
  const Part part = part_of({{0, 40, 5}, {3, 37, 4}, {6, 20, 3}, {9, 17, 2}, {24, 60, 1}, {27, 57, 1}});
  const std::vector<Stack> stacks = stacks_of(part, 0);
  CHECK_EQ(stacks.size(), 3u);
  if (stacks.size() != 3) return;
  const auto sizes = [&](const Stack& stack) {
    std::vector<Bytes> result;
    for (const ItemId i : stack.items) result.push_back(part.items[i].size);
    return result;
  };
  CHECK(sizes(stacks[0]) == std::vector<Bytes>({5, 4}));
  CHECK(sizes(stacks[1]) == std::vector<Bytes>({3, 2}));
  CHECK(sizes(stacks[2]) == std::vector<Bytes>({1, 1}));
  CHECK(stacks[0].room == -1 && stacks[1].room == -1 && stacks[2].room == 1);
  CHECK(stacks[0].before == 1 && stacks[1].before == -1 && stacks[2].before == 0);
}

TEST(every_microbatch_is_a_stack) {
  const Part part = part_of(interleaved(6));
  const std::vector<Stack> stacks = stacks_of(part, 4);
  CHECK_EQ(stacks.size(), 24u);
  for (const Stack& stack : stacks) {
    CHECK_EQ(stack.items.size(), 9u);
    for (std::size_t k = 1; k < stack.items.size(); ++k) {
      const Item &below = part.items[stack.items[k - 1]], &above = part.items[stack.items[k]];
      CHECK(below.first <= above.first && above.last <= below.last);
    }
  }
}

OLLA_TEST_MAIN
