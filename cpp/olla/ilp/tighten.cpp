#include "olla/ilp/tighten.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr int kMaxRounds = 8;

// Row t, column v: tensor t is an output, or one of its users is v or follows v. A tensor nobody uses is live during its own op
// only and takes part in nothing else.
BitMatrix used_until(const Graph& graph, const Closure& closure) {
  BitMatrix until(graph.num_tensors(), graph.num_ops());
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.output(t)) until.fill(t);
    for (const OpId u : graph.users(t)) until.merge(t, closure.before, u);
  }
  return until;
}

bool born_before_or_at(const Graph& graph, const Closure& closure, TensorId t, OpId v) {
  return graph.producer(t) == kNoOp || closure.before.test(v, graph.producer(t));
}

// During op v: the bytes certainly live, and the tensors that become so once one more op is known to come before (after) v.
struct Around {
  Bytes certain = 0;
  std::vector<TensorId> if_born, if_used;
  Bytes sum_born = 0, sum_used = 0;
};

Around around(const Graph& graph, const Closure& closure, const BitMatrix& until, std::span<const TensorId> tensors, OpId v) {
  Around result;
  result.certain = graph.resident_bytes() + graph.workspace(v);
  for (const TensorId t : tensors) {
    const OpId producer = graph.producer(t);
    const bool used_later = until.test(t, v);
    if (producer == v || (used_later && born_before_or_at(graph, closure, t, v))) {
      result.certain += graph.bytes(t);
    } else if (used_later && !closure.before.test(producer, v)) {
      result.if_born.push_back(t);
      result.sum_born += graph.bytes(t);
    } else if (!used_later && born_before_or_at(graph, closure, t, v)) {
      result.if_used.push_back(t);
      result.sum_used += graph.bytes(t);
    }
  }
  return result;
}

// One round: the precedences found, or nullopt if some op does not fit at all.
std::optional<std::vector<Edge>> implied(const Graph& graph, const Closure& closure, Bytes target,
                                         const std::function<bool()>& stop) {
  const BitMatrix until = used_until(graph, closure);
  std::vector<TensorId> tensors;
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    const bool ever_live = graph.producer(t) != kNoOp || !graph.users(t).empty() || graph.output(t);
    if (graph.planned(t) && graph.bytes(t) > 0 && ever_live) tensors.push_back(t);
  }
  std::vector<Edge> edges;
  for (OpId v = 0; v < graph.num_ops() && !stop(); ++v) {
    const Around a = around(graph, closure, until, tensors, v);
    const Bytes slack = target - a.certain;
    if (slack < 0) return std::nullopt;
    if (a.sum_born <= slack && a.sum_used <= slack) continue;
    for (OpId u = 0; u < graph.num_ops(); ++u) {
      if (closure.comparable(u, v)) continue;
      Bytes if_before = 0, if_after = 0;
      for (const TensorId t : a.if_born) {
        if (closure.before.test(u, graph.producer(t))) if_before += graph.bytes(t);
      }
      for (const TensorId t : a.if_used) {
        if (until.test(t, u)) if_after += graph.bytes(t);
      }
      if (if_before > slack) edges.emplace_back(v, u);
      if (if_after > slack) edges.emplace_back(u, v);
    }
  }
  return edges;
}

}  // namespace

Csr<TensorId> certain_tensors(const Graph& graph, const Closure& closure) {
  const BitMatrix until = used_until(graph, closure);
  Csr<TensorId> result;
  std::vector<TensorId> list;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    list.clear();
    for (TensorId t = 0; t < graph.num_tensors(); ++t) {
      if (!graph.planned(t)) continue;
      if (graph.producer(t) == v || (until.test(t, v) && born_before_or_at(graph, closure, t, v))) list.push_back(t);
    }
    result.push_back(list);
  }
  return result;
}

Bytes certain_peak(const Graph& graph, const Csr<TensorId>& certain) {
  Bytes peak = graph.resident_bytes();
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    Bytes live = graph.resident_bytes() + graph.workspace(v);
    for (const TensorId t : certain[v]) live += graph.bytes(t);
    peak = std::max(peak, live);
  }
  return peak;
}

std::optional<Graph> tighten(const Graph& graph, Bytes target, const std::function<bool()>& stop) {
  Graph result = graph;
  for (int round = 0; round < kMaxRounds; ++round) {
    const Closure closure(result.preds());
    const auto edges = implied(result, closure, target, stop);
    if (!edges) return std::nullopt;
    if (edges->empty()) break;
    try {
      result = result.constrained(*edges);
    } catch (const GraphError& error) {
      if (error.rule() == "cycle") return std::nullopt;  // the precedences contradict each other
      throw;
    }
  }
  return result;
}

}  // namespace olla
