#include <map>

#include "olla/layout/pipelines/stack_trail.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

TEST(a_hole_finds_its_way_to_every_stack) {
  for (const std::int64_t num_groups : {3, 8}) {
    const Part part = part_of(interleaved(num_groups));
    const std::unique_ptr<StackTrail> trail = StackTrail::find(part, find_floor(part), 1);
    CHECK(trail != nullptr);
    if (!trail) continue;
    Packing best = by_birth(part);
    CHECK(best.height > part.load + 60);
    best.height = part.load + 60;  // no more is asked for at first
    trail->lower(part.load, test::kSanitized ? 200'000 : 1'000'000, [](Bytes) { return false; }, best);
    check_packing(part, best);
    CHECK(best.height <= (num_groups == 3 ? part.load : part.load + 30));
  }
}

TEST(pipelines_get_valid_packings) {
  int num_lowered = 0;
  for (std::uint32_t seed = 0; seed < 16; ++seed) {
    const Part part = part_of(one_forward_one_backward(16, 1 + seed % 4, seed));
    const std::unique_ptr<StackTrail> trail = StackTrail::find(part, find_floor(part), seed);
    if (!trail) continue;
    Packing best = by_birth(part);
    const Bytes before = best.height = std::min(best.height, part.load + part.load / 10);  // no more is asked for at first
    trail->lower(part.load, 100'000, [](Bytes) { return false; }, best);
    if (best.height == before) continue;
    check_packing(part, best);
    ++num_lowered;
  }
  CHECK(num_lowered > 2);
}

// Alike, or each buffer of a size of its own; where stacks differ, the hole is not always of one size.
TEST(interleaved_pipelines_of_any_sizes_get_valid_packings) {
  int num_lowered = 0;
  for (std::uint32_t seed = 0; seed < (test::kSanitized ? 8 : 40); ++seed) {
    std::mt19937 random(seed);
    std::vector<Buffer> buffers = interleaved(4);
    std::map<Bytes, Bytes> sizes;
    for (Buffer& buffer : buffers) {
      Bytes& size = sizes.try_emplace(buffer.size, 10 + static_cast<Bytes>(random() % 300)).first->second;
      buffer.size = seed % 2 == 0 ? size : size + static_cast<Bytes>(random() % 4);
    }
    const Part part = part_of(buffers);
    const std::unique_ptr<StackTrail> trail = StackTrail::find(part, find_floor(part), seed);
    CHECK(trail != nullptr);
    if (!trail) continue;
    Packing best;
    const Bytes before = best.height = part.load + part.load / 50;
    trail->lower(part.load, 100'000, [](Bytes) { return false; }, best);
    if (best.height == before) continue;
    check_packing(part, best);
    ++num_lowered;
  }
  CHECK(num_lowered > (test::kSanitized ? 2 : 10));
}

TEST(a_trail_that_is_stopped_leaves_the_packing) {
  const Part part = part_of(interleaved(3));
  const std::unique_ptr<StackTrail> trail = StackTrail::find(part, find_floor(part), 1);
  Packing best = by_birth(part);
  best.height = part.load + 20;
  const Packing before = best;
  int num_asked = 0;
  trail->lower(part.load, 1'000'000, [&](Bytes height) { return height != before.height || ++num_asked > 5; }, best);
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
  const std::unique_ptr<StackTrail> trail = StackTrail::find(part, {std::vector<Offset>(part.items.size(), kUnplaced), 0}, 1);
  CHECK(trail != nullptr);
  if (!trail) return;
  Packing best = by_birth(part);
  trail->lower(0, 100'000, [](Bytes) { return false; }, best);
  check_packing(part, best);
}

TEST(few_stacks_are_not_searched) {
  const Part few = part_of(one_forward_one_backward(5, 1, 0));
  CHECK(StackTrail::find(few, find_floor(few), 0) == nullptr);
  const Part shapeless = one_part(random_buffers(300, 200, 50, 0));
  CHECK(StackTrail::find(shapeless, find_floor(shapeless), 0) == nullptr);
  Part fixed = part_of(interleaved(4));
  fixed.fixed.assign(fixed.items.size(), kUnplaced);
  CHECK(StackTrail::find(fixed, find_floor(part_of(interleaved(4))), 0) == nullptr);
}

OLLA_TEST_MAIN
