#include "olla/layout/pipelines/beam.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

constexpr std::int64_t kNodes = 400'000;

Packing lowered(const Part& part, Bytes enough, std::int64_t max_nodes, std::uint64_t seed = 0) {
  Packing best = by_birth(part);
  Beam(part, find_base(part), seed).lower(enough, max_nodes, [](Bytes) { return false; }, best);
  check_packing(part, best);
  return best;
}

}  // namespace

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

TEST(pipelines_end_near_their_load) {
  double excess = 0, excess_by_birth = 0;
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    const Part part = part_of(one_forward_one_backward(60, 1 + seed % 4, seed));
    const auto excess_of = [&](const Packing& packing) {
      return static_cast<double>(packing.height - part.load) / static_cast<double>(part.load);
    };
    excess += excess_of(lowered(part, part.load + part.load / 50, kNodes)) / 12;
    excess_by_birth += excess_of(by_birth(part)) / 12;
  }
  CHECK(excess < 0.025);
  CHECK(excess_by_birth > 0.1);
}

TEST(any_buffers_get_valid_packings) {
  int num_lowered = 0, num_parts = 0;
  const int num_rounds = test::kSanitized ? 40 : 200;
  for (int round = 0; round < num_rounds; ++round) {
    const std::vector<Buffer> buffers = random_buffers(20 + round % 100, 60, 50, round);
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      if (by_birth(part).height == part.load) continue;
      ++num_parts;
      num_lowered += lowered(part, part.load, 20'000, round).height < by_birth(part).height;
    }
  }
  CHECK(10 * num_lowered > 9 * num_parts);
}

TEST(small_parts_are_packed_as_low_as_they_can_be) {
  int num_best = 0;
  for (int round = 0; round < 100; ++round) {
    const Part part = one_part(random_buffers(7, 8, 9, round));
    const Bytes least = enumerate(part, 0).height, height = lowered(part, least, 50'000).height;
    CHECK(height >= least);
    num_best += height == least;
  }
  CHECK(num_best > 90);
}

TEST(a_beam_that_is_stopped_or_short_of_nodes_goes_on_from_there) {
  const Part part = part_of(one_forward_one_backward(60, 3, 5));
  for (int most = 0; most < 400; most += 40) {
    Packing best = by_birth(part);
    int num_questions = 0;
    Beam beam(part, find_base(part), 0);
    beam.lower(part.load, kNodes, [&](Bytes) { return ++num_questions > most; }, best);
    check_packing(part, best);
  }
  Packing best = by_birth(part);
  Beam beam(part, find_base(part), 0);
  for (int turn = 0; turn < 800; ++turn) {
    const Bytes before = best.height;
    beam.lower(part.load, 500, [](Bytes) { return false; }, best);
    CHECK(best.height <= before);
    check_packing(part, best);
  }
  CHECK(best.height <= part.load + part.load / 20);
}

TEST(the_same_nodes_give_the_same_packing) {
  const Part part = part_of(one_forward_one_backward(60, 2, 7));
  CHECK_EQ(lowered(part, part.load, 50'000).offsets, lowered(part, part.load, 50'000).offsets);
}

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
