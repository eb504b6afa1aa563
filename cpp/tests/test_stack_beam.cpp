#include "olla/stack_beam.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

TEST(a_hole_finds_its_way_to_every_stack) {
  const Part part = part_of(interleaved(test::kSanitized ? 3 : 8));
  const std::unique_ptr<StackBeam> beam = StackBeam::find(part, find_floor(part), 1);
  CHECK(beam != nullptr);
  if (!beam) return;
  Packing best = by_birth(part);
  const Bytes before = part.load + 60;
  CHECK(best.height > before);
  best.height = before;  // no more is asked for at first
  beam->lower(part.load, test::kSanitized ? 200'000 : 2'000'000, [&](Bytes height) { return height < before; }, best);
  if (best.height < before) check_packing(part, best);
  CHECK(best.height <= part.load + 45 || test::kSanitized);  // it takes a while
}

TEST(pipelines_get_valid_packings) {
  int num_found = 0, num_lowered = 0;
  for (std::uint32_t seed = 0; seed < 16; ++seed) {
    const Part part = part_of(one_forward_one_backward(16, 1 + seed % 4, seed));
    const std::unique_ptr<StackBeam> beam = StackBeam::find(part, find_floor(part), seed);
    if (!beam) continue;
    ++num_found;
    Packing best = by_birth(part);
    const Bytes before = best.height;
    beam->lower(part.load, 100'000, [](Bytes) { return false; }, best);
    check_packing(part, best);
    num_lowered += best.height < before;
  }
  CHECK(num_found > 3);
  CHECK(2 * num_lowered > num_found);
}

TEST(a_beam_that_is_stopped_leaves_the_packing) {
  const Part part = part_of(interleaved(3));
  const std::unique_ptr<StackBeam> beam = StackBeam::find(part, find_floor(part), 1);
  const Packing before = by_birth(part);
  Packing best = before;
  int num_asked = 0;
  beam->lower(part.load, 1'000'000, [&](Bytes height) { return height != before.height || ++num_asked > 5; }, best);
  CHECK(best.offsets == before.offsets);
  CHECK_EQ(num_asked, 6);
}

TEST(where_nothing_goes_on_the_effort_ends) {
  // A microbatch is born as another dies, item by item: there is never room for the whole of both.
  std::vector<Buffer> buffers;
  for (std::int64_t batch = 0; batch < 20; ++batch) {
    for (std::int64_t k = 0; k < 4; ++k) {
      const std::int64_t birth = 20 * batch + 4 * k;
      buffers.push_back({birth, 20 * batch + 71 - 4 * k, 10 + k});
      buffers.push_back({birth, birth + 2, 5});
    }
  }
  const Part part = part_of(buffers);
  const std::unique_ptr<StackBeam> beam = StackBeam::find(part, {std::vector<Offset>(part.items.size(), kUnplaced), 0}, 1);
  CHECK(beam != nullptr);
  if (!beam) return;
  Packing best = by_birth(part);
  beam->lower(0, 100'000, [](Bytes) { return false; }, best);
  check_packing(part, best);
}

TEST(few_stacks_are_not_searched) {
  const Part few = part_of(one_forward_one_backward(5, 1, 0));
  CHECK(StackBeam::find(few, find_floor(few), 0) == nullptr);
  const Part shapeless = one_part(random_buffers(300, 200, 50, 0));
  CHECK(StackBeam::find(shapeless, find_floor(shapeless), 0) == nullptr);
  Part fixed = part_of(interleaved(4));
  fixed.fixed.assign(fixed.items.size(), kUnplaced);
  CHECK(StackBeam::find(fixed, find_floor(part_of(interleaved(4))), 0) == nullptr);
}

OLLA_TEST_MAIN
