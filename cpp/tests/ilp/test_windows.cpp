#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/tighten.hpp"
#include "olla/ilp/windows.hpp"
#include "test.hpp"

using namespace olla;

namespace {

std::optional<Windows> windows_of(const Graph& graph, const Blocks& blocks, Bytes target) {
  const Closure closure(graph.preds());
  return find_windows(graph, closure, blocks, certain_tensors(graph, closure), target);
}

bool can_start(const Windows& windows, OpId block, Step step) {
  const auto starts = windows.starts[block];
  return std::binary_search(starts.begin(), starts.end(), step);
}

}  // namespace

TEST(without_a_target_windows_are_the_spans) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(8, seed));
    const auto windows = windows_of(graph, singletons(graph), kMaxBytes);
    CHECK_EQ(windows->spans.earliest, spans(graph).earliest);
    CHECK_EQ(windows->spans.latest, spans(graph).latest);
  }
}

TEST(every_order_within_the_target_starts_its_blocks_in_their_windows) {
  std::size_t num_dropped = 0, num_ruled_out = 0;
  for (std::uint32_t seed = 0; seed < 120; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Closure closure(graph.preds());
    const Bytes target = profile(graph, test::program_order(graph)).peak - static_cast<Bytes>(seed % 9);
    for (const Blocks& blocks : {glue(graph, closure), singletons(graph)}) {
      const auto windows = windows_of(graph, blocks, target);
      num_ruled_out += !windows;
      if (windows) num_dropped += windows_of(graph, blocks, kMaxBytes)->starts.item.size() - windows->starts.item.size();
      test::for_each_order(graph, [&](const std::vector<OpId>& order) {
        const std::vector<OpId> gathered = gather(blocks, order);
        if (profile(graph, gathered).peak > target) return;
        CHECK(windows.has_value());
        for (Step s = 0; windows && s < 6; ++s) {
          if (blocks.offset[gathered[s]] == 0) CHECK(can_start(*windows, blocks.block[gathered[s]], s));
        }
      });
    }
  }
  CHECK(num_dropped > 50);
  CHECK(num_ruled_out > 5);
}

TEST(a_full_step_falls_away_in_the_middle_of_a_window) {
  // 0 -> 1 -> 2 is a chain whose tensor of 10 bytes is live at steps around its middle; op 3 needs a workspace of 5 bytes.
  const Graph graph(
      test::data({1, 10, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}, .writes = {2}}, {.workspace = 5}}));
  const auto windows = windows_of(graph, singletons(graph), 12);
  CHECK_EQ(windows->num_columns(), 5);  // three ops of the chain at two steps each, op 3 at three of four steps
  CHECK(!can_start(*windows, 3, 2));
  CHECK(can_start(*windows, 3, 0) && can_start(*windows, 3, 1) && can_start(*windows, 3, 3));
}

OLLA_TEST_MAIN
