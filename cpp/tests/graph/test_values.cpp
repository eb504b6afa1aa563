#include "graphs.hpp"
#include "olla/graph/values.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

static Rules rules_for(std::size_t num_ops) {
  Rules rules;
  rules.seconds.assign(num_ops, 1.0);
  rules.rerun.assign(num_ops, static_cast<std::uint8_t>(Rerun::kWhole));
  rules.rerun_seconds.assign(num_ops, 1.0);
  rules.in_place.assign(num_ops, 0);
  rules.rerun_reads.offset.assign(num_ops + 1, 0);
  return rules;
}

// Tensor 0 resident; 1 written, overwritten, read; 2 written.
static GraphData overwriting() {
  return data({8, 4, 4}, {{.reads = {0}, .writes = {1}}, {.reads = {1}, .mutates = {1}}, {.reads = {1}, .writes = {2}}}, {2});
}

TEST(a_mutation_makes_a_new_value_of_the_same_tensor) {
  const Graph graph(overwriting());
  const Values values(graph, rules_for(3));
  CHECK_EQ(values.num_values(), 4);
  const ValueId first = values.makes[0][0], second = values.makes[1][0];
  CHECK_EQ(values.tensor[first], 1);
  CHECK_EQ(values.tensor[second], 1);
  CHECK_EQ(values.overwrites[1][0], first);
  CHECK_EQ(values.reads[2][0], second);
  CHECK_EQ(values.last[1], second);
  CHECK_EQ(static_cast<int>(values.output[values.last[2]]), 1);
}

TEST(an_op_that_may_write_elsewhere_only_reads_what_the_program_has_it_change) {
  const Graph graph(overwriting());
  Rules rules = rules_for(3);
  rules.in_place[1] = 1;
  const Values values(graph, rules);
  CHECK(values.overwrites[1].empty());
  CHECK_EQ(values.reads[1][0], values.makes[0][0]);
}

TEST(what_changes_a_resident_tensor_never_runs_again) {
  const Graph graph(data({8, 4}, {{.reads = {0}, .writes = {1}}, {.reads = {1}, .mutates = {0}}}));
  const Values values(graph, rules_for(2));
  CHECK(values.rerunnable(0));
  CHECK(!values.rerunnable(1));
}

TEST(a_first_result_is_made_again_from_results_that_were_saved) {
  const Graph graph(data({8, 4, 1, 4}, {{.reads = {0}, .writes = {1, 2}, .random = true}, {.reads = {1, 2}, .writes = {3}}}, {3}));
  Rules rules = rules_for(2);
  rules.rerun[0] = static_cast<std::uint8_t>(Rerun::kFirstResult);
  rules.rerun_reads = {{0, 2, 2}, {0, 2}};
  const Values values(graph, rules);
  CHECK_EQ(values.rerun_makes[0].size(), std::size_t{1});
  CHECK_EQ(values.rerun_reads[0][1], values.makes[0][1]);
}

TEST(rules_that_do_not_fit_the_graph_are_refused) {
  const Graph graph(overwriting());
  CHECK_THROWS(Values(graph, rules_for(2)), GraphError, "lengths");
  Rules rules = rules_for(3);
  rules.rerun[2] = static_cast<std::uint8_t>(Rerun::kFirstResult);
  rules.rerun_reads = {{0, 0, 0, 1}, {0}};
  CHECK_THROWS(Values(graph, rules), GraphError, "ids");
  rules = rules_for(3);
  rules.seconds[1] = -1;
  CHECK_THROWS(Values(graph, rules), GraphError, "sizes");
}

OLLA_TEST_MAIN
