#include "graphs.hpp"
#include "olla/graph/closure.hpp"
#include "test.hpp"

using namespace olla;

TEST(an_edge_that_a_path_implies_is_dropped) {
  Csr<OpId> preds;
  preds.push_back(std::vector<OpId>{});
  preds.push_back(std::vector<OpId>{0});
  preds.push_back(std::vector<OpId>{0, 1});
  const Closure closure(preds);
  CHECK_EQ(std::vector<OpId>(closure.preds[2].begin(), closure.preds[2].end()), {1});
  CHECK_EQ(std::vector<OpId>(closure.succs[0].begin(), closure.succs[0].end()), {1});
  CHECK(closure.before.test(2, 0) && closure.after.test(0, 2) && !closure.before.test(0, 2));
}

TEST(before_and_after_say_what_every_order_of_random_graphs_obeys) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    BitMatrix can_precede(6, 6);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      for (std::size_t i = 0; i < 6; ++i) {
        for (std::size_t j = i; j < 6; ++j) can_precede.set(order[i], order[j]);
      }
    });
    const Closure closure(graph.preds());
    for (OpId u = 0; u < 6; ++u) {
      for (OpId v = 0; v < 6; ++v) {
        const bool always = u == v || !can_precede.test(v, u);
        CHECK_EQ(closure.before.test(v, u), always);
        CHECK_EQ(closure.after.test(u, v), always);
      }
    }
  }
}

TEST(reduced_edges_have_the_same_closure_and_none_is_spare) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Closure closure(Graph(test::random_data(9, seed)).preds());
    const Closure again(closure.preds);
    for (OpId v = 0; v < 9; ++v) {
      for (OpId u = 0; u < 9; ++u) CHECK_EQ(again.before.test(v, u), closure.before.test(v, u));
      for (const OpId u : closure.preds[v]) {
        for (const OpId w : closure.preds[v]) CHECK(u == w || !closure.before.test(w, u));
      }
    }
  }
}

OLLA_TEST_MAIN
