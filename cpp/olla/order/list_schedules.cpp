#include "olla/order/list_schedules.hpp"

#include <algorithm>
#include <bit>
#include <queue>
#include <utility>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

// The ready op of least (net, id) over a range of ranks: a complete binary tree, node k above 2k and 2k + 1.
class ReadyOps {
 public:
  using Key = std::pair<Bytes, OpId>;  // bytes live after the op minus before, op

  explicit ReadyOps(OpId num_ops)
      : num_leaves_(std::bit_ceil(static_cast<std::size_t>(num_ops))), best_(2 * num_leaves_, kAbsent) {}

  void set(OpId rank, Key key) {
    std::size_t node = num_leaves_ + static_cast<std::size_t>(rank);
    best_[node] = key;
    while (node > 1) {
      node /= 2;
      best_[node] = std::min(best_[2 * node], best_[2 * node + 1]);
    }
  }
  void remove(OpId rank) { set(rank, kAbsent); }

  OpId best_below(OpId rank) const {  // among ranks below rank; kNoOp if none is ready there
    Key best = kAbsent;
    std::size_t lo = num_leaves_, hi = num_leaves_ + static_cast<std::size_t>(rank);
    for (; lo < hi; lo /= 2, hi /= 2) {
      if ((lo & 1) != 0) best = std::min(best, best_[lo++]);
      if ((hi & 1) != 0) best = std::min(best, best_[--hi]);
    }
    return best == kAbsent ? kNoOp : best.second;
  }
  OpId lowest_rank() const {  // of a ready op; there must be one
    std::size_t node = 1;
    while (node < num_leaves_) node = best_[2 * node] == kAbsent ? 2 * node + 1 : 2 * node;
    return static_cast<OpId>(node - num_leaves_);
  }

 private:
  static constexpr Key kAbsent{std::numeric_limits<Bytes>::max(), std::numeric_limits<OpId>::max()};
  std::size_t num_leaves_;
  std::vector<Key> best_;
};

class LeastPeak {
 public:
  explicit LeastPeak(const Graph& graph)
      : graph_(graph), rank_(graph.num_ops()), waiting_(graph.num_ops(), -1), freed_(graph.num_ops(), 0), ready_(graph.num_ops()) {
    rank_ops_by_size();
    count_users();
  }

  std::vector<OpId> run() {
    Bytes live = 0, outputs = 0;
    for (TensorId t = 0; t < graph_.num_tensors(); ++t) {
      if (graph_.donated(t) && !(graph_.users(t).empty() && !graph_.output(t))) live += graph_.bytes(t);
      if (graph_.output(t) && graph_.planned(t)) outputs += graph_.bytes(t);
    }
    Bytes most = std::max(live, outputs);
    for (OpId v = 0; v < graph_.num_ops(); ++v) {
      waiting_[v] = static_cast<OpId>(graph_.preds(v).size());
      if (waiting_[v] == 0) ready_.set(rank_[v], key(v));
    }
    std::vector<OpId> order;
    while (order.size() < static_cast<std::size_t>(graph_.num_ops())) {
      const OpId v = choose(most - live);
      ready_.remove(rank_[v]);
      waiting_[v] = -1;
      order.push_back(v);
      live += graph_.new_bytes(v);
      most = std::max(most, live);
      live -= freed_[v];
      for (const OpId w : graph_.succs(v)) {
        if (--waiting_[w] == 0) ready_.set(rank_[w], key(w));
      }
      for (const TensorId t : graph_.uses(v)) use(t);
    }
    return order;
  }

 private:
  void rank_ops_by_size() {
    const std::vector<OpId> by_size = sorted_by(graph_.num_ops(), [&](OpId v) { return graph_.new_bytes(v); });
    for (OpId r = 0; r < graph_.num_ops(); ++r) {
      rank_[by_size[r]] = r;
      size_.push_back(graph_.new_bytes(by_size[r]));
    }
  }

  void count_users() {
    for (TensorId t = 0; t < graph_.num_tensors(); ++t) {
      left_.push_back(static_cast<OpId>(graph_.users(t).size()) + (graph_.output(t) ? 1 : 0));
      if (graph_.planned(t) && left_[t] == 1) free_at_users(t);
      if (graph_.producer(t) != kNoOp && left_[t] == 0) freed_[graph_.producer(t)] += graph_.bytes(t);
    }
  }

  void use(TensorId t) {
    if (graph_.planned(t) && --left_[t] == 1) free_at_users(t);
  }

  void free_at_users(TensorId t) {  // all users but one have run; an output counts as a user that never runs
    for (const OpId v : graph_.users(t)) {
      freed_[v] += graph_.bytes(t);
      if (waiting_[v] == 0) ready_.set(rank_[v], key(v));
    }
  }

  ReadyOps::Key key(OpId v) const { return {graph_.new_bytes(v) - freed_[v], v}; }

  OpId choose(Bytes gap) const {
    const auto ranks_up_to = [&](Bytes size) { return static_cast<OpId>(std::ranges::upper_bound(size_, size) - size_.begin()); };
    const OpId within = ready_.best_below(ranks_up_to(gap));
    return within != kNoOp ? within : ready_.best_below(ranks_up_to(size_[ready_.lowest_rank()]));
  }

  const Graph& graph_;
  std::vector<OpId> rank_;     // of op v among all by rising new bytes
  std::vector<Bytes> size_;    // new bytes of the op of rank r
  std::vector<OpId> waiting_;  // predecessors of op v that have not run; -1 before run() and once v has run
  std::vector<Bytes> freed_;   // bytes that op v frees, as far as is known now
  std::vector<OpId> left_;     // users of tensor t that have not run
  ReadyOps ready_;
};

}  // namespace

std::vector<OpId> least_peak_order(const Graph& graph) {
  return graph.num_ops() == 0 ? std::vector<OpId>{} : LeastPeak(graph).run();
}

std::vector<OpId> breadth_first_order(const Graph& graph) {
  std::vector<OpId> waiting(graph.num_ops()), order;
  std::vector<std::vector<Step>> steps(graph.num_ops());  // of the predecessors of op v, rising
  std::vector<Step> step(graph.num_ops());
  const auto later = [&](OpId u, OpId v) { return steps[u] != steps[v] ? steps[u] > steps[v] : u > v; };
  std::priority_queue<OpId, std::vector<OpId>, decltype(later)> ready(later);
  const auto add = [&](OpId v) {
    for (const OpId u : graph.preds(v)) steps[v].push_back(step[u]);
    std::ranges::sort(steps[v]);
    ready.push(v);
  };
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    waiting[v] = static_cast<OpId>(graph.preds(v).size());
    if (waiting[v] == 0) add(v);
  }
  while (!ready.empty()) {
    const OpId v = ready.top();
    ready.pop();
    step[v] = static_cast<Step>(order.size());
    order.push_back(v);
    for (const OpId w : graph.succs(v)) {
      if (--waiting[w] == 0) add(w);
    }
  }
  return order;
}

std::vector<OpId> depth_first_order(const Graph& graph) {
  std::vector<Bytes> touched(graph.num_ops());
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    touched[v] = graph.new_bytes(v);
    for (const TensorId t : graph.uses(v)) touched[v] += graph.planned(t) ? graph.bytes(t) : 0;
  }
  const auto rank = [&](OpId v) { return std::pair(touched[v], v); };

  std::vector<OpId> order;
  std::vector<std::uint8_t> seen(graph.num_ops(), 0);
  std::vector<std::pair<OpId, bool>> stack;  // an op, and whether what it needs stands above it already
  std::vector<OpId> needed;
  for (const OpId root : sorted_by(graph.num_ops(), rank)) {
    stack.emplace_back(root, false);
    while (!stack.empty()) {
      const auto [v, is_open] = stack.back();
      stack.pop_back();
      if (is_open) order.push_back(v);
      if (is_open || std::exchange(seen[v], 1) != 0) continue;
      stack.emplace_back(v, true);
      needed.assign(graph.preds(v).begin(), graph.preds(v).end());
      std::ranges::sort(needed, {}, rank);
      for (auto u = needed.rbegin(); u != needed.rend(); ++u) stack.emplace_back(*u, false);
    }
  }
  return order;
}

}  // namespace olla
