#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "test.hpp"

using namespace olla;
using test::data;

namespace {

// The memory model, played step by step with a set of live tensors.
std::vector<Bytes> simulated(const GraphData& d, std::span<const OpId> order) {
  const TensorId num_tensors = static_cast<TensorId>(d.tensor_bytes.size());
  auto has = [](std::span<const TensorId> ids, TensorId t) { return std::find(ids.begin(), ids.end(), t) != ids.end(); };
  auto uses = [&](OpId v, TensorId t) { return has(d.reads[v], t) || has(d.mutates[v], t); };
  std::vector<Bytes> live;
  for (std::size_t s = 0; s < order.size(); ++s) {
    Bytes sum = d.workspace_bytes[order[s]];
    for (TensorId t = 0; t < num_tensors; ++t) {
      bool written = false, written_so_far = false, needed = has(d.outputs, t);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const bool writes = has(d.writes[order[i]], t);
        written = written || writes;
        written_so_far = written_so_far || (writes && i <= s);
        needed = needed || (i >= s && uses(order[i], t)) || (i == s && writes);
      }
      if (written ? written_so_far && needed : !d.donated[t] || needed) sum += d.tensor_bytes[t];
    }
    live.push_back(sum);
  }
  return live;
}

}  // namespace

TEST(a_chain_keeps_only_its_ends) {
  const Graph graph(
      data({100, 10, 20, 40}, {{.reads = {0}, .writes = {1}}, {.reads = {1}, .writes = {2}}, {.reads = {2}, .writes = {3}}}, {3}));
  const Profile p = profile(graph, test::program_order(graph));
  CHECK_EQ(p.live, {110, 130, 160});
  CHECK_EQ(p.peak, 160);
  CHECK_EQ(p.peak_step, 2);
  CHECK_EQ(p.lifetimes.first, {0, 0, 1, 2});
  CHECK_EQ(p.lifetimes.last, {3, 2, 3, 3});
}

TEST(a_tensor_nobody_reads_is_live_during_its_own_op) {
  const Graph graph(data({8, 1}, {{.writes = {0}}, {.writes = {1}}}));
  CHECK_EQ(profile(graph, test::program_order(graph)).live, {8, 1});
}

TEST(a_donated_tensor_is_freed_after_its_last_use) {
  const Graph graph(data({8, 1}, {{.reads = {0}}, {.writes = {1}}}, {}, {0}));
  CHECK_EQ(profile(graph, test::program_order(graph)).live, {8, 1});
  CHECK_EQ(profile(graph, std::vector<OpId>{1, 0}).live, {9, 8});
}

TEST(a_workspace_counts_during_its_op_only) {
  const Graph graph(data({}, {{.workspace = 5}, {}}));
  CHECK_EQ(profile(graph, test::program_order(graph)).live, {5, 0});
}

TEST(without_ops_the_peak_is_the_resident_memory) { CHECK_EQ(profile(Graph(data({3, 4}, {})), {}).peak, 7); }

TEST(profile_equals_the_simulation_on_every_order_of_random_graphs) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const GraphData d = test::random_data(6, seed);
    const Graph graph(d);
    test::for_each_order(graph, [&](const std::vector<OpId>& order) {
      const Profile p = profile(graph, order);
      const std::vector<Bytes> live = simulated(d, order);
      CHECK_EQ(p.live, live);
      const auto top = std::max_element(live.begin(), live.end());
      CHECK_EQ(p.peak, *top);
      CHECK_EQ(p.peak_step, static_cast<Step>(top - live.begin()));
    });
  }
}

OLLA_TEST_MAIN
