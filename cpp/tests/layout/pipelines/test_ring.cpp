#include "olla/layout/pipelines/ring.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

// The ring's packing of a part, from a stack; unchanged where it finds none.
Packing lowered(const Part& part, const Repetition& repeats, Bytes enough, std::int64_t max_nodes, std::uint64_t seed) {
  Packing best = stacked(part);
  Ring(part, repeats, seed).lower(enough, max_nodes, [](Bytes) { return false; }, best);
  check_packing(part, best);
  return best;
}

}  // namespace

TEST(pipelines_end_near_their_load) {
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    const Part part = part_of(one_forward_one_backward(30, seed % 3, seed));
    const std::optional<Repetition> repeats = Repetition::find(part);
    CHECK(repeats && Ring::suits(part, *repeats));
    if (!repeats) continue;
    const Bytes enough = part.load + part.load / 25;
    CHECK(lowered(part, *repeats, enough, 50'000, seed).height <= enough);
  }
}

TEST(pipelines_with_irregular_begins_and_ends_get_valid_packings) {
  int num_lowered = 0;
  for (std::uint32_t seed = 0; seed < 24; ++seed) {
    std::vector<Buffer> buffers = one_forward_one_backward(24, seed % 4, seed);
    std::mt19937 random(seed);
    const std::int64_t begin = 40, end = 240 - 40;
    for (Buffer& b : buffers) {
      if ((b.upper > begin && b.lower < end) || random() % 3 > 0) continue;
      switch (random() % 4) {
        case 0:
          b.size = 1 + static_cast<Bytes>(random() % 40);
          break;
        case 1:
          b.lower += b.upper - b.lower > 1;
          break;
        case 2:
          b.upper += 1 + random() % 3;
          break;
        default:
          b.upper = b.lower;
      }
    }
    const Part part = part_of(buffers);
    const std::optional<Repetition> repeats = Repetition::find(part);
    if (!repeats || !Ring::suits(part, *repeats)) continue;
    num_lowered += lowered(part, *repeats, part.load + part.load / 10, 30'000, seed).height < 2 * part.load;
  }
  CHECK(num_lowered > 6);
}

TEST(a_ring_that_is_stopped_leaves_a_valid_packing) {
  const Part part = part_of(one_forward_one_backward(30, 3, 5));
  const std::optional<Repetition> repeats = Repetition::find(part);
  CHECK(repeats.has_value());
  if (!repeats) return;
  for (int most = 0; most < 40; most += 3) {
    Packing best = stacked(part);
    int num_questions = 0;
    Ring(part, *repeats, 1).lower(part.load, 1'000'000, [&](Bytes) { return ++num_questions > most; }, best);
    check_packing(part, best);
  }
}

TEST(the_same_seed_and_nodes_give_the_same_packing) {
  const Part part = part_of(one_forward_one_backward(30, 2, 7));
  const std::optional<Repetition> repeats = Repetition::find(part);
  CHECK(repeats.has_value());
  if (repeats)
    CHECK_EQ(lowered(part, *repeats, part.load, 20'000, 3).offsets, lowered(part, *repeats, part.load, 20'000, 3).offsets);
}

OLLA_TEST_MAIN
