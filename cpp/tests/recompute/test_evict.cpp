#include "olla/graph/profile.hpp"
#include "olla/recompute/evict.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

TEST(the_curve_falls_and_never_costs_less) {
  const Graph graph(training(12));
  const Rules rules = rules_for(graph.data());
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Evictor evictor(graph, values, rules, order);
  Control control("budget", 10, {});
  CHECK_EQ(evictor.rewrite().peak, 121);
  evictor.run({}, control);
  const auto& curve = evictor.curve();
  CHECK(curve.size() > 4);
  for (std::size_t i = 1; i < curve.size(); ++i) CHECK(curve[i].peak <= curve[i - 1].peak);
  CHECK(curve.back().peak < 60);
  const Graph rewritten(evictor.rewritten().data);
  CHECK_EQ(profile(rewritten, program_order(rewritten)).peak, curve.back().peak);
}

TEST(limits_are_kept) {
  const Graph graph(training(12));
  const Rules rules = rules_for(graph.data());
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Control control("budget", 10, {});
  Evictor by_time(graph, values, rules, order);
  by_time.run({0, 5.0}, control);
  CHECK(by_time.rewrite().added_seconds <= 5.0);
  CHECK(by_time.rewrite().peak < 121);
  Evictor by_peak(graph, values, rules, order);
  by_peak.run({95, 1e30}, control);
  CHECK(by_peak.rewrite().peak <= 95);
  CHECK(by_peak.curve()[by_peak.curve().size() - 2].peak > 95);
}

TEST(what_is_taken_back_leaves_the_peak_between_the_limits_and_adds_no_time) {
  const Graph graph(training(12));
  const Rules rules = rules_for(graph.data());
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Control control("budget", 10, {});
  std::vector<Decision> all;  // every value of forward, one made from the other: more memory than without some of them
  for (ValueId x = 0; x < values.num_values(); ++x) {
    if (values.producer[x] != kNoOp && values.producer[x] < 11) all.push_back({{x, 11}});
  }
  const auto reversed = [&](Bytes least) {
    Evictor evictor(graph, values, rules, order);
    CHECK(evictor.reset(all));
    const Rewrite before = evictor.rewrite();
    evictor.reverse(before.peak, control, least);
    CHECK(evictor.rewrite().peak <= before.peak && evictor.rewrite().added_seconds < before.added_seconds);
    return evictor.rewrite().peak;
  };
  const Bytes lowest = reversed(0);
  CHECK(reversed(lowest + 1) > lowest);
}

OLLA_TEST_MAIN
