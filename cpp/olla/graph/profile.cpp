#include "olla/graph/profile.hpp"

#include <algorithm>

namespace olla {

Lifetimes lifetimes(const Graph& graph, std::span<const OpId> order) {
  const Step num_steps = graph.num_ops();
  Lifetimes result;
  result.first.assign(graph.num_tensors(), 0);
  result.last.assign(graph.num_tensors(), 0);
  for (Step s = 0; s < num_steps; ++s) {
    for (const TensorId t : graph.writes(order[s])) {
      result.first[t] = s;
      result.last[t] = s + 1;
    }
    for (const TensorId t : graph.uses(order[s])) result.last[t] = s + 1;
  }
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (!graph.planned(t) || graph.output(t)) result.last[t] = num_steps;
  }
  return result;
}

Profile profile(const Graph& graph, std::span<const OpId> order) {
  const Step num_steps = graph.num_ops();
  Profile result;
  result.lifetimes = lifetimes(graph, order);
  const auto& [first, last] = result.lifetimes;

  std::vector<Bytes> change(num_steps + 1, 0);  // live bytes at step s minus those at s - 1
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (!graph.planned(t) || first[t] == last[t]) continue;
    change[first[t]] += graph.bytes(t);
    change[last[t]] -= graph.bytes(t);
  }
  result.live.resize(num_steps);
  result.peak = graph.resident_bytes();
  Bytes live = graph.resident_bytes();
  for (Step s = 0; s < num_steps; ++s) {
    live += change[s];
    result.live[s] = live + graph.workspace(order[s]);
    if (s == 0 || result.live[s] > result.peak) {
      result.peak = result.live[s];
      result.peak_step = s;
    }
  }
  return result;
}

}  // namespace olla
