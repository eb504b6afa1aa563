// Small graphs for tests: written down by hand, or random.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>

#include "olla/graph/graph.hpp"

namespace olla::test {

struct Op {
  std::vector<TensorId> reads = {}, writes = {}, mutates = {};
  std::vector<OpId> after = {};
  Bytes workspace = 0;
  bool random = false;
};

inline GraphData data(std::vector<Bytes> tensor_bytes, const std::vector<Op>& ops, std::vector<TensorId> outputs = {},
                      const std::vector<TensorId>& donated = {}) {
  GraphData d;
  d.donated.assign(tensor_bytes.size(), 0);
  for (const TensorId t : donated) d.donated[t] = 1;
  d.tensor_bytes = std::move(tensor_bytes);
  for (const Op& op : ops) {
    d.reads.push_back(op.reads);
    d.writes.push_back(op.writes);
    d.mutates.push_back(op.mutates);
    d.after.push_back(op.after);
    d.workspace_bytes.push_back(op.workspace);
    d.random.push_back(op.random);
  }
  d.outputs = std::move(outputs);
  return d;
}

// num_ops ops, each with up to two reads of earlier tensors, sometimes a mutation, an extra predecessor, a workspace.
inline GraphData random_data(OpId num_ops, std::uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](std::size_t n) { return static_cast<std::int32_t>(random() % n); };
  std::vector<Bytes> bytes;
  for (int i = 0; i < 3; ++i) bytes.push_back(below(20));  // resident; tensor 0 donated
  std::vector<Op> ops(num_ops);
  for (OpId v = 0; v < num_ops; ++v) {
    Op& op = ops[v];
    for (int i = below(3); i > 0; --i) op.reads.push_back(below(bytes.size()));
    if (below(4) == 0) op.mutates.push_back(below(bytes.size()));
    if (v > 0 && below(8) == 0) op.after.push_back(below(v));
    for (int i = below(3); i > 0; --i) {
      op.writes.push_back(static_cast<TensorId>(bytes.size()));
      bytes.push_back(below(20));
    }
    op.workspace = below(3) == 0 ? below(20) : 0;
    op.random = below(5) == 0;
  }
  const TensorId output = below(bytes.size());
  return data(std::move(bytes), ops, {output}, {0});
}

inline std::vector<OpId> program_order(const Graph& graph) {
  std::vector<OpId> order(graph.num_ops());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Calls visit(order) for every valid order: n! permutations, so few ops only.
template <class Visit>
void for_each_order(const Graph& graph, Visit visit) {
  std::vector<OpId> order = program_order(graph);
  do {
    if (graph.is_order(order)) visit(order);
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace olla::test
