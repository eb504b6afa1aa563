#include "olla/layout/pipelines/short_fit.hpp"
#include "packings.hpp"

using namespace olla;

namespace {

struct Around {
  Offset first, last;
  Section birth, death;
};

constexpr Offset kHeight = 12;

// All offsets of all items, one after the other.
bool fits_anywhere(const Part& part, const std::vector<Around>& around, std::vector<Around>& placed) {
  if (static_cast<std::size_t>(part.num_items()) == placed.size()) return true;
  const Item& item = part.items[placed.size()];
  for (Offset at = 0; at + item.size <= kHeight; ++at) {
    const Around own{at, at + item.size, item.first, item.last};
    const auto collides = [&](const Around& other) {
      return other.first < own.last && own.first < other.last && other.birth < own.death && own.birth < other.death;
    };
    if (std::ranges::any_of(around, collides) || std::ranges::any_of(placed, collides)) continue;
    placed.push_back(own);
    if (fits_anywhere(part, around, placed)) return true;
    placed.pop_back();
  }
  return false;
}

}  // namespace

TEST(what_fits_can_be_placed) {
  std::mt19937 random(1);
  int num_feasible = 0, num_found = 0, num_infeasible = 0;
  for (int round = 0; round < (test::kSanitized ? 500 : 5000); ++round) {
    Part part;
    std::vector<ItemId> items;
    for (ItemId i = 0; i < 3; ++i) {
      const Section first = i == 0 ? 0 : part.items.back().first + static_cast<Section>(random() % 2);
      part.items.push_back({first, first + 1 + static_cast<Section>(random() % 2), 1 + static_cast<Bytes>(random() % 6)});
      items.push_back(i);
    }
    std::vector<Around> around;
    ShortFit fit(part);
    fit.begin();
    Offset at = 0;
    for (int k = 0; k < 2; ++k) {
      const Offset first = at + random() % 4, last = first + 1 + random() % 3;
      around.push_back({first, last, static_cast<Section>(random() % 2) - 1, 1 + static_cast<Section>(random() % 3)});
      fit.add_cell(first, last, around.back().birth, around.back().death);
      at = last;
    }
    fit.add_hole(0, kHeight);
    std::vector<Around> placed;
    const bool is_feasible = fits_anywhere(part, around, placed), is_found = fit.fits(items);
    CHECK(!is_found || is_feasible);
    num_feasible += is_feasible;
    num_infeasible += !is_feasible;
    num_found += is_found;
  }
  CHECK(20 * num_found > 19 * num_feasible);
  CHECK(num_infeasible > 50);
}

TEST(holes_apart_are_filled_apart) {
  Part part;
  part.items = {{0, 2, 4}, {0, 2, 3}};
  const std::vector<ItemId> items = {0, 1};
  ShortFit fit(part);
  for (const Offset second : {3, 2}) {
    fit.begin();
    fit.add_hole(0, 4);
    fit.add_hole(10, 10 + second);
    CHECK_EQ(fit.fits(items), second == 3);
  }
  fit.begin();
  fit.add_hole(0, 7);
  CHECK(fit.fits(items));
}

OLLA_TEST_MAIN
