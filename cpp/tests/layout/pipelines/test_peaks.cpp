#include "olla/layout/pipelines/peaks.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

Packing lowered(const Part& part, Bytes enough, std::int64_t max_nodes) {
  Packing best = stacked(part);
  Peaks(part, {}).lower(enough, max_nodes, [](Bytes) { return false; }, best);
  check_packing(part, best);
  return best;
}

// Chunks of three blocks each, all of them alive between times 3 and 16, and something short beside them.
std::vector<Buffer> chunks(std::int64_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Buffer> buffers;
  for (std::int64_t k = 0; k < count; ++k) {
    for (std::int64_t block = 0; block < 3; ++block)
      buffers.push_back({block, 20 - block, 100 + static_cast<Bytes>(random() % 50)});
  }
  for (std::int64_t time = 3; time < 16; ++time) buffers.push_back({time, time + 2, 20});
  for (const std::int64_t time : {0, 1, 18, 19}) buffers.push_back({time, time + 1, 30});
  return buffers;
}

}  // namespace

TEST(blocks_and_what_is_around_them_end_at_the_load) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const Part part = part_of(chunks(4, seed));
    CHECK_EQ(lowered(part, part.load, 100'000).height, part.load);
  }
}

TEST(any_buffers_get_valid_packings) {
  int num_lowered = 0, num_parts = 0;
  for (int round = 0; round < 100; ++round) {
    const std::vector<Buffer> buffers = random_buffers(20 + round % 60, 40, 30, round);
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      ++num_parts;
      num_lowered += lowered(part, part.load, 20'000).height < stacked(part).height;
    }
  }
  CHECK(4 * num_lowered > num_parts);
}

TEST(peaks_that_are_stopped_or_short_of_nodes_leave_a_valid_packing) {
  const Part part = part_of(chunks(6, 1));
  for (int most = 0; most < 12; ++most) {
    Packing best = stacked(part);
    int num_questions = 0;
    Peaks peaks(part, {});
    peaks.lower(part.load, 100'000, [&](Bytes) { return ++num_questions > most; }, best);
    check_packing(part, best);
  }
  Packing best = stacked(part);
  Peaks peaks(part, {});
  for (int turn = 0; turn < 100; ++turn) peaks.lower(part.load, 1, [](Bytes) { return false; }, best);
  CHECK_EQ(best.height, part.load);
}

TEST(what_is_crowded_everywhere_and_makes_no_blocks_is_left_alone) {
  std::vector<Buffer> buffers;
  for (std::int64_t k = 0; k < 30; ++k) buffers.push_back({k, k + 3, 10});
  const Part part = part_of(buffers);
  CHECK_EQ(lowered(part, part.load, 10'000).height, stacked(part).height);
}

OLLA_TEST_MAIN
