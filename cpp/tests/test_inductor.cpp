#include "graphs.hpp"
#include "olla/inductor.hpp"
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

}  // namespace

OLLA_TEST_MAIN
