#include "olla/graph/profile.hpp"
#include "olla/recompute/rewrite.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

// a -> b -> c -> d, and a is read once more at the end.
static GraphData chain() {
  return data({10, 2, 3, 2}, {{.writes = {0}},
                              {.reads = {0}, .writes = {1}},
                              {.reads = {1}, .writes = {2}},
                              {.reads = {2}, .writes = {3}},
                              {.reads = {0, 3}}});
}

TEST(no_drops_give_the_graph_back) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const Graph graph(test::random_data(8, seed));
    const Rules rules = rules_for(graph.data(), false, true);
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Rewriter rewriter(graph, values, rules, order);
    Rewrite rewrite;
    CHECK(rewriter.build(DropSet(values.num_values()), rewrite));
    CHECK_EQ(rewrite.peak, profile(graph, order).peak);
    CHECK_EQ(rewrite.num_reruns, 0);
    CHECK_EQ(rewriter.graph(rewrite).origin, order);
  }
}

TEST(a_dropped_value_is_made_again_right_before_its_reader) {
  const Graph graph(chain());
  const Rules rules = rules_for(graph.data(), false, true);
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Rewriter rewriter(graph, values, rules, order);
  DropSet drops(values.num_values());
  CHECK(drops.add({values.makes[0][0], 2}));
  CHECK(!drops.add({values.makes[0][0], 2}));
  Rewrite rewrite;
  CHECK(rewriter.build(drops, rewrite));
  const Rewritten result = rewriter.graph(rewrite);
  CHECK_EQ(result.origin, std::vector<OpId>({0, 1, 2, 3, 0, 4}));
  CHECK_EQ(rewrite.added_seconds, 1.0);
  CHECK_EQ(rewrite.peak, 12);  // 15 before
  CHECK(drops.remove({values.makes[0][0], 2}));
  CHECK(!drops.remove({values.makes[0][0], 2}));
}

TEST(what_is_only_needed_late_moves_instead_of_running_twice) {
  const Graph graph(data({10, 2, 3}, {{.writes = {0}}, {.writes = {1}}, {.reads = {1}, .writes = {2}}, {.reads = {0, 2}}}));
  const Rules rules = rules_for(graph.data(), false, true);
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Rewriter rewriter(graph, values, rules, order);
  DropSet drops(values.num_values());
  drops.add({values.makes[0][0], 1});
  Rewrite rewrite;
  CHECK(rewriter.build(drops, rewrite));
  CHECK_EQ(rewrite.added_seconds, 0.0);
  CHECK_EQ(rewriter.graph(rewrite).origin, std::vector<OpId>({1, 2, 0, 3}));
}

TEST(a_result_takes_over_an_input_of_its_size_that_dies) {
  const Graph graph(data({4, 4, 4}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}, .writes = {2}}}, {2}));
  const Rules rules = rules_for(graph.data(), true, true);
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Rewriter rewriter(graph, values, rules, order);
  Rewrite rewrite;
  CHECK(rewriter.build(DropSet(values.num_values()), rewrite));
  CHECK_EQ(rewrite.peak, 4);
  const Rewritten result = rewriter.graph(rewrite);
  CHECK_EQ(result.data.tensor_bytes.size(), std::size_t{1});
  CHECK_EQ(result.data.mutates[1][0], 0);
  CHECK_EQ(result.data.outputs, std::vector<TensorId>({0}));
}

TEST(what_cannot_be_made_again_cannot_be_dropped) {
  GraphData d = chain();
  d.random[0] = 1;
  const Graph graph(d);
  const Rules rules = rules_for(graph.data(), false, true);
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Rewriter rewriter(graph, values, rules, order);
  DropSet drops(values.num_values());
  drops.add({values.makes[0][0], 2});
  Rewrite rewrite;
  CHECK(!rewriter.build(drops, rewrite));
}

// Op 0 makes tensor 0; op 1 draws 1 and its mask 2 from it; ops 2 and 3 go on; op 4 reads 3 and 1, op 5 the mask.
GraphData drawing() {
  GraphData d = data({8, 8, 2, 1, 1, 1, 1}, {{.writes = {0}},
                                             {.reads = {0}, .writes = {1, 2}},
                                             {.reads = {1}, .writes = {3}},
                                             {.reads = {3}, .writes = {4}},
                                             {.reads = {4, 1}, .writes = {5}},
                                             {.reads = {5, 2}, .writes = {6}}});
  d.random[1] = 1;
  return d;
}

Rules drawing_rules(const GraphData& d) {
  Rules rules = rules_for(d, false, true);
  rules.rerun[1] = static_cast<std::uint8_t>(Rerun::kReplay);
  rules.rerun_reads.offset = {0, 0, 2, 2, 2, 2, 2};
  rules.rerun_reads.item = {0, 2};
  return rules;
}

TEST(what_was_drawn_is_made_from_its_mask_or_drawn_again_where_that_is_gone) {
  const Graph graph(drawing());
  const Rules rules = drawing_rules(graph.data());
  const Values values(graph, rules);
  const auto order = program_order(graph);
  Rewriter rewriter(graph, values, rules, order);
  DropSet drops(values.num_values());
  drops.add({values.makes[1][0], 2});
  Rewrite rewrite;
  CHECK(rewriter.build(drops, rewrite));
  Rewritten result = rewriter.graph(rewrite);
  CHECK_EQ(result.origin, std::vector<OpId>({0, 1, 2, 3, 1, 4, 5}));
  CHECK_EQ(result.rerun[4], static_cast<std::uint8_t>(Rerun::kFirstResult));
  CHECK_EQ(result.data.writes[4].size(), std::size_t{1});

  drops.add({values.makes[1][1], 2});
  CHECK(rewriter.build(drops, rewrite));
  result = rewriter.graph(rewrite);
  CHECK_EQ(result.origin, std::vector<OpId>({0, 1, 2, 3, 1, 4, 5}));
  CHECK_EQ(result.rerun[4], static_cast<std::uint8_t>(Rerun::kReplay));
  CHECK_EQ(result.data.writes[4].size(), std::size_t{2});
  CHECK_EQ(result.data.after[4][0], 1);  // it draws what that one drew
  CHECK_EQ(result.data.random[4], std::uint8_t{0});
  const Graph rewritten(result.data);
  CHECK_EQ(profile(rewritten, program_order(rewritten)).peak, rewrite.peak);
}

TEST(random_drops_need_what_the_profile_of_the_rewritten_graph_says) {
  int num_built = 0;
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    const Graph graph(test::random_data(9, seed));
    const Rules rules = rules_for(graph.data(), seed % 2 == 0, true);
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Rewriter rewriter(graph, values, rules, order);
    DropSet drops(values.num_values());
    std::mt19937 random(seed);
    for (int i = 0; i < 5; ++i) {
      const auto x = static_cast<ValueId>(random() % values.num_values());
      if (values.producer[x] != kNoOp) drops.add({x, static_cast<Step>(random() % 9)});
    }
    Rewrite rewrite;
    if (!rewriter.build(drops, rewrite)) continue;
    ++num_built;
    const Rewritten result = rewriter.graph(rewrite);
    const Graph rewritten(result.data);
    CHECK_EQ(profile(rewritten, program_order(rewritten)).peak, rewrite.peak);
    CHECK_EQ(rewrite.num_reruns, rewritten.num_ops() - graph.num_ops());
    CHECK_EQ(rewrite.added_seconds, static_cast<double>(rewrite.num_reruns));
  }
  CHECK(num_built > 100);
}

TEST(a_fused_result_is_in_memory_only_where_a_kernel_of_its_own_reads_it) {
  // kernel 0 makes 0; pointwise op 1 makes 1 of it; kernel 2 makes 3 of 1 or, fused, reduction 2 does.
  for (const Fusion reader : {Fusion::kNone, Fusion::kReduction}) {
    const Graph graph(data({10, 10, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}, .writes = {2}}}));
    Rules rules = rules_for(graph.data());
    rules.fusion = {0, static_cast<std::uint8_t>(Fusion::kPointwise), static_cast<std::uint8_t>(reader)};
    rules.store_seconds.assign(3, 0.0);
    rules.keep_seconds = {4.0, 2.0, 1.0};
    const Values values(graph, rules);
    const auto order = program_order(graph);
    Rewriter rewriter(graph, values, rules, order);
    Rewrite rewrite;
    CHECK(rewriter.build(DropSet(values.num_values()), rewrite));
    CHECK_EQ(rewrite.copies[1].fused, reader == Fusion::kReduction);
    CHECK_EQ(rewrite.peak, reader == Fusion::kReduction ? 11 : 20);
    CHECK_EQ(rewrite.added_seconds, reader == Fusion::kReduction ? 0.0 : 2.0);
  }
}

TEST(a_fused_result_lies_over_what_a_reduction_of_its_kernel_reads_where_rules_say_so) {
  // kernel 0 makes 0; reduction 1 makes 1 of it; pointwise op 2 makes 2 of both, which kernel 3 reads.
  const Graph graph(
      data({10, 1, 10, 1},
           {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {0, 1}, .writes = {2}}, {.reads = {2}, .writes = {3}}}));
  Rules rules = rules_for(graph.data());
  rules.fusion = {0, static_cast<std::uint8_t>(Fusion::kReduction), static_cast<std::uint8_t>(Fusion::kPointwise), 0};
  rules.in_place = {0, 1, 1, 0};
  rules.store_seconds.assign(4, 0.0);
  const Values values(graph, rules);
  const auto order = program_order(graph);
  for (const bool in_place : {false, true}) {
    rules.reduced_in_place = in_place;
    Rewriter rewriter(graph, values, rules, order);
    Rewrite rewrite;
    CHECK(rewriter.build(DropSet(values.num_values()), rewrite));
    CHECK_EQ(rewrite.peak, in_place ? 11 : 21);
  }
}

OLLA_TEST_MAIN
