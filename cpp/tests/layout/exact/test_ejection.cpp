#include "olla/layout/exact/ejection.hpp"
#include "olla/layout/problem/packing.hpp"
#include "packings.hpp"

using namespace olla;

namespace {

const auto kNoStop = [](Bytes) { return false; };

}  // namespace

TEST(the_index_finds_what_is_alive) {
  std::mt19937 random(1);
  for (const std::size_t count : {1, 31, 32, 33, 100, 700}) {
    const Part part = one_part(random_buffers(count, 60, 9, static_cast<std::uint32_t>(count)));
    const AliveIndex index(part);
    for (int query = 0; query < 100; ++query) {
      const auto first = static_cast<Section>(random() % part.num_sections());
      const auto last = static_cast<Section>(first + 1 + random() % (part.num_sections() - first));
      std::vector<ItemId> found, scanned;
      index.each(first, last, [&](ItemId i) { found.push_back(i); });
      for (ItemId i = 0; i < part.num_items(); ++i) {
        if (part.items[i].first < last && first < part.items[i].last) scanned.push_back(i);
      }
      CHECK_EQ(found, scanned);
    }
  }
}

TEST(ejection_lowers_a_stack_to_a_valid_packing) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const Part part = one_part(random_buffers(150, 60, 1000, seed));
    Packing best = stacked(part);
    const Bytes before = best.height;
    Ejection(part, seed).lower(part.load, 2'000'000, kNoStop, best);
    check_packing(part, best);
    CHECK(best.height < before / 2);
  }
}

TEST(ejection_that_is_split_into_calls_finds_the_same) {
  const Part part = one_part(random_buffers(150, 60, 1000, 3));
  Packing whole = stacked(part), split = whole;
  Ejection one(part, 5), other(part, 5);
  one.lower(part.load, 400'000, kNoStop, whole);
  for (int call = 0; call < 60; ++call) other.lower(part.load, 10'000, kNoStop, split);
  check_packing(part, split);
  CHECK(split.height <= whole.height);
}

TEST(ejection_leaves_fixed_items_where_they_are) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    Part part = one_part(random_buffers(80, 60, 100, seed));
    Packing best = stacked(part);
    part.fixed.assign(part.items.size(), kUnplaced);
    for (ItemId i = 0; i < part.num_items(); i += 9) {
      part.fixed[i] = best.offsets[i];
      part.bound = std::max(part.bound, best.offsets[i] + part.items[i].size);
    }
    Ejection(part, seed).lower(part.load, 300'000, kNoStop, best);
    check_packing(part, best);
    for (ItemId i = 0; i < part.num_items(); i += 9) CHECK_EQ(best.offsets[i], part.fixed[i]);
  }
}

TEST(an_item_without_a_place_below_the_target_is_not_lost) {
  // Fixed items of 10 with gaps of 5 between them, and one of 8, which fits above them alone.
  std::vector<Buffer> buffers;
  for (int k = 0; k < 20; ++k) buffers.push_back({0, 100, 10});
  buffers.push_back({40, 60, 8});
  Part part = one_part(buffers);
  Packing best = stacked(part);
  part.fixed.assign(part.items.size(), kUnplaced);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.items[i].size != 10) continue;
    part.fixed[i] = best.offsets[i] = 15 * i;
  }
  best.height = 0;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.items[i].size != 10) best.offsets[i] = 15 * part.num_items() + part.items[i].size;
    best.height = std::max(best.height, best.offsets[i] + part.items[i].size);
  }
  Ejection(part, 0).lower(part.load, 1'000'000, kNoStop, best);
  check_packing(part, best);
  for (const Offset offset : best.offsets) CHECK(offset >= 0);
}

OLLA_TEST_MAIN
