#include "olla/layout/pipelines/floor.hpp"
#include "packings.hpp"

using namespace olla;

TEST(what_outlives_nearly_all_lies_on_the_floor) {
  // Two weights, one born late where there is room for it before; and a block that lives nearly as long, where there is none.
  const Part part = part_of({{0, 100, 7}, {0, 10, 3}, {0, 9, 15}, {10, 90, 20}, {20, 100, 5}, {95, 100, 20}});
  const Floor floor = find_floor(part);
  CHECK_EQ(floor.height, 12);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Bytes size = part.items[i].size;
    CHECK_EQ(floor.offsets[i], size == 7 ? 0 : size == 5 ? 7 : kUnplaced);
  }
}

TEST(the_rest_above_the_floor_has_no_higher_load) {
  int num_floors = 0;
  for (int round = 0; round < 200; ++round) {
    std::mt19937 random(round);
    std::vector<Buffer> buffers;
    for (int k = 0; k < 40; ++k) {
      const auto lower = static_cast<std::int64_t>(random() % 30),
                 length = static_cast<std::int64_t>(1 + random() % (k < 5 ? 90 : 20));
      buffers.push_back({lower, lower + length, 1 + static_cast<Bytes>(random() % 20)});
    }
    const Part part = one_part(buffers);
    const Floor floor = find_floor(part);
    std::vector<Bytes> load(part.section_load.size(), 0);
    for (ItemId i = 0; i < part.num_items(); ++i) {
      if (floor.offsets[i] != kUnplaced) continue;
      for (Section s = part.items[i].first; s < part.items[i].last; ++s) load[s] += part.items[i].size;
    }
    CHECK(floor.height + std::ranges::max(load) <= part.load);
    num_floors += floor.height > 0;
  }
  CHECK(num_floors > 100);
}

OLLA_TEST_MAIN
