#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/order/order.hpp"
#include "test.hpp"

using namespace olla;

namespace {

OrderResult solve(const Graph& graph, OrderOptions options = {}, double seconds = 60) {
  Control control("order", seconds, {});
  const std::vector<OpId> starts[] = {test::program_order(graph)};
  return order(graph, starts, options, control);
}

Bytes least_peak(const Graph& graph) {
  Bytes least = kMaxBytes;
  test::for_each_order(graph, [&](const std::vector<OpId>& candidate) { least = std::min(least, profile(graph, candidate).peak); });
  return least;
}

// num_chains chains of a big tensor shrinking to a small one, joined at the end: the program order opens all of them first.
Graph fork(int num_chains) {
  std::vector<Bytes> bytes;
  std::vector<test::Op> ops;
  test::Op join;
  for (int i = 0; i < num_chains; ++i) {
    ops.push_back({.writes = {static_cast<TensorId>(bytes.size())}});
    bytes.push_back(100);
  }
  for (int i = 0; i < num_chains; ++i) {
    ops.push_back({.reads = {i}, .writes = {static_cast<TensorId>(bytes.size())}});
    join.reads.push_back(static_cast<TensorId>(bytes.size()));
    bytes.push_back(1);
  }
  ops.push_back(join);
  return Graph(test::data(std::move(bytes), ops));
}

}  // namespace

TEST(order_and_bound_equal_the_best_of_all_orders) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    const Graph graph(test::random_data(static_cast<OpId>(seed % 8), seed));
    const OrderResult result = solve(graph);
    CHECK(graph.is_order(result.order));
    CHECK_EQ(profile(graph, result.order).peak, result.peak);
    CHECK_EQ(result.peak, least_peak(graph));
    CHECK_EQ(result.bound, result.peak);
    CHECK(result.status == Status::kOptimal);
  }
}

TEST(extra_precedences_are_obeyed) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph free(test::random_data(7, seed));
    const Edge extra[] = {{0, 5}, {2, 6}};
    const Graph graph = free.constrained(extra);
    const OrderResult result = solve(graph);
    CHECK(graph.is_order(result.order));
    CHECK_EQ(result.peak, least_peak(graph));
    CHECK_EQ(result.bound, result.peak);
  }
}

TEST(a_fork_closes_each_chain_before_the_next) {
  const OrderResult result = solve(fork(8));
  CHECK_EQ(result.peak, 108);
  CHECK_EQ(result.bound, 108);
}

TEST(no_time_still_gives_a_valid_order_and_bound) {
  const Graph graph = fork(50);
  const OrderResult result = solve(graph, {}, 0);
  CHECK(graph.is_order(result.order));
  CHECK(result.peak <= profile(graph, test::program_order(graph)).peak);
  CHECK(result.bound <= 150);
}

TEST(the_same_seed_gives_the_same_order) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const Graph graph(test::random_data(40, seed));
    CHECK_EQ(solve(graph, {.seed = 5}).order, solve(graph, {.seed = 5}).order);
  }
}

TEST(a_stop_request_ends_the_search_with_the_best_so_far) {
  const Graph graph(test::random_data(400, 7));
  int num_calls = 0;
  Control control("order", 1e9, [&](const Progress&) { return ++num_calls < 1; });
  const std::vector<OpId> starts[] = {test::program_order(graph)};
  const OrderResult result = order(graph, starts, {}, control);
  CHECK(graph.is_order(result.order));
  CHECK(result.bound <= result.peak);
}

TEST(a_start_that_breaks_a_dependency_is_refused) {
  const Graph graph(test::data({1, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}}));
  Control control("order", 1, {});
  const std::vector<OpId> starts[] = {{1, 0}};
  CHECK_THROWS(order(graph, starts, {}, control), PlanError, "order");
  CHECK_THROWS(order(graph, std::span<const std::vector<OpId>>{}, {}, control), PlanError, "order");
}

TEST(the_bound_of_one_order_holds_for_all) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const Graph graph(test::random_data(7, seed));
    Control control("bound", 1e9, {});
    CHECK(lower_bound(graph, test::program_order(graph), 7, control) <= least_peak(graph));
  }
}

TEST(deep_chains_need_no_recursion) {
  constexpr OpId kDepth = 200'000;
  std::vector<test::Op> ops(kDepth);
  for (OpId v = 0; v < kDepth; ++v) {
    if (v > 0) ops[v].reads = {v - 1};
    ops[v].writes = {v};
  }
  const OrderResult result = solve(Graph(test::data(std::vector<Bytes>(kDepth, 3), ops)));
  CHECK_EQ(result.peak, 6);
  CHECK_EQ(result.bound, 6);
}

OLLA_TEST_MAIN
