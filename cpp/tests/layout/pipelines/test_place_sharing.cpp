#include "olla/layout/pipelines/place_sharing.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

// The packing of what is tied, from a stack; unchanged where nothing is.
Packing lowered(const Part& part, Bytes enough, std::int64_t max_nodes) {
  Packing best = stacked(part);
  if (const std::unique_ptr<PlaceSharing> sharing = PlaceSharing::find(part, find_base(part), {})) {
    sharing->lower(enough, max_nodes, [](Bytes) { return false; }, best);
  }
  check_packing(part, best);
  return best;
}

}  // namespace

TEST(pipelines_end_near_their_load_however_many_microbatches_they_have) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    for (const std::int64_t count : {25, 400}) {
      const Part part = part_of(one_forward_one_backward(count, 1 + seed % 4, seed));
      const Bytes enough = part.load + part.load / 25;
      CHECK(lowered(part, enough, 20'000).height <= enough);
    }
  }
}

TEST(any_buffers_with_few_sizes_get_valid_packings) {
  int num_lowered = 0;
  const int num_rounds = test::kSanitized ? 60 : 200;
  for (int round = 0; round < num_rounds; ++round) {
    std::mt19937 random(round);
    std::vector<Buffer> buffers;
    const std::int64_t num_sizes = 1 + random() % 5, longest = 2 + random() % 30, count = 50 + random() % 300;
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t lower = k + random() % 6;
      buffers.push_back(
          {lower, lower + 1 + static_cast<std::int64_t>(random() % longest), 1 + static_cast<Bytes>(random() % num_sizes)});
    }
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      num_lowered += lowered(part, part.load, 5'000).height < stacked(part).height;
    }
  }
  CHECK(4 * num_lowered > num_rounds);
}

TEST(pipelines_with_irregular_begins_and_ends_get_valid_packings) {
  int num_lowered = 0;
  for (std::uint32_t seed = 0; seed < 24; ++seed) {
    std::vector<Buffer> buffers = one_forward_one_backward(40, seed % 4, seed);
    std::mt19937 random(seed);
    for (Buffer& b : buffers) {
      if ((b.upper > 40 && b.lower < 360) || random() % 3 > 0) continue;
      b.size = 1 + static_cast<Bytes>(random() % 40);
      b.upper += random() % 3;
    }
    const Part part = part_of(buffers);
    num_lowered += lowered(part, part.load + part.load / 10, 20'000).height < 2 * part.load;
  }
  CHECK(num_lowered > 12);
}

TEST(what_repeats_nothing_is_not_tied) {
  std::mt19937 random(1);
  std::vector<Buffer> buffers;
  for (Bytes size = 1; size < 200; ++size) {
    const auto lower = static_cast<std::int64_t>(random() % 300);
    buffers.push_back({lower, lower + 40, size});
  }
  const Part part = one_part(buffers);
  CHECK(PlaceSharing::find(part, find_base(part), {}) == nullptr);
}

TEST(a_tie_that_is_stopped_leaves_a_valid_packing) {
  const Part part = part_of(one_forward_one_backward(60, 3, 5));
  for (int most = 0; most < 12; ++most) {
    Packing best = stacked(part);
    int num_questions = 0;
    const std::unique_ptr<PlaceSharing> sharing = PlaceSharing::find(part, find_base(part), {});
    CHECK(sharing != nullptr);
    if (sharing) sharing->lower(part.load, 1'000'000, [&](Bytes) { return ++num_questions > most; }, best);
    check_packing(part, best);
  }
}

TEST(the_same_nodes_give_the_same_packing) {
  const Part part = part_of(one_forward_one_backward(60, 2, 7));
  CHECK_EQ(lowered(part, part.load, 20'000).offsets, lowered(part, part.load, 20'000).offsets);
}

OLLA_TEST_MAIN
