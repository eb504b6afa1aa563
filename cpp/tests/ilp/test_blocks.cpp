#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/blocks.hpp"
#include "olla/ilp/tighten.hpp"
#include "test.hpp"

using namespace olla;

namespace {

Blocks glued(const Graph& graph) { return glue(graph, Closure(graph.preds())); }

std::vector<OpId> members(const Blocks& blocks, OpId v) {
  const auto list = blocks.members[blocks.block[v]];
  return {list.begin(), list.end()};
}

}  // namespace

TEST(an_update_in_place_runs_right_after_its_gradient) {
  // 0 and 2 write gradients, 1 and 3 update weights 0 and 1 with them; 4 uses both gradients' source.
  const Graph graph(
      test::data({8, 8, 4, 4}, {{.writes = {2}}, {.writes = {3}}, {.reads = {2}, .mutates = {0}}, {.reads = {3}, .mutates = {1}}}));
  CHECK_EQ(members(glued(graph), 2), {0, 2});
  CHECK_EQ(members(glued(graph), 3), {1, 3});
  CHECK_EQ(gather(glued(graph), test::program_order(graph)), {0, 2, 1, 3});
}

TEST(an_allocation_without_inputs_waits_for_its_reader) {
  const Graph graph(test::data({6, 1, 1}, {{.writes = {0}}, {.writes = {1}}, {.reads = {1}, .writes = {2}}, {.reads = {0, 2}}}));
  CHECK_EQ(members(glued(graph), 0), {0, 3});
}

TEST(ops_that_allocate_nothing_and_wait_for_nothing_run_first) {
  const Graph graph(test::data({8, 4}, {{.writes = {1}}, {.mutates = {0}}, {.mutates = {0}}, {.reads = {0, 1}}}));
  const Blocks blocks = glued(graph);
  CHECK(blocks.has_prefix);
  CHECK_EQ(members(blocks, 1), {1, 2});
  CHECK_EQ(gather(blocks, test::program_order(graph)), {1, 2, 0, 3});
}

TEST(an_op_that_needs_more_room_than_its_predecessor_is_free) {
  // Op 0 trades a donated tensor of 9 bytes for one of 4; op 1 frees that one, but needs more bytes than op 0 has freed.
  auto graph = [](Bytes workspace) {
    return Graph(test::data({9, 4}, {{.reads = {0}, .writes = {1}}, {.reads = {1}, .workspace = workspace}, {}}, {}, {0}));
  };
  CHECK_EQ(members(glued(graph(10)), 1), {1});
  CHECK_EQ(members(glued(graph(9)), 1), {0, 1});
}

TEST(gathering_keeps_every_order_valid_and_never_raises_its_peak) {
  std::size_t num_glued = 0;
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Blocks blocks = glued(graph);
    num_glued += static_cast<std::size_t>(6 - blocks.size());
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      const std::vector<OpId> gathered = gather(blocks, order);
      CHECK(graph.is_order(gathered));
      CHECK(profile(graph, gathered).peak <= profile(graph, order).peak);
      CHECK_EQ(gather(blocks, gathered), gathered);
    });
  }
  CHECK(num_glued > 400);
}

TEST(gathering_is_safe_with_precedences_beyond_the_dependencies) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Graph free(test::random_data(6, seed));
    const Graph graph = free.constrained(std::vector<Edge>{{static_cast<OpId>(seed % 3), static_cast<OpId>(3 + seed % 2)}, {1, 5}});
    const Blocks blocks = glued(graph);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      const std::vector<OpId> gathered = gather(blocks, order);
      CHECK(graph.is_order(gathered));
      CHECK(profile(graph, gathered).peak <= profile(graph, order).peak);
    });
  }
}

TEST(blocks_hold_every_op_once) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(30, seed));
    for (const Blocks& blocks : {glued(graph), singletons(graph)}) {
      std::vector<OpId> ops = blocks.members.item;
      for (OpId v = 0; v < 30; ++v) CHECK_EQ(blocks.members[blocks.block[v]][static_cast<std::size_t>(blocks.offset[v])], v);
      std::sort(ops.begin(), ops.end());
      CHECK_EQ(ops, test::program_order(graph));
    }
  }
}

OLLA_TEST_MAIN
