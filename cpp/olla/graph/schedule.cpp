#include "olla/graph/schedule.hpp"

#include <algorithm>
#include <queue>

namespace olla {

Schedule::Schedule(const Graph& graph, std::vector<OpId> ops)
    : order(std::move(ops)), step(order.size()), before(order.size() + 1), live(order.size()), last_(graph.num_tensors(), -1) {
  before[0] = graph.resident_bytes();
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.donated(t) && (graph.output(t) || !graph.users(t).empty())) before[0] += graph.bytes(t);
    if (graph.output(t)) last_[t] = num_steps();
  }
  for (Step s = 0; s < num_steps(); ++s) step[order[s]] = s;
  simulate(graph, 0, num_steps());
  update_peak(graph);
}

Step Schedule::peak_step(Step lo, Step hi) const {
  return static_cast<Step>(std::max_element(live.begin() + lo, live.begin() + hi) - live.begin());
}

void Schedule::rewrite(const Graph& graph, Step lo, std::span<const OpId> ops) {
  for (std::size_t i = 0; i < ops.size(); ++i) {
    order[lo + i] = ops[i];
    step[ops[i]] = lo + static_cast<Step>(i);
  }
  simulate(graph, lo, lo + static_cast<Step>(ops.size()));
}

void Schedule::update_peak(const Graph& graph) {
  peak = order.empty() ? graph.resident_bytes() : *std::max_element(live.begin(), live.end());
}

double Schedule::excess(Bytes level) const {
  double sum = 0;
  for (const Bytes bytes : live) sum += static_cast<double>(std::max<Bytes>(0, bytes - level));
  return sum;
}

void Schedule::simulate(const Graph& graph, Step lo, Step hi) {
  for (Step s = lo; s < hi; ++s) {  // a last use from hi on stays the last: ops change places within the window alone
    auto use = [&](TensorId t) { last_[t] = last_[t] < hi ? s : last_[t]; };
    for (const TensorId t : graph.writes(order[s])) use(t);
    for (const TensorId t : graph.uses(order[s])) use(t);
  }
  for (Step s = lo; s < hi; ++s) {
    const OpId v = order[s];
    const Bytes during = before[s] + graph.new_bytes(v);
    live[s] = during + graph.workspace(v);
    Bytes freed = 0;
    for (const TensorId t : graph.writes(v)) freed += last_[t] == s ? graph.bytes(t) : 0;
    for (const TensorId t : graph.uses(v)) freed += graph.planned(t) && last_[t] == s ? graph.bytes(t) : 0;
    before[s + 1] = during - freed;
  }
}

std::vector<OpId> nearest_order(const Graph& graph, std::span<const OpId> wanted, bool backward) {
  const OpId n = graph.num_ops();
  std::vector<Step> key(n, -1);
  bool permutes = wanted.size() == key.size();
  for (Step s = 0; s < n && permutes; ++s) {
    permutes = wanted[s] >= 0 && wanted[s] < n && key[wanted[s]] < 0;
    if (permutes) key[wanted[s]] = backward ? n - 1 - s : s;
  }
  if (!permutes) throw PlanError("the order is no permutation of the ops", "order", {});
  auto later = [&](OpId a, OpId b) { return key[a] > key[b]; };
  std::priority_queue<OpId, std::vector<OpId>, decltype(later)> ready(later);
  std::vector<std::size_t> missing(n);
  for (OpId v = 0; v < n; ++v) {
    missing[v] = (backward ? graph.succs(v) : graph.preds(v)).size();
    if (missing[v] == 0) ready.push(v);
  }
  std::vector<OpId> result;
  while (!ready.empty()) {
    const OpId v = ready.top();
    ready.pop();
    result.push_back(v);
    for (const OpId w : backward ? graph.preds(v) : graph.succs(v)) {
      if (--missing[w] == 0) ready.push(w);
    }
  }
  if (backward) std::reverse(result.begin(), result.end());
  return result;
}

}  // namespace olla
