#include "olla/layout/exact/repair.hpp"
#include "packings.hpp"

using namespace olla;

namespace {

bool together(const Item& a, const Item& b) { return a.first < b.last && b.first < a.last; }

}  // namespace

TEST(free_items_find_places_below_the_target_and_the_others_stay) {
  std::mt19937_64 random(1);
  int num_fits = 0, num_never = 0;
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const Part part = one_part(random_buffers(60, 40, 100, seed));
    std::vector<Offset> offsets;
    for (Bytes top = 0; const Item& item : part.items) offsets.push_back((top += item.size) - item.size);
    Repair repair(part);
    for (int round = 0; round < 20; ++round) {
      std::vector<ItemId> free;
      for (ItemId i = 0; i < part.num_items(); ++i) {
        if (random() % 4 == 0) free.push_back(i);
        if (random() % 50 == 0) offsets[i] = kUnplaced;  // not there, unless free
      }
      if (free.empty()) continue;
      const std::vector<Offset> before = offsets;
      const Bytes target = part.load + static_cast<Bytes>(random() % (2 * part.load));
      const Fit fit = repair.place(free, target, {2000, [] { return false; }}, random(), offsets);
      (fit == Fit::kFits ? num_fits : num_never) += 1;
      for (ItemId i = 0; i < part.num_items(); ++i) {
        const bool is_free = std::ranges::find(free, i) != free.end();
        if (fit != Fit::kFits || !is_free) {
          CHECK_EQ(offsets[i], before[i]);
          continue;
        }
        CHECK(offsets[i] >= 0 && offsets[i] + part.items[i].size <= target);
        for (ItemId j = 0; j < part.num_items(); ++j) {
          if (j == i || offsets[j] == kUnplaced || !together(part.items[i], part.items[j])) continue;
          CHECK(offsets[i] + part.items[i].size <= offsets[j] || offsets[j] + part.items[j].size <= offsets[i]);
        }
      }
    }
  }
  CHECK(num_fits > 100 && num_never > 10);
}

OLLA_TEST_MAIN
