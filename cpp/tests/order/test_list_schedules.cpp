#include "graphs.hpp"
#include "olla/order/list_schedules.hpp"
#include "test.hpp"

using namespace olla;

namespace {

TEST(the_schedules_are_valid_orders_of_random_graphs) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Graph graph(test::random_data(static_cast<OpId>(seed % 25), seed));
    CHECK(graph.is_order(least_peak_order(graph)));
    CHECK(graph.is_order(breadth_first_order(graph)));
    CHECK(graph.is_order(depth_first_order(graph)));
  }
}

// Ops 0 and 1 write 5 and 3 bytes; 2 and 3 read them.
Graph two_chains() { return Graph(test::data({5, 3, 1, 1}, {{{}, {0}}, {{}, {1}}, {{0}, {2}}, {{1}, {3}}})); }

TEST(least_peak_memory_first_starts_with_the_smallest_op_and_frees_soon) {
  CHECK_EQ(least_peak_order(two_chains()), std::vector<OpId>{1, 3, 0, 2});
}

TEST(breadth_first_runs_what_has_waited_longest) { CHECK_EQ(breadth_first_order(two_chains()), std::vector<OpId>{0, 1, 2, 3}); }

TEST(depth_first_puts_what_an_op_needs_right_before_it) {
  // Bytes touched: 5, 3, 6, 4: op 1, then 3, which needs it.
  CHECK_EQ(depth_first_order(two_chains()), std::vector<OpId>{1, 3, 0, 2});
}

// Op 0 writes what num ops read; what they write, the last op reads.
Graph fan(OpId num) {
  std::vector<test::Op> ops(1, {{}, {0}});
  test::Op join;
  for (TensorId t = 1; t <= num; ++t) {
    ops.push_back({{0}, {t}});
    join.reads.push_back(t);
  }
  ops.push_back(join);
  return Graph(test::data(std::vector<Bytes>(num + 1, 1), ops));
}

TEST(an_op_of_very_many_successors_is_listed_once) {
  for (const OpId num : {255, 256, 257, 300, 65'537, 70'000}) {
    const Graph graph = fan(num);
    CHECK(graph.is_order(least_peak_order(graph)));
    CHECK(graph.is_order(breadth_first_order(graph)));
    CHECK(graph.is_order(depth_first_order(graph)));
  }
}

}  // namespace

OLLA_TEST_MAIN
