#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/graph/schedule.hpp"
#include "test.hpp"

using namespace olla;

TEST(a_schedule_agrees_with_the_profile_after_every_rewrite) {
  std::mt19937 random(3);
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Graph graph(test::random_data(7, seed));
    Schedule schedule(graph, test::program_order(graph));
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      if (random() % 16 != 0) return;
      // Rewrite only what differs from the order at hand.
      Step lo = 0, hi = graph.num_ops();
      while (lo < hi && schedule.order[lo] == order[lo]) ++lo;
      while (hi > lo && schedule.order[hi - 1] == order[hi - 1]) --hi;
      schedule.rewrite(graph, lo, std::span(order).subspan(lo, hi - lo));
      schedule.update_peak(graph);
      const Profile whole = profile(graph, order);
      CHECK_EQ(schedule.order, order);
      CHECK_EQ(schedule.live, whole.live);
      CHECK_EQ(schedule.peak, whole.peak);
    });
  }
}

TEST(an_empty_graph_needs_its_residents) {
  const Graph graph(test::data({5, 7}, {}, {}, {1}));
  CHECK_EQ(Schedule(graph, {}).peak, 5);
}

TEST(the_nearest_order_is_valid_and_leaves_valid_orders_alone) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Graph graph(test::random_data(7, seed));
    std::vector<OpId> wanted = test::program_order(graph);
    CHECK_EQ(nearest_order(graph, wanted), wanted);
    CHECK_EQ(nearest_order(graph, wanted, true), wanted);
    std::shuffle(wanted.begin(), wanted.end(), std::mt19937(seed));
    CHECK(graph.is_order(nearest_order(graph, wanted)));
    CHECK(graph.is_order(nearest_order(graph, wanted, true)));
  }
}

TEST(an_order_is_sought_near_permutations_alone) {
  const Graph graph(test::random_data(3, 0));
  for (const std::vector<OpId>& wanted : {std::vector<OpId>{0, 1}, {0, 1, 1}, {0, 1, 3}, {-1, 0, 1}}) {
    CHECK_THROWS(nearest_order(graph, wanted), PlanError, "order");
  }
}

OLLA_TEST_MAIN
