#include "olla/order/series_parallel.hpp"

#include <algorithm>
#include <unordered_map>

#include "olla/base/hash.hpp"
#include "olla/base/lists.hpp"
#include "olla/graph/paths.hpp"
#include "olla/graph/profile.hpp"
#include "olla/order/out_tree.hpp"
#include "olla/order/segments.hpp"

namespace olla {
namespace {

// The part of `other` joins that of `part`: behind it, or beside it.
struct Join {
  OpId part, other;
  bool series;
};

// Reduces the precedences: parts with the same neighbours are joined in parallel, parts that have only each other in series. A
// series-parallel order ends as one part. A part is named by one of its ops; neighbours before it list its first op, those after
// it its last. Expected O(ops + dependencies).
class Decomposition {
 public:
  explicit Decomposition(const Csr<OpId>& preds) : nodes_(preds.size()), ends_at_(preds.size()), begins_at_(preds.size()) {
    const Csr<OpId> succs = transposed(preds, preds.size());
    for (OpId v = 0; v < preds.size(); ++v) {
      nodes_[v] = {v, v, {preds[v].begin(), preds[v].end()}, {succs[v].begin(), succs[v].end()}};
      ends_at_[v] = begins_at_[v] = v;
      for (const OpId u : preds[v]) nodes_[v].pred_sum += key(u);
      for (const OpId w : succs[v]) nodes_[v].succ_sum += key(w);
      nodes_[v].num_preds = preds[v].size();
      nodes_[v].num_succs = succs[v].size();
      queue_.push_back(v);
    }
    num_parts_ = preds.size();
    while (!queue_.empty()) {
      const OpId v = queue_.back();
      queue_.pop_back();
      while (nodes_[v].alive && (try_series(v) || try_parallel(v))) {
      }
    }
  }

  const std::vector<Join>& joins() const { return joins_; }
  bool complete() const { return num_parts_ <= 1; }

 private:
  struct Node {
    OpId first = kNoOp, last = kNoOp;
    std::vector<OpId> preds,
        succs;  // last ops of parts before, first ops of parts behind; those of parts that are gone stay listed
    std::uint64_t pred_sum = 0, succ_sum = 0;
    std::int64_t num_preds = 0, num_succs = 0;
    bool alive = true;
  };

  static std::uint64_t key(OpId v) { return mixed(static_cast<std::uint64_t>(v) + 1); }
  std::uint64_t signature(const Node& node) const { return mixed(node.pred_sum) + 3 * mixed(node.succ_sum + 1); }

  void drop_gone(Node& node) {
    std::erase_if(node.preds, [&](OpId u) { return ends_at_[u] == kNoOp; });
    std::erase_if(node.succs, [&](OpId w) { return begins_at_[w] == kNoOp; });
  }

  bool try_series(OpId v) {
    if (nodes_[v].num_succs == 1) {
      drop_gone(nodes_[v]);
      const OpId w = begins_at_[nodes_[v].succs.front()];
      if (nodes_[w].num_preds == 1) return join_series(v, w);
    }
    if (nodes_[v].num_preds == 1) {
      drop_gone(nodes_[v]);
      const OpId u = ends_at_[nodes_[v].preds.front()];
      if (nodes_[u].num_succs == 1) return join_series(u, v);
    }
    return false;
  }

  bool join_series(OpId v, OpId w) {
    Node &front = nodes_[v], &back = nodes_[w];
    ends_at_[front.last] = kNoOp;
    begins_at_[back.first] = kNoOp;
    front.last = back.last;
    front.succs = std::move(back.succs);
    front.succ_sum = back.succ_sum;
    front.num_succs = back.num_succs;
    ends_at_[front.last] = v;
    absorb(v, w, true);
    queue_.push_back(v);
    return true;
  }

  bool try_parallel(OpId v) {
    const auto [found, fresh] = by_signature_.try_emplace(signature(nodes_[v]), v);
    const OpId u = found->second;
    if (fresh || u == v) return false;
    found->second = v;
    if (!nodes_[u].alive || !same_neighbours(nodes_[u], nodes_[v])) return false;
    Node& gone = nodes_[u];
    for (const OpId p : gone.preds) {
      Node& before = nodes_[ends_at_[p]];
      before.succ_sum -= key(gone.first);
      --before.num_succs;
      queue_.push_back(ends_at_[p]);
    }
    for (const OpId s : gone.succs) {
      Node& behind = nodes_[begins_at_[s]];
      behind.pred_sum -= key(gone.last);
      --behind.num_preds;
      queue_.push_back(begins_at_[s]);
    }
    begins_at_[gone.first] = ends_at_[gone.last] = kNoOp;
    absorb(v, u, false);
    return true;
  }

  bool same_neighbours(Node& a, Node& b) {
    if (a.num_preds != b.num_preds || a.num_succs != b.num_succs || a.pred_sum != b.pred_sum || a.succ_sum != b.succ_sum)
      return false;
    drop_gone(a);
    drop_gone(b);
    const auto same = [](std::vector<OpId>& x, std::vector<OpId>& y) {
      std::ranges::sort(x);
      std::ranges::sort(y);
      return x == y;
    };
    return same(a.preds, b.preds) && same(a.succs, b.succs);
  }

  void absorb(OpId part, OpId other, bool series) {
    nodes_[other].alive = false;
    joins_.push_back({part, other, series});
    --num_parts_;
  }

  std::vector<Node> nodes_;
  std::vector<OpId> ends_at_, begins_at_;  // of op v: the part whose last, or first, op it is; kNoOp once there is none
  std::vector<OpId> queue_;
  std::unordered_map<std::uint64_t, OpId> by_signature_;
  std::vector<Join> joins_;
  std::int64_t num_parts_ = 0;
};

// What is live before the first op.
Bytes live_at_start(const Graph& graph) {
  Bytes live = graph.resident_bytes();
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.donated(t) && (graph.output(t) || !graph.users(t).empty())) live += graph.bytes(t);
  }
  return live;
}

// Of op v: the bytes that are charged to it as freed.
std::vector<Bytes> freed_bytes(const Graph& graph, std::span<const OpId> charged) {
  std::vector<Bytes> freed(graph.num_ops(), 0);
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (!graph.planned(t) || graph.output(t)) continue;
    const OpId v = charged[t] != kNoOp ? charged[t] : graph.producer(t);
    if (v != kNoOp) freed[v] += graph.bytes(t);
  }
  return freed;
}

// The best order if op charged[t] frees tensor t; its bound is the peak under these charges. The root of an out-tree stands for
// all its ops: with the segments of their order, or, with `least`, those of its bound.
SeriesParallelResult solve(const Graph& graph, const Decomposition& parts, std::span<const OpId> charged, const OutTrees& trees,
                           std::vector<OpId> next, bool least) {
  const std::vector<Bytes> freed = freed_bytes(graph, charged);
  std::vector<std::vector<Segment>> runs(graph.num_ops());
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    runs[v] = {trees.below(v) ? Segment{} : Segment{graph.new_bytes(v) + graph.workspace(v), graph.new_bytes(v) - freed[v], v, v}};
  }
  for (const OpId root : trees.roots()) {
    const std::vector<Segment> below = least ? trees.least_segments(root) : trees.tree(root).segments;
    runs[root].insert(runs[root].end(), below.begin(), below.end());
    runs[root] = canonical(runs[root], next);
  }
  std::vector<SegmentList> lists;
  lists.reserve(graph.num_ops());
  for (const std::vector<Segment>& run : runs) lists.emplace_back(run);
  OpId root = 0;
  for (const auto [part, other, series] : parts.joins()) {
    series ? lists[part].join_series(lists[other], next) : lists[part].join_parallel(lists[other]);
    root = part;
  }
  SeriesParallelResult result;
  Bytes live = live_at_start(graph);
  result.bound = live;
  for (const Segment& segment : lists[root].segments()) {
    result.bound = std::max(result.bound, live + segment.hill);
    live += segment.rise;
    for (OpId v = segment.first; v != kNoOp; v = v == segment.last ? kNoOp : next[v]) result.order.push_back(v);
  }
  return result;
}

}  // namespace

SeriesParallelResult series_parallel_order(const Graph& graph, std::span<const OpId> start, int max_rounds, Control& control) {
  SeriesParallelResult best;
  if (graph.num_ops() == 0) return best;
  const Precedences known = precedences(graph, [&] { return control.late(); });
  if (known.preds.size() != graph.num_ops()) return best;
  const Decomposition parts(known.preds);
  if (!parts.complete()) return best;

  std::vector<OpId> next(graph.num_ops(), kNoOp);
  const OutTrees trees(graph, known, next);
  std::vector<OpId> order(start.begin(), start.end()), charged = known.last_user;
  for (int round = 0; round < max_rounds && !control.late(); ++round) {
    const Lifetimes lives = lifetimes(graph, order);
    for (TensorId t = 0; t < graph.num_tensors(); ++t) {
      if (known.last_user[t] == kNoOp && !graph.users(t).empty() && !graph.output(t)) charged[t] = order[lives.last[t] - 1];
    }
    SeriesParallelResult found = solve(graph, parts, charged, trees, next, false);
    found.peak = profile(graph, found.order).peak;
    const bool exact = trees.roots().empty();
    best.bound = std::max(best.bound, exact ? found.bound : solve(graph, parts, charged, trees, next, true).bound);
    order = found.order;
    if (best.order.empty() || found.peak < best.peak) {
      best.peak = found.peak;
      best.order = std::move(found.order);
    }
    if (best.peak == best.bound) break;
  }
  return best;
}

}  // namespace olla
