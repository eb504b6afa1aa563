#include "olla/recompute/bound.hpp"
#include "olla/recompute/improve.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

TEST(a_chain_needs_what_its_bound_says) {
  const Graph graph(training(3));
  const Rules rules = rules_for(graph.data(), false, true);
  const Values values(graph, rules);
  RecomputeBound bound(graph, values, rules);
  Control control("bound", 10, {});
  CHECK_EQ(bound.least_peak(3, 0.0, control), 31);  // all three activations and the first gradient
  CHECK_EQ(bound.least_peak(3, 2.0, control), 11);  // what op 3 reads and writes: the other two are made again
  CHECK(bound.least_added_seconds(3, 21, control) > 0.99);
  CHECK(bound.least_added_seconds(3, 31, control) == 0.0);
  CHECK(bound.least_added_seconds(3, 10, control) > 1e300);
}

TEST(nothing_found_is_below_the_bounds) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const Graph graph(test::random_data(12, seed));
    const Rules rules = rules_for(graph.data(), seed % 2 == 0);
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Evictor evictor(graph, values, rules, order);
    RecomputeBound bound(graph, values, rules);
    Control control("budget", 10, {});
    for (const double added : {0.0, 2.0, 5.0, 1e9}) {
      evictor.run({0, added}, control);
      const Point found{evictor.rewrite().peak, evictor.rewrite().added_seconds};
      for (OpId t = 0; t < graph.num_ops(); ++t) {
        CHECK(bound.least_peak(t, found.added_seconds, control) <= found.peak);
        CHECK(bound.least_added_seconds(t, found.peak, control) <= found.added_seconds);
      }
    }
  }
}

OLLA_TEST_MAIN
