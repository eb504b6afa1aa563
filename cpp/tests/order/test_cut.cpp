#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/order/cut.hpp"
#include "test.hpp"

using namespace olla;

namespace {

constexpr OpId kOps = 6;

// The least memory at op v over all orders that keep order[0, lo) first and order[hi, end) last, and u before or after v if asked.
Bytes least_at(const Graph& graph, OpId v, std::span<const OpId> order, Step lo, Step hi, OpId before = kNoOp, OpId after = kNoOp) {
  Bytes least = kMaxBytes;
  test::for_each_order(graph, [&](const std::vector<OpId>& candidate) {
    std::vector<Step> step(graph.num_ops());
    for (Step s = 0; s < graph.num_ops(); ++s) step[candidate[s]] = s;
    for (Step s = 0; s < graph.num_ops(); ++s) {
      const Step at = step[order[s]];
      if ((s < lo) != (at < lo) || (s >= hi) != (at >= hi)) return;
    }
    if (before != kNoOp && step[before] > step[v]) return;
    if (after != kNoOp && step[after] < step[v]) return;
    least = std::min(least, profile(graph, candidate).live[step[v]]);
  });
  return least;
}

}  // namespace

TEST(a_cut_is_the_least_memory_of_all_orders) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(kOps, seed));
    const Schedule schedule(graph, test::program_order(graph));
    Control control("test", 1e9, {});
    CutSolver solver(graph, control, 0);
    for (OpId v = 0; v < kOps; ++v) {
      const Bytes least = least_at(graph, v, schedule.order, 0, kOps);
      for (const TieBreak tie : {TieBreak::kPrefix, TieBreak::kLargest, TieBreak::kRandom}) {
        const Cut cut = solver.solve(schedule, {.op = v, .lo = 0, .hi = kOps, .tie = tie});
        CHECK(cut.exact);
        CHECK_EQ(cut.value, least);

        // Running the cut's ops first, then v, reaches that value.
        std::vector<OpId> order = cut.inside;
        order.push_back(v);
        for (OpId u = 0; u < kOps; ++u) {
          if (std::find(order.begin(), order.end(), u) == order.end()) order.push_back(u);
        }
        CHECK(graph.is_order(order));
        CHECK_EQ(profile(graph, order).live[cut.inside.size()], cut.value);
      }
    }
  }
}

TEST(a_cut_inside_a_window_is_the_least_of_the_orders_that_keep_the_rest) {
  for (std::uint32_t seed = 100; seed < 140; ++seed) {
    const Graph graph(test::random_data(kOps, seed));
    const Schedule schedule(graph, test::program_order(graph));
    Control control("test", 1e9, {});
    CutSolver solver(graph, control, 0);
    for (Step lo = 0; lo < kOps; ++lo) {
      const Step hi = std::min<Step>(kOps, lo + 4);
      for (Step s = lo; s < hi; ++s) {
        const Cut cut = solver.solve(schedule, {.op = s, .lo = lo, .hi = hi});
        CHECK_EQ(cut.value, least_at(graph, s, schedule.order, lo, hi));
      }
    }
  }
}

TEST(a_cut_with_forced_ops_is_the_least_of_the_orders_that_obey) {
  for (std::uint32_t seed = 200; seed < 230; ++seed) {
    const Graph graph(test::random_data(kOps, seed));
    const Schedule schedule(graph, test::program_order(graph));
    Control control("test", 1e9, {});
    CutSolver solver(graph, control, 0);
    for (OpId v = 0; v < kOps; ++v) {
      for (OpId u = 0; u < kOps; ++u) {
        const Edge first{u, v}, second{v, u};
        if (u != v && graph.constrained_if_acyclic(std::span(&first, 1))) {
          const Cut cut = solver.solve(schedule, {.op = v, .lo = 0, .hi = kOps, .inside = std::span(&u, 1)});
          CHECK_EQ(cut.value, least_at(graph, v, schedule.order, 0, kOps, u));
        }
        if (u != v && graph.constrained_if_acyclic(std::span(&second, 1))) {
          const Cut cut = solver.solve(schedule, {.op = v, .lo = 0, .hi = kOps, .outside = std::span(&u, 1)});
          CHECK_EQ(cut.value, least_at(graph, v, schedule.order, 0, kOps, kNoOp, u));
        }
      }
    }
  }
}

TEST(implied_precedences_hold_in_every_order_within_the_limit) {
  std::int64_t num_implied = 0;
  for (std::uint32_t seed = 300; seed < 360; ++seed) {
    const Graph graph(test::random_data(kOps, seed));
    const Schedule schedule(graph, test::program_order(graph));
    Control control("test", 1e9, {});
    CutSolver solver(graph, control, 0);
    for (OpId v = 0; v < kOps; ++v) {
      const Bytes limit = solver.solve(schedule, {.op = v, .lo = 0, .hi = kOps}).value + seed % 7;
      const std::vector<Edge> edges = solver.implied(schedule, v, limit);
      num_implied += static_cast<std::int64_t>(edges.size());
      test::for_each_order(graph, [&](const std::vector<OpId>& order) {
        std::vector<Step> step(kOps);
        for (Step s = 0; s < kOps; ++s) step[order[s]] = s;
        if (profile(graph, order).live[step[v]] > limit) return;
        for (const auto& [before, after] : edges) CHECK(step[before] < step[after]);
      });
    }
  }
  CHECK(num_implied > 100);
}

TEST(a_query_ends_once_its_value_is_enough) {
  const Graph graph(test::data({10, 20, 5}, {{.writes = {0}}, {.writes = {1}}, {.reads = {0, 1}, .writes = {2}}}));
  const Schedule schedule(graph, {0, 1, 2});
  Control control("test", 1e9, {});
  CutSolver solver(graph, control, 0);
  const Cut cut = solver.solve(schedule, {.op = 2, .lo = 0, .hi = 3, .enough = 30});
  CHECK(!cut.exact);
  CHECK(cut.value > 30);
  CHECK(cut.value <= 35);
}

OLLA_TEST_MAIN
