#include <algorithm>
#include <cmath>

#include "olla/stack_outlook.hpp"
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

struct Case {
  std::vector<StackOutlook::Cell> cells;
  std::size_t hole;  // below the cell of this number, or above the last
};

// All orders of the items of a and b, and all places of the hole.
template <class Visit>
void each_case(const Part& part, const StackOutlook& outlook, const Visit& visit) {
  std::vector<ItemId> order = outlook.stacks()[0].items;
  order.insert(order.end(), outlook.stacks()[1].items.begin(), outlook.stacks()[1].items.end());
  std::ranges::sort(order);
  do {
    for (std::size_t hole = 0; hole <= order.size(); ++hole) {
      Case found{{}, hole};
      Offset at = 0;
      for (std::size_t k = 0; k < order.size(); ++k) {
        at += k == hole;
        found.cells.push_back({at, at + part.items[order[k]].size, order[k]});
        at = found.cells.back().last;
      }
      visit(found);
    }
  } while (std::ranges::next_permutation(order).found);
}

std::size_t position(const Case& c, ItemId item) {
  return static_cast<std::size_t>(std::ranges::find(c.cells, item, &StackOutlook::Cell::item) - c.cells.begin());
}

StackOutlook outlook_of(const Part& part) {
  const Floor floor{std::vector<Offset>(part.items.size(), kUnplaced), 0};
  StackOutlook outlook(part, floor, find_stacks(part, floor, 2));
  outlook.begin(13);
  outlook.look_ahead(1);
  return outlook;
}

}  // namespace

TEST(what_is_tight_fits_only_beside_what_dies) {
  const Part part = three_stacks();
  StackOutlook outlook = outlook_of(part);
  CHECK_EQ(outlook.stacks().size(), 3u);
  CHECK(outlook.alive() == std::vector<StackOutlook::StackId>({0, 1}));
  CHECK_EQ(outlook.dying(), 0);
  int num_cases = 0;
  each_case(part, outlook, [&](const Case& c) {
    const std::size_t dies = position(c, outlook.stacks()[0].items[1]);
    CHECK_EQ(outlook.holds(c.cells), c.hole == dies || c.hole == dies + 1);
    ++num_cases;
  });
  CHECK_EQ(num_cases, 120);
}

TEST(the_hole_may_come_from_the_room_of_what_dies_before) {
  const Part part = three_stacks();
  StackOutlook outlook = outlook_of(part);
  each_case(part, outlook, [&](const Case& c) {
    const std::size_t dies = position(c, outlook.stacks()[1].items[1]);
    const auto is_a = [&](std::size_t k) { return k < c.cells.size() && outlook.stack_of(c.cells[k].item) == 0; };
    const bool finds_it = c.hole == dies || c.hole == dies + 1 || is_a(dies - 1) || is_a(dies + 1);
    // The rooms lie side by side and there is one hole: what else counts, cancels.
    CHECK(std::abs(outlook.score(c.cells) - (finds_it ? 1 : 0)) < 1e-9);
  });
}

OLLA_TEST_MAIN
