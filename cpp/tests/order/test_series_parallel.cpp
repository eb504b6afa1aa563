#include <chrono>
#include <map>

#include "graphs.hpp"
#include "olla/graph/paths.hpp"
#include "olla/graph/profile.hpp"
#include "olla/order/order.hpp"
#include "olla/order/series_parallel.hpp"
#include "test.hpp"

using namespace olla;

namespace {

// A random series-parallel order on num ops, as edges from op to op; or a tree, up or down. No recursion: parts are joined at
// random.
std::vector<Edge> random_edges(OpId num, std::mt19937& random, bool tree, bool out) {
  std::vector<Edge> edges;
  if (tree) {
    for (OpId v = 1; v < num; ++v) {
      const auto u = static_cast<OpId>(random() % v);
      edges.push_back(out ? Edge{u, v} : Edge{num - 1 - v, num - 1 - u});
    }
    return edges;
  }
  struct Part {
    std::vector<OpId> first, last;
  };
  std::vector<Part> parts;
  for (OpId v = 0; v < num; ++v) parts.push_back({{v}, {v}});
  while (parts.size() > 1) {  // neighbours are joined, so that the numbers stay a valid order
    const std::size_t i = random() % (parts.size() - 1);
    Part &a = parts[i], &b = parts[i + 1];
    if (random() % 2 == 0) {
      for (const OpId u : a.last)
        for (const OpId v : b.first) edges.emplace_back(u, v);
      a.last = b.last;
    } else {
      a.first.insert(a.first.end(), b.first.begin(), b.first.end());
      a.last.insert(a.last.end(), b.last.begin(), b.last.end());
    }
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
  return edges;
}

// A tensor for every edge (or one for all edges of an op, where shared), workspaces, in-place changes of a resident tensor of each
// op's own, results that nobody reads, and outputs.
GraphData with_tensors(OpId num, const std::vector<Edge>& edges, std::mt19937& random, Bytes largest, bool shared) {
  const auto size = [&] { return static_cast<Bytes>(random() % static_cast<std::uint64_t>(largest + 1)); };
  std::vector<test::Op> ops(num);
  std::vector<Bytes> bytes;
  std::vector<TensorId> outputs, donated, made(num, -1);
  const auto tensor = [&] {
    bytes.push_back(size());
    return static_cast<TensorId>(bytes.size()) - 1;
  };
  for (const auto& [u, v] : edges) {
    TensorId t = made[u];
    if (t < 0 || !shared) {
      t = made[u] = tensor();
      ops[u].writes.push_back(t);
    }
    ops[v].reads.push_back(t);
  }
  for (test::Op& op : ops) {
    if (random() % 3 == 0) op.workspace = size();
    if (random() % 4 == 0) op.mutates.push_back(tensor());
    if (random() % 4 == 0) {
      op.writes.push_back(tensor());
      if (random() % 2 == 0) outputs.push_back(op.writes.back());
    }
    if (random() % 6 == 0) {
      donated.push_back(tensor());
      op.reads.push_back(donated.back());
    }
  }
  return test::data(std::move(bytes), ops, std::move(outputs), donated);
}

// Least peak over all sets of ops that may have run: for about 12 ops.
Bytes least_peak(const Graph& graph) {
  std::map<std::uint32_t, Bytes> best{{0, graph.resident_bytes()}};
  for (OpId step = 0; step < graph.num_ops(); ++step) {
    std::map<std::uint32_t, Bytes> longer;
    for (const auto& [done, peak] : best) {
      const auto ran = [&, done = done](OpId v) { return (done >> v & 1) != 0; };
      Bytes live = graph.resident_bytes();
      for (TensorId t = 0; t < graph.num_tensors(); ++t) {
        if (!graph.planned(t) || (graph.producer(t) != kNoOp && !ran(graph.producer(t)))) continue;
        if (graph.output(t) || !std::ranges::all_of(graph.users(t), ran)) live += graph.bytes(t);
      }
      for (OpId v = 0; v < graph.num_ops(); ++v) {
        if (ran(v) || !std::ranges::all_of(graph.preds(v), ran)) continue;
        const Bytes highest = std::max(peak, live + graph.new_bytes(v) + graph.workspace(v));
        const auto [entry, fresh] = longer.try_emplace(done | 1u << v, highest);
        entry->second = std::min(entry->second, highest);
      }
    }
    best = std::move(longer);
  }
  return best.begin()->second;
}

SeriesParallelResult solve(const Graph& graph, int max_rounds = 8) {
  Control control("order", 60, {});
  return series_parallel_order(graph, test::program_order(graph), max_rounds, control);
}

}  // namespace

TEST(trees_and_series_parallel_graphs_reach_the_best_of_all_orders) {
  for (std::uint32_t seed = 0; seed < (test::kSanitized ? 300u : 3000u); ++seed) {
    std::mt19937 random(seed);
    const auto num = static_cast<OpId>(1 + random() % 9);
    const auto edges = random_edges(num, random, seed % 3 != 0, seed % 3 == 1);
    constexpr Bytes kLargest[] = {1, 4, 30, 1000};
    const Graph graph(with_tensors(num, edges, random, kLargest[random() % 4], false));
    const SeriesParallelResult result = solve(graph);
    CHECK(graph.is_order(result.order));
    CHECK_EQ(result.peak, profile(graph, result.order).peak);
    CHECK_EQ(result.bound, result.peak);
    CHECK_EQ(result.peak, least_peak(graph));
  }
}

TEST(tensors_of_several_readers_leave_a_bound_that_holds) {
  int num_proved = 0;
  for (std::uint32_t seed = 0; seed < 600; ++seed) {
    std::mt19937 random(seed);
    const auto num = static_cast<OpId>(1 + random() % 8);
    const auto edges = random_edges(num, random, seed % 3 != 0, seed % 3 == 1);
    const Graph graph(with_tensors(num, edges, random, 30, true));
    const SeriesParallelResult result = solve(graph);
    const Bytes least = least_peak(graph);
    CHECK(graph.is_order(result.order));
    CHECK_EQ(result.peak, profile(graph, result.order).peak);
    CHECK(result.bound <= least && least <= result.peak);
    num_proved += result.bound == result.peak ? 1 : 0;
  }
  CHECK(num_proved > 450);
}

TEST(trees_whose_children_share_a_tensor_are_nearly_all_proved) {
  int num_proved = 0, num_best = 0;
  constexpr int kTrees = test::kSanitized ? 200 : 2000;
  for (std::uint32_t seed = 0; seed < kTrees; ++seed) {
    std::mt19937 random(seed);
    const auto num = static_cast<OpId>(2 + random() % 11);
    const Bytes largest = seed % 4 == 0 ? 3 : 100;
    const auto size = [&] { return static_cast<Bytes>(random() % static_cast<std::uint64_t>(largest + 1)); };
    std::vector<test::Op> ops(num);
    std::vector<Bytes> bytes;
    for (OpId v = 0; v < num; ++v) {
      if (v > 0) ops[v].reads = {static_cast<TensorId>(seed % 2 == 0 ? random() % v : std::max<OpId>(0, v - 1 - random() % 3))};
      ops[v].writes = {v};
      ops[v].workspace = random() % 3 == 0 ? size() : 0;
      bytes.push_back(size());
    }
    const Graph graph(test::data(std::move(bytes), ops));
    const SeriesParallelResult result = solve(graph);
    const Bytes least = least_peak(graph);
    CHECK(graph.is_order(result.order));
    CHECK_EQ(result.peak, profile(graph, result.order).peak);
    CHECK(result.bound <= least && least <= result.peak);
    num_proved += result.bound == result.peak ? 1 : 0;
    num_best += least == result.peak ? 1 : 0;
  }
  CHECK(num_proved > kTrees * 97 / 100);
  CHECK(num_best > kTrees * 98 / 100);
}

TEST(a_graph_that_is_not_series_parallel_has_no_answer) {
  // 0 -> 2, 0 -> 3, 1 -> 3: the smallest one.
  const Graph graph(test::data({1, 1, 1}, {{.writes = {0, 1}}, {.writes = {2}}, {.reads = {0}}, {.reads = {1, 2}}}));
  const SeriesParallelResult result = solve(graph);
  CHECK(result.order.empty());
  CHECK_EQ(result.bound, 0);
}

TEST(dependencies_that_longer_paths_imply_are_left_out) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Graph graph(test::random_data(static_cast<OpId>(seed % 30), seed));
    const OpId n = graph.num_ops();
    std::vector<std::vector<std::uint8_t>> before(n, std::vector<std::uint8_t>(n, 0));  // [v][u]: u must run before v
    for (OpId v = 0; v < n; ++v) {
      for (const OpId u : graph.preds(v)) {
        before[v][u] = 1;
        for (OpId w = 0; w < n; ++w) before[v][w] |= before[u][w];
      }
    }
    const Precedences known = precedences(graph, [] { return false; });
    for (OpId v = 0; v < n; ++v) {
      std::vector<OpId> expected;
      for (const OpId u : graph.preds(v)) {
        if (std::ranges::none_of(graph.preds(v), [&](OpId w) { return before[w][u] != 0; })) expected.push_back(u);
      }
      CHECK(std::ranges::equal(known.preds[v], expected));
    }
    for (TensorId t = 0; t < graph.num_tensors(); ++t) {
      OpId expected = kNoOp;
      for (const OpId v : graph.users(t)) {
        if (std::ranges::all_of(graph.users(t), [&](OpId u) { return u == v || before[v][u] != 0; })) expected = v;
      }
      CHECK_EQ(known.last_user[t], graph.planned(t) ? expected : kNoOp);
    }
  }
}

TEST(paths_across_many_blocks_are_found) {
  constexpr OpId kLength = 3000;  // a chain in which every op also reads what the one 700 ops before has made
  std::vector<test::Op> ops(kLength);
  for (OpId v = 0; v < kLength; ++v) {
    ops[v].writes = {v};
    if (v > 0) ops[v].reads.push_back(v - 1);
    if (v >= 700) ops[v].reads.push_back(v - 700);
  }
  const Graph graph(test::data(std::vector<Bytes>(kLength, 1), ops));
  const Precedences known = precedences(graph, [] { return false; });
  for (OpId v = 1; v < kLength; ++v) CHECK(known.preds[v].size() == 1 && known.preds[v][0] == v - 1);
  const SeriesParallelResult result = solve(graph);
  CHECK_EQ(result.bound, result.peak);
}

TEST(large_trees_and_series_parallel_graphs_are_proved_within_a_second) {
  for (const bool tree : {false, true}) {
    for (const bool out : {false, true}) {
      std::mt19937 random(out ? 5 : 6);
      constexpr OpId kOps = 20'000;
      std::vector<Edge> edges = random_edges(tree ? kOps : 2000, random, tree, out);
      const Graph graph(with_tensors(tree ? kOps : 2000, edges, random, 1 << 20, false));
      const auto begin = std::chrono::steady_clock::now();
      Control control("order", 60, {});
      const std::vector<OpId> starts[] = {test::program_order(graph)};
      const OrderResult result = order(graph, starts, {}, control);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      CHECK(result.status == Status::kOptimal);
      if (!test::kSanitized) CHECK(seconds.count() < 5);
    }
  }
}

OLLA_TEST_MAIN
