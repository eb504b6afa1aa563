#include <algorithm>

#include "olla/recompute/recompute.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

TEST(bounds_of_a_chain_are_those_of_its_ops_and_zero_out_of_time) {
  const Graph graph(training(3));
  RecomputeSearch search(graph, rules_for(graph.data(), false, true), program_order(graph));
  const std::vector<OpId> ops{0, 3};
  Control control("bound", 10, {}), late("bound", 0, {});
  CHECK_EQ(search.least_peak(ops, 0.0, control), std::vector<Bytes>{10, 31});
  CHECK(search.least_added_seconds(ops, 21, control)[1] > 0.99);
  CHECK_EQ(search.least_peak(ops, 0.0, late), std::vector<Bytes>{0, 0});
}

TEST(a_search_from_bounds_meets_the_target) {
  const Graph graph(training(6));
  RecomputeSearch search(graph, rules_for(graph.data(), false, true), program_order(graph));
  Control control("budget", 10, {});
  const Bytes before = search.evictor().rewrite().peak;
  search.improve({false, 0, 4.0}, 0, 20, std::vector<OpId>{6, 7}, control);
  CHECK(search.evictor().rewrite().peak < before);
  CHECK(search.evictor().rewrite().added_seconds <= 4.0);
}

TEST(decisions_in_force_are_told_as_they_can_be_put_in_force) {
  const Graph graph(training(4));
  RecomputeSearch search(graph, rules_for(graph.data(), false, true), program_order(graph));
  Control control("budget", 10, {});
  search.evictor().run({0, 3.0}, control);
  const Point found{search.evictor().rewrite().peak, search.evictor().rewrite().added_seconds};
  const Decisions decisions = search.decisions();
  const Runs runs = search.runs();
  CHECK(!decisions.values.empty());
  CHECK_EQ(decisions.offset.back(), static_cast<std::int64_t>(decisions.values.size()));
  CHECK_EQ(static_cast<double>(runs.op.size()), graph.num_ops() + found.added_seconds);  // an op runs for a second
  CHECK_EQ(*std::max_element(runs.live.begin(), runs.live.end()), found.peak);
  CHECK(search.reset({}, {}));
  CHECK_EQ(search.runs().op.size(), static_cast<std::size_t>(graph.num_ops()));
  CHECK(search.reset(decisions.values, decisions.steps));
  CHECK_EQ(search.evictor().rewrite().peak, found.peak);
}

TEST(what_does_not_fit_the_graph_is_refused) {
  const Graph graph(training(2));
  const Rules rules = rules_for(graph.data());
  CHECK_THROWS(RecomputeSearch(graph, rules, {3, 2, 1, 0}), GraphError, "program_order");
  RecomputeSearch search(graph, rules, program_order(graph));
  const std::vector<ValueId> values{0}, unknown{99};
  const std::vector<Step> steps{1};
  CHECK_THROWS(search.reset(values, {}), GraphError, "lengths");
  CHECK_THROWS(search.reset(unknown, steps), GraphError, "ids");
  CHECK_THROWS(search.set_absent({1}), GraphError, "lengths");
  Rules fused = rules;
  fused.fusion.assign(4, static_cast<std::uint8_t>(Fusion::kNone));
  fused.store_seconds.assign(4, 0.0);
  CHECK_THROWS(RecomputeSearch(graph, fused, program_order(graph)).rewritten(), GraphError, "fusion");
}

OLLA_TEST_MAIN
