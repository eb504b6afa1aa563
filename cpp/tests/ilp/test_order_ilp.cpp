#include <thread>

#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/order_ilp.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;

namespace {

OrderIlpResult solve(const Graph& graph, bool reduce, ProgressFn progress = {}, double time_limit = 60.0,
                     std::int64_t max_nonzeros = 2'000'000) {
  OrderIlpOptions options;
  options.reduce = reduce;
  options.max_nonzeros = max_nonzeros;
  Control control("ilp", time_limit, std::move(progress));
  return order_ilp(graph, test::program_order(graph), 0, Highs(test::highs_library()), options, control);
}

Bytes best_peak(const Graph& graph) {
  Bytes best = kMaxBytes;
  test::for_each_order(graph, [&](const std::vector<OpId>& order) { best = std::min(best, profile(graph, order).peak); });
  return best;
}

// Many ops that can run in any order, in pairs of unlike sizes: far too much for one linear program within a second.
Graph wide(OpId num_pairs) {
  std::vector<Bytes> bytes;
  std::vector<test::Op> ops;
  for (OpId i = 0; i < num_pairs; ++i) {
    bytes.push_back(1000 + 37 * i % 101);
    bytes.push_back(100 + 53 * i % 97);
    ops.push_back({.writes = {2 * i}});
    ops.push_back({.reads = {2 * i, i > 3 ? 2 * (i - 3) - 1 : 2 * i}, .writes = {2 * i + 1}});
  }
  std::vector<TensorId> outputs;
  for (OpId i = 0; i < num_pairs; i += 2) outputs.push_back(2 * i + 1);
  return Graph(test::data(bytes, ops, outputs));
}

}  // namespace

TEST(the_optimum_equals_brute_force_over_every_order) {
  std::size_t num_solved = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(7, seed));
    for (const bool reduce : {true, false}) {
      const OrderIlpResult result = solve(graph, reduce);
      CHECK(result.status == Status::kOptimal);
      CHECK_EQ(result.peak, best_peak(graph));
      CHECK_EQ(result.lower_bound, result.peak);
      CHECK_EQ(profile(graph, result.order).peak, result.peak);
      num_solved += result.figures.num_columns > 0;
    }
  }
  CHECK(num_solved > 30);
}

TEST(a_stop_request_returns_within_a_second_with_a_valid_order) {
  const Graph graph = wide(120);
  const OrderIlpResult result = solve(graph, false, [](const Progress&) { return false; });
  CHECK(result.status == Status::kFeasible);
  CHECK(graph.is_order(result.order));
  CHECK(result.figures.seconds_solve < 5.0);
  CHECK_EQ(result.figures.message, std::string("stopped on request"));
}

TEST(a_time_limit_holds_even_inside_a_long_linear_program) {
  const OrderIlpResult result = solve(wide(120), false, {}, 0.5);
  CHECK(result.status == Status::kFeasible);
  CHECK(result.figures.seconds_solve < 5.0);
  CHECK(result.lower_bound <= result.peak);
}

TEST(a_program_beyond_the_limit_gives_the_start_back) {
  const OrderIlpResult result = solve(wide(40), true, {}, 60.0, 1000);
  CHECK(result.status == Status::kFeasible);
  CHECK_EQ(result.order, test::program_order(wide(40)));
  CHECK(result.figures.message.find("was not built") != std::string::npos);
}

TEST(threads_solve_side_by_side) {
  std::vector<Bytes> peaks(4);
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { peaks[i] = solve(Graph(test::random_data(7, i)), false).peak; });
  for (std::thread& thread : threads) thread.join();
  for (std::uint32_t i = 0; i < 4; ++i) CHECK_EQ(peaks[i], best_peak(Graph(test::random_data(7, i))));
}

OLLA_HIGHS_TEST_MAIN
