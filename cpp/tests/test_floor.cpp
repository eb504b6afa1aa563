#include "olla/floor.hpp"
#include "packings.hpp"

using namespace olla;

TEST(what_outlives_nearly_all_lies_on_the_floor) {
  // Two weights, one of them born late where there is room for it before; a block that lives as long but would add to the load.
  const std::vector<Buffer> buffers = {{0, 100, 7}, {20, 100, 5}, {0, 10, 10}, {10, 90, 20}, {0, 9, 20}, {95, 100, 20}};
  const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
  const Floor floor = find_floor(part);
  Bytes height = 0;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Bytes size = part.items[i].size;
    if (size == 7) CHECK_EQ(floor.offsets[i], 0);
    if (size == 10) CHECK_EQ(floor.offsets[i], kUnplaced);
    if (floor.offsets[i] != kUnplaced) {
      CHECK_EQ(floor.offsets[i], height);
      height += size;
    }
  }
  CHECK_EQ(floor.height, height);
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
