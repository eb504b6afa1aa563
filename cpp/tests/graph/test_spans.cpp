#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/graph/spans.hpp"
#include "test.hpp"

using namespace olla;
using test::data;

TEST(ops_of_a_chain_cannot_move) {
  const Spans s = spans(Graph(data({1, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}}})));
  CHECK_EQ(s.earliest, {0, 1, 2});
  CHECK_EQ(s.latest, {0, 1, 2});
}

TEST(independent_ops_can_stand_anywhere) {
  const Spans s = spans(Graph(data({}, {{}, {}, {}})));
  CHECK_EQ(s.earliest, {0, 0, 0});
  CHECK_EQ(s.latest, {2, 2, 2});
}

TEST(spans_are_the_extremes_over_every_order_of_random_graphs) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    std::vector<Step> earliest(6, 6), latest(6, -1);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      for (Step s = 0; s < 6; ++s) {
        earliest[order[s]] = std::min(earliest[order[s]], s);
        latest[order[s]] = std::max(latest[order[s]], s);
      }
    });
    const Spans s = spans(graph);
    CHECK_EQ(s.earliest, earliest);
    CHECK_EQ(s.latest, latest);
  }
}

TEST(lifetimes_stay_within_the_widest_and_cover_the_certain) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Spans s = spans(graph);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      const Lifetimes seen = lifetimes(graph, order);
      for (TensorId t = 0; t < graph.num_tensors(); ++t) {
        const Lifetime widest = widest_lifetime(graph, s, t), certain = certain_lifetime(graph, s, t);
        CHECK(widest.first <= seen.first[t] && seen.last[t] <= widest.last);
        if (certain.first < certain.last) CHECK(seen.first[t] <= certain.first && certain.last <= seen.last[t]);
      }
    });
  }
}

TEST(columns_beyond_one_block_are_counted) {
  // Two chains of 700 ops, more than one block of 512 columns, joined at the end.
  std::vector<test::Op> ops(1401);
  for (OpId v = 2; v < 1400; ++v) ops[v].after = {v - 2};
  ops[1400].after = {1398, 1399};
  const Spans s = spans(Graph(data({}, ops)));
  for (OpId v = 0; v < 1400; ++v) {
    CHECK_EQ(s.earliest[v], v / 2);
    CHECK_EQ(s.latest[v], 1400 - (700 - v / 2));
  }
  CHECK_EQ(s.earliest[1400], 1400);
}

OLLA_TEST_MAIN
