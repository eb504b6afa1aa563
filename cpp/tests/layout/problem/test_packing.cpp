#include "buffers.hpp"
#include "olla/layout/greedy/by_birth.hpp"
#include "olla/layout/problem/packing.hpp"

using namespace olla;

TEST(parts_split_where_no_buffer_crosses) {
  const std::vector<Buffer> buffers = {{0, 2, 1}, {1, 3, 2}, {3, 4, 4}, {3, 5, 8}};
  const std::vector<Part> parts = reduce(buffers, rounded_sizes(buffers, 1));
  CHECK_EQ(parts.size(), 2u);
  CHECK_EQ(parts[0].buffers, {0, 1});
  CHECK_EQ(parts[1].buffers, {2, 3});
  CHECK_EQ(parts[1].load, 12);
  CHECK_EQ(parts[1].num_sections(), 1);  // nothing is born after the death at 4
}

TEST(sections_keep_exactly_the_overlaps) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(20, 30, 5, seed);
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      for (ItemId i = 0; i < part.num_items(); ++i) {
        for (ItemId j = 0; j < i; ++j) {
          const Buffer &a = buffers[part.buffers[i]], &b = buffers[part.buffers[j]];
          const Item &x = part.items[i], &y = part.items[j];
          CHECK_EQ(x.first < y.last && y.first < x.last, a.lower < b.upper && b.lower < a.upper);
        }
      }
    }
  }
}

TEST(long_lived_items_find_the_holes_their_like_have_left) {
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < 300; ++i) {
    buffers.push_back({3 * i, 3 * i + 30, 1 + i % 10});  // ten alive at once, of ten sizes
    buffers.push_back({3 * i + 2, 3 * i + 3, 5});
  }
  const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
  const std::vector<Offset> offsets = fit_by_birth(part, 2);
  Bytes top = 0;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    CHECK_EQ(offsets[i] == kUnplaced, part.items[i].last - part.items[i].first <= 2);
    if (offsets[i] != kUnplaced) top = std::max(top, offsets[i] + part.items[i].size);
  }
  CHECK_EQ(top, 55);
}

OLLA_TEST_MAIN
