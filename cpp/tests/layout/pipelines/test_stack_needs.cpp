#include "olla/layout/pipelines/stack_needs.hpp"
#include "packings.hpp"

using namespace olla;

namespace {

// Stacks a and b of two items each; c is born where a was. Of 13 bytes one is free: when the last item of a dies, and later when
// that of b does, a buffer of three must fit beside it. Single bytes that come and go tell the times apart.
Part three_stacks() {
  std::vector<Buffer> buffers{{0, 20, 4},  {1, 10, 2},  {2, 30, 4},  {3, 25, 2},  // a, b
                              {10, 12, 3}, {21, 40, 4}, {22, 35, 2}, {25, 27, 3}};
  for (std::int64_t t = 0; t < 45; ++t) {
    if (t / 2 != 5 && t != 25 && t != 26) buffers.push_back({t, t + 1, 1});
  }
  return part_of(buffers);
}

}  // namespace

TEST(what_is_tight_is_found_where_stacks_are_born_and_die) {
  const Part part = three_stacks();
  const Floor floor{std::vector<Offset>(part.items.size(), kUnplaced), 0};
  StackNeeds needs(part, floor, find_stacks(part, floor, 2));
  CHECK_EQ(needs.stacks().size(), 3u);
  CHECK(needs.deaths() == std::vector<StackNeeds::StackId>({0, 1, 2}));
  CHECK(needs.alive_with(1) == std::vector<StackNeeds::StackId>({0, 1}));
  CHECK(needs.alive_with(2) == std::vector<StackNeeds::StackId>({1, 2}));
  CHECK_EQ(needs.room_of(2, 1), 0);
  CHECK_EQ(needs.room_of(2, 2), 2);

  needs.begin(13);
  const auto has_size = [&](const std::vector<ItemId>& items, Bytes size) {
    return std::ranges::any_of(items, [&](ItemId i) { return part.items[i].size == size; });
  };
  CHECK(has_size(needs.tight(1), 3));  // as a dies
  CHECK(has_size(needs.last_tight(0), 3));
  CHECK(has_size(needs.tight(2), 3));  // as b does
  CHECK(has_size(needs.last_tight(1), 3));
  CHECK(!has_size(needs.last_tight(2), 3));
  CHECK(std::ranges::is_sorted(needs.gaps()));
  CHECK(std::ranges::find(needs.gaps(), 1) != needs.gaps().end());  // beside the last item of two

  needs.begin(100);
  for (StackNeeds::StackId s = 0; s < 3; ++s) CHECK(needs.tight(s).empty() && needs.last_tight(s).empty());
  CHECK_EQ(needs.first_tight(), 2);
  CHECK(needs.gaps() == std::vector<Bytes>({0}));
}

OLLA_TEST_MAIN
