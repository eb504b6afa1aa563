#include "olla/layout/pipelines/long_lived.hpp"
#include "packings.hpp"

using namespace olla;

TEST(what_outlives_nearly_all_is_the_base) {
  // Two weights, one born late where there is room for it before; and a block that lives nearly as long, where there is none.
  const Part part = part_of({{0, 100, 7}, {0, 10, 3}, {0, 9, 15}, {10, 90, 20}, {20, 100, 5}, {95, 100, 20}});
  const LongLivedBase base = find_base(part);
  CHECK_EQ(base.height, 12);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Bytes size = part.items[i].size;
    CHECK_EQ(base.offsets[i], size == 7 ? 0 : size == 5 ? 7 : kUnplaced);
  }
}

TEST(the_rest_above_the_base_has_no_higher_load) {
  int num_bases = 0;
  for (int round = 0; round < 200; ++round) {
    std::mt19937 random(round);
    std::vector<Buffer> buffers;
    for (int k = 0; k < 40; ++k) {
      const auto lower = static_cast<std::int64_t>(random() % 30),
                 length = static_cast<std::int64_t>(1 + random() % (k < 5 ? 90 : 20));
      buffers.push_back({lower, lower + length, 1 + static_cast<Bytes>(random() % 20)});
    }
    const Part part = one_part(buffers);
    const LongLivedBase base = find_base(part);
    std::vector<Bytes> load(part.section_load.size(), 0);
    for (ItemId i = 0; i < part.num_items(); ++i) {
      if (base.offsets[i] != kUnplaced) continue;
      for (Section s = part.items[i].first; s < part.items[i].last; ++s) load[s] += part.items[i].size;
    }
    CHECK(base.height + std::ranges::max(load) <= part.load);
    num_bases += base.height > 0;
  }
  CHECK(num_bases > 100);
}

OLLA_TEST_MAIN
