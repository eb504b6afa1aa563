#include "olla/layout/pipelines/repetition.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

TEST(what_is_born_in_a_repetition_has_its_like_a_period_later) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const Part part = part_of(one_forward_one_backward(30, 1 + seed % 4, seed));
    const std::optional<Repetition> found = Repetition::find(part);
    CHECK(found.has_value());
    if (!found) continue;
    const auto& [begin, end, last, settled, period, length, sorted, born_before] = *found;
    CHECK(begin <= settled && settled < end && end <= last && last <= part.num_sections());
    CHECK_EQ(length % period, 0);
    CHECK(end - begin > part.num_sections() / 2);
    const ItemId per_period = born_before[begin + period] - born_before[begin];
    for (ItemId k = born_before[begin]; k < born_before[end - period]; ++k) {
      const Item &item = part.items[sorted[k]], &like = part.items[sorted[k + per_period]];
      CHECK(like.first == item.first + period && like.last == item.last + period && like.size == item.size);
      CHECK(item.last - item.first <= length);
    }
    for (ItemId k = 0; k < born_before[begin]; ++k) {
      const Item& item = part.items[sorted[k]];
      CHECK(item.last <= settled || item.last >= end);
    }
  }
}

TEST(what_does_not_repeat_often_is_no_repetition) {
  std::vector<Buffer> buffers = random_buffers(400, 300, 50, 2);
  buffers.push_back({-1, 1000, 1});
  CHECK(!Repetition::find(part_of(buffers)));
  for (std::int64_t i = 0; i < 200; ++i) buffers.push_back({i, 400 - i, 1 + i % 7});
  CHECK(!Repetition::find(part_of(buffers)));
  CHECK(!Repetition::find(part_of({{0, 2, 3}, {1, 3, 4}})));
}

OLLA_TEST_MAIN
