#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/joint_program.hpp"
#include "olla/ilp/tighten.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;
using Outcome = JointProgram::Outcome;
using test::objective, test::satisfies;

namespace {

const auto never = [] { return false; };

OrderProgramOptions up_to(Bytes target) {
  OrderProgramOptions options;
  options.target = target;
  return options;
}

}  // namespace

TEST(peaks_of_the_arena_graph_are_loads_of_the_arena) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Graph arena = arena_graph(graph, 4);
    CHECK_EQ(arena.resident_bytes(), Bytes{0});
    const std::vector<ArenaBuffer> buffers = arena_buffers(arena, nullptr);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      CHECK(arena.is_order(order));
      const std::vector<Buffer> lifetimes = lifetimes_of(buffers, order);
      std::vector<Bytes> load(order.size() + 1, 0);
      for (const Buffer& buffer : lifetimes) {
        CHECK_EQ(buffer.size % 4, Bytes{0});
        for (std::int64_t s = buffer.lower; s < buffer.upper; ++s) load[s] += buffer.size;
      }
      CHECK_EQ(*std::ranges::max_element(load), profile(arena, order).peak);
    });
  }
}

TEST(the_arena_graph_keeps_extra_precedences) {
  const Graph graph = Graph(test::data({4, 4}, {{.writes = {0}}, {.writes = {1}}})).constrained(std::vector<Edge>{{1, 0}});
  const Graph arena = arena_graph(graph, 1);
  CHECK(arena.is_order(std::vector<OpId>{1, 0}));
  CHECK(!arena.is_order(std::vector<OpId>{0, 1}));
}

TEST(every_order_and_layout_within_the_target_is_an_answer_with_its_arena) {
  std::int64_t num_columns = 0;
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const Graph arena = arena_graph(Graph(test::random_data(6, seed)), 1);
    const std::vector<ArenaBuffer> buffers = arena_buffers(arena, nullptr);
    test::for_each_order(arena, [&](const std::vector<OpId>& order) {
      if ((order[0] + order.back()) % 2 == 1) return;  // half of them will do
      const std::vector<Buffer> lifetimes = lifetimes_of(buffers, order);
      std::vector<double> keys;
      for (std::size_t i = 0; i < buffers.size(); ++i) keys.push_back(static_cast<double>((7 * i + seed) % 11));
      const Arrangement arrangement{order, settle(lifetimes, keys, {})};
      const Bytes height = true_height(lifetimes, arrangement.offsets);
      const JointProgram p(arena, up_to(height), never);
      if (p.outcome() == Outcome::kNoAnswer) CHECK(buffers.empty());
      if (p.outcome() != Outcome::kBuilt) return;
      num_columns += p.program().num_columns();
      const std::vector<double> values = p.encode(arrangement);
      CHECK(!values.empty());
      if (values.empty()) return;
      CHECK(satisfies(p.program(), values));
      CHECK(p.value_bytes(objective(p.program(), values)) <= height);
      const Arrangement decoded = p.decode(values);
      CHECK(arena.is_order(decoded.order));
      CHECK(true_height(lifetimes_of(buffers, decoded.order), decoded.offsets) <= height);
    });
  }
  CHECK(num_columns > 10'000);
}

TEST(tensors_apart_in_every_order_share_no_variable) {
  // A chain: the first tensor is dead before the last is born. One pair left, and it is together in every order.
  const Graph arena = arena_graph(
      Graph(test::data({4, 5, 6}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}}, {.writes = {2}, .after = {2}}})),
      1);
  const JointProgram p(arena, up_to(20), never);
  CHECK_EQ(p.program().num_columns(), 1 + 3 + 1);  // the arena, three addresses, one pair
}

TEST(an_order_that_only_frees_moves_but_one_that_trades_bytes_does_not) {
  // Op 2 writes 5 bytes where it frees 6: its peak is safest right after op 0, yet its tensor may need a place of its own there.
  const Graph graph(test::data({6, 4, 5, 1}, {{.writes = {0}, .workspace = 8},
                                              {.writes = {1}},
                                              {.reads = {0}, .writes = {2}},
                                              {.reads = {1}},
                                              {.reads = {2}, .writes = {3}}}));
  const Closure closure(graph.preds());
  CHECK_EQ(glue(graph, closure).block[2], glue(graph, closure).block[0]);
  const Blocks shortening = glue(graph, closure, Moves::kShortening);
  CHECK(shortening.block[2] != shortening.block[0]);
  CHECK_EQ(shortening.block[3], shortening.block[1]);  // frees only
}

OLLA_TEST_MAIN
