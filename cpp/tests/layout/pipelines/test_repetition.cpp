#include "olla/layout/pipelines/repetition.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

TEST(births_of_microbatches_repeat) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    CHECK(births_repeat(part_of(one_forward_one_backward(30, 1 + seed % 4, seed))));
  }
}

TEST(what_does_not_repeat_often_is_no_repetition) {
  std::vector<Buffer> buffers = random_buffers(400, 300, 50, 2);
  buffers.push_back({-1, 1000, 1});
  CHECK(!births_repeat(part_of(buffers)));
  for (std::int64_t i = 0; i < 200; ++i) buffers.push_back({i, 400 - i, 1 + i % 7});
  CHECK(!births_repeat(part_of(buffers)));
  CHECK(!births_repeat(part_of({{0, 2, 3}, {1, 3, 4}})));
  std::vector<Buffer> few = one_forward_one_backward(3, 1, 0);
  CHECK(!births_repeat(part_of(few)));
}

OLLA_TEST_MAIN
