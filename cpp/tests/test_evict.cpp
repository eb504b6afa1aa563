#include "olla/evict.hpp"

#include "graphs.hpp"
#include "olla/improve.hpp"
#include "olla/profile.hpp"
#include "olla/spend.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

// Forward ops 0 to n - 1 keep an activation each for the backward ops n to 2 n - 1, which read them in reverse.
static GraphData training(OpId n) {
  std::vector<Bytes> bytes;
  std::vector<Op> ops;
  for (OpId v = 0; v < n; ++v) {
    bytes.push_back(10);
    Op op{.writes = {v}};
    if (v > 0) op.reads = {v - 1};
    ops.push_back(op);
  }
  for (OpId v = n - 1; v >= 0; --v) {
    bytes.push_back(1);
    Op op{.reads = {v}, .writes = {static_cast<TensorId>(bytes.size()) - 1}};
    if (v < n - 1) op.reads.push_back(static_cast<TensorId>(bytes.size()) - 2);
    ops.push_back(op);
  }
  return data(std::move(bytes), ops);
}

static Rules rules_for(const GraphData& d) {
  const std::size_t num_ops = d.workspace_bytes.size();
  Rules rules;
  for (std::size_t v = 0; v < num_ops; ++v) rules.seconds.push_back(1.0 + static_cast<double>(v % 3));
  for (const auto random : d.random) rules.rerun.push_back(random != 0 ? 0 : static_cast<std::uint8_t>(Rerun::kWhole));
  rules.rerun_seconds = rules.seconds;
  rules.in_place.assign(num_ops, 0);
  rules.rerun_reads.offset.assign(num_ops + 1, 0);
  return rules;
}

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

TEST(nothing_found_is_below_the_bounds) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const Graph graph(test::random_data(12, seed));
    Rules rules = rules_for(graph.data());
    if (seed % 2 == 0) rules.in_place.assign(rules.in_place.size(), 1);
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Evictor evictor(graph, values, rules, order);
    Spending spending(graph, values, rules);
    Control control("budget", 10, {});
    for (const double added : {0.0, 2.0, 5.0, 1e9}) {
      evictor.run({0, added}, control);
      const Point found{evictor.rewrite().peak, evictor.rewrite().added_seconds};
      for (OpId t = 0; t < graph.num_ops(); ++t) {
        CHECK(spending.least_peak(t, found.added_seconds, control) <= found.peak);
        CHECK(spending.least_added_seconds(t, found.peak, control) <= found.added_seconds);
      }
    }
  }
}

OLLA_TEST_MAIN
