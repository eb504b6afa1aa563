#include "buffers.hpp"
#include "olla/layout/greedy/skyline.hpp"
#include "olla/layout/greedy/squeaky_wheel.hpp"
#include "olla/layout/pipelines/fold.hpp"
#include "packings.hpp"
#include "pipeline.hpp"

using namespace olla;

namespace {

Packing greedy(const Part& part) {
  Skyline skyline(part);
  Packing packing;
  CHECK(skyline.place(by_key(part, item_keys(part, kArea)), {}, [] { return false; }, packing));
  return packing;
}

}  // namespace

TEST(a_packing_of_the_short_part_unfolds_to_one_of_the_whole_from_every_cut) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    const std::vector<Buffer> buffers = microbatches(60, 1 + seed % 3, seed);
    const Part part = part_of(buffers);
    const std::optional<Repetition> repeats = Repetition::find(part);
    CHECK(repeats.has_value());
    if (!repeats) continue;
    const std::optional<Fold> fold = Fold::find(part, *repeats);
    CHECK(fold.has_value());
    if (!fold) continue;
    CHECK(fold->short_part().num_items() * 2 <= part.num_items());
    CHECK_EQ(fold->short_part().load, part.load);
    const Packing packing = greedy(fold->short_part());
    const std::vector<Section> cuts = fold->cuts();
    for (std::size_t k = 0; k < cuts.size(); k += 5) {
      const Part stretch = fold->stretch(cuts[k], packing);
      const Packing whole = fold->unfold(cuts[k], packing, stretch, greedy(stretch));
      LayoutResult result{std::vector<Offset>(buffers.size(), 0), whole.height, part.load, part.load};
      if (result.height == result.load) result.status = Status::kOptimal;
      for (ItemId i = 0; i < part.num_items(); ++i) result.offsets[part.buffers[i]] = whole.offsets[i];
      check_layout(buffers, result, 1);
    }
  }
}

TEST(what_repeats_too_rarely_is_not_folded) {
  const Part part = part_of(microbatches(8, 3, 1));
  const std::optional<Repetition> repeats = Repetition::find(part);
  CHECK(!repeats || !Fold::find(part, *repeats));
}

TEST(a_long_pipeline_ends_no_higher_with_its_fold) {
  const std::vector<Buffer> buffers = microbatches(300, 2, 4);
  LayoutOptions options{.max_placements = 100'000, .max_nodes = 20'000};
  const LayoutResult folded = solve(buffers, options);
  check_layout(buffers, folded, 1);
  options.use_fold = false;
  CHECK(folded.height <= solve(buffers, options).height);
}

OLLA_TEST_MAIN
