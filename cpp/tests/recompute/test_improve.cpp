#include "olla/recompute/improve.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

TEST(improvement_keeps_the_limit_and_is_no_worse) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const Graph graph(test::random_data(14, seed));
    const Rules rules = rules_for(graph.data());
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Evictor evictor(graph, values, rules, order);
    Control control("budget", 10, {});
    evictor.run({0, 4.0}, control);
    const Point found{evictor.rewrite().peak, evictor.rewrite().added_seconds};
    improve(evictor, {false, 0, 4.0}, seed, 5, control);
    CHECK(evictor.rewrite().peak <= found.peak);
    CHECK(evictor.rewrite().added_seconds <= 4.0);
    improve(evictor, {true, found.peak, 0}, seed, 5, control);
    CHECK(evictor.rewrite().peak <= found.peak);
    CHECK(evictor.rewrite().added_seconds <= found.added_seconds + 1e-12);
  }
}

OLLA_TEST_MAIN
