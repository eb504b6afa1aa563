#include "graphs.hpp"
#include "olla/ilp/joint_ilp.hpp"
#include "olla/ilp/joint_program.hpp"
#include "olla/layout/problem/packing.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;

namespace {

JointIlpResult solve(const Graph& arena, double time_limit = 60.0) {
  Control control("joint", time_limit, {});
  return joint_ilp(arena, test::program_order(arena), {}, {}, 0, Highs(test::highs_library()), IlpOptions{}, control);
}

Bytes least_height(const std::vector<Buffer>& buffers) {
  Bytes height = 0;
  for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
    height = std::max(height, part.num_items() <= kMaxEnumerated ? enumerate(part, 0).height : kMaxBytes);
  }
  return height;
}

Bytes load_of(const std::vector<Buffer>& buffers) {
  Bytes load = 0;
  for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) load = std::max(load, part.load);
  return load;
}

}  // namespace

TEST(the_smallest_arena_equals_brute_force_over_every_order_and_layout) {
  int num_compared = 0, num_solved = 0;
  for (std::uint32_t seed = 0; seed < 80; ++seed) {
    const Graph arena = arena_graph(Graph(test::random_data(6, seed)), 1);
    const std::vector<ArenaBuffer> buffers = arena_buffers(arena, nullptr);
    if (buffers.size() > static_cast<std::size_t>(kMaxEnumerated)) continue;
    Bytes best = kMaxBytes;
    test::for_each_order(arena, [&](const std::vector<OpId>& order) {
      const std::vector<Buffer> lifetimes = lifetimes_of(buffers, order);
      if (load_of(lifetimes) < best) best = std::min(best, least_height(lifetimes));
    });
    const JointIlpResult result = solve(arena);
    CHECK(result.status == Status::kOptimal);
    CHECK_EQ(result.arena, best);
    CHECK_EQ(result.lower_bound, best);
    ++num_compared;
    num_solved += result.figures.num_columns > 0;
  }
  CHECK(num_compared > 30 && num_solved > 5);
}

TEST(an_arena_below_that_of_every_order_of_least_peak_is_found) {
  // Five ops in a row whose tensors, at their least peak of 26 bytes, fit no arena of 26; op 3 run late costs 1 byte and fits 27.
  const Graph graph(test::data({17, 9, 4, 12, 4, 3, 8, 16, 2}, {{.writes = {0, 1}},
                                                                {.reads = {1}, .writes = {2, 3}, .after = {0}},
                                                                {.reads = {2}, .writes = {4, 5}, .after = {1}},
                                                                {.reads = {2}, .writes = {8}},
                                                                {.reads = {3, 5}, .writes = {6}, .after = {2}},
                                                                {.reads = {6, 8}, .writes = {7}, .after = {4}}}));
  const Graph arena = arena_graph(graph, 1);
  const std::vector<ArenaBuffer> buffers = arena_buffers(arena, nullptr);
  const JointIlpResult result = solve(arena);
  CHECK(result.status == Status::kOptimal);
  CHECK_EQ(result.arena, Bytes{27});
  CHECK_EQ(load_of(lifetimes_of(buffers, result.order)), Bytes{27});
}

TEST(a_graph_whose_ops_write_nothing_has_no_arena) {
  const JointIlpResult result = solve(arena_graph(Graph(test::data({5}, {{.reads = {0}}, {.mutates = {0}}})), 512));
  CHECK_EQ(result.arena, Bytes{0});
  CHECK(result.status == Status::kOptimal);
  CHECK_EQ(result.offsets, (std::vector<Offset>{kNotInArena}));
}

TEST(invalid_starts_are_named) {
  const Graph arena = arena_graph(Graph(test::data({4, 4}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}})), 1);
  const Highs highs(test::highs_library());
  const IlpOptions options;
  Control control("joint", 1.0, {});
  const std::vector<OpId> good = {0, 1}, bad = {1, 0};
  const std::vector<Offset> none, overlapping = {0, 2}, workspaces = {kNotInArena, kNotInArena};
  CHECK_THROWS(joint_ilp(arena, bad, none, none, 0, highs, options, control), PlanError, "order");
  CHECK_THROWS(joint_ilp(arena, good, overlapping, none, 0, highs, options, control), PlanError, "lengths");
  CHECK_THROWS(joint_ilp(arena, good, overlapping, workspaces, 0, highs, options, control), PlanError, "start");
}

OLLA_HIGHS_TEST_MAIN
