#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/tighten.hpp"
#include "test.hpp"

using namespace olla;

namespace {
const auto never = [] { return false; };
}  // namespace

TEST(certain_tensors_are_those_live_in_every_order) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    BitMatrix sometimes_dead(6, graph.num_tensors());
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      const Lifetimes seen = lifetimes(graph, order);
      for (Step s = 0; s < 6; ++s) {
        for (TensorId t = 0; t < graph.num_tensors(); ++t) {
          if (s < seen.first[t] || s >= seen.last[t]) sometimes_dead.set(order[s], t);
        }
      }
    });
    const Csr<TensorId> certain = certain_tensors(graph, Closure(graph.preds()));
    for (OpId v = 0; v < 6; ++v) {
      for (const TensorId t : certain[v]) CHECK(graph.planned(t) && !sometimes_dead.test(v, t));
    }
  }
}

TEST(no_order_within_the_target_is_lost) {
  std::size_t num_added = 0, num_ruled_out = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Bytes target = profile(graph, test::program_order(graph)).peak - 1 - static_cast<Bytes>(seed % 7);
    const std::optional<Graph> tightened = tighten(graph, target, never);
    num_ruled_out += !tightened;
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      if (profile(graph, order).peak > target) return;
      CHECK(tightened.has_value());
      if (tightened) CHECK(tightened->is_order(order));
    });
    if (tightened) {
      for (OpId v = 0; v < 6; ++v) num_added += tightened->preds(v).size() - graph.preds(v).size();
    }
  }
  CHECK(num_added > 20);
  CHECK(num_ruled_out > 5);
}

TEST(two_large_outputs_force_the_small_op_first) {
  // Op 0 writes 10 bytes with a workspace of 5; op 1 writes 1 byte; both are outputs. Op 1 first: 1, 16. Op 0 first: 15, 11.
  const Graph graph(test::data({10, 1}, {{.writes = {0}, .workspace = 5}, {.writes = {1}}}, {0, 1}));
  CHECK_EQ(tighten(graph, 16, never)->preds(1).size(), std::size_t{0});
  CHECK_EQ(tighten(graph, 15, never)->preds(1).size(), std::size_t{1});
  CHECK(!tighten(graph, 14, never).has_value());
}

TEST(the_certain_peak_is_a_lower_bound) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Bytes bound = certain_peak(graph, certain_tensors(graph, Closure(graph.preds())));
    test::for_each_order(graph, [&](const std::vector<OpId>& order) { CHECK(profile(graph, order).peak >= bound); });
  }
}

OLLA_TEST_MAIN
