#include "olla/branch.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <queue>

#include "olla/refine.hpp"

namespace olla {
namespace {

using SharedOrder = std::shared_ptr<const std::vector<OpId>>;

struct Node {
  Bytes bound;
  std::int64_t number;  // of creation: later nodes lie deeper and go first among equals
  std::vector<Edge> edges;
  SharedOrder order;  // valid without the last edge; repaired when the node is opened
};

struct Later {
  bool operator()(const Node& a, const Node& b) const { return a.bound != b.bound ? a.bound > b.bound : a.number < b.number; }
};

// The topological order that stays closest to `order`: the ready op that stands first in it runs next. With `backward`, the mirror
// image: the last place goes to the op that stands last among those whose successors are placed.
std::vector<OpId> repair(const Graph& graph, std::span<const OpId> order, bool backward) {
  const OpId n = graph.num_ops();
  std::vector<Step> key(n);
  for (Step s = 0; s < n; ++s) key[order[s]] = backward ? n - 1 - s : s;
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

// Marks the ancestors (backward) or descendants of v, and v.
std::vector<std::uint8_t> reached(const Graph& graph, OpId v, bool backward) {
  std::vector<std::uint8_t> marked(graph.num_ops(), 0);
  std::vector<OpId> queue{v};
  marked[v] = 1;
  while (!queue.empty()) {
    const OpId u = queue.back();
    queue.pop_back();
    for (const OpId w : backward ? graph.preds(u) : graph.succs(u)) {
      if (marked[w] == 0) {
        marked[w] = 1;
        queue.push_back(w);
      }
    }
  }
  return marked;
}

struct Branch {
  Edge edge[2];   // u before v, v before u
  Bytes need[2];  // the more demanding cut of the two ops under that edge: a bound of the child
  Bytes weaker() const { return std::min(need[0], need[1]); }
  Bytes stronger() const { return std::max(need[0], need[1]); }
};

class Tree {
 public:
  Tree(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result)
      : graph_(graph), options_(options), control_(control), best_(best), result_(result) {}

  void search() {
    open_.push({result_.bound, 0, {}, std::make_shared<std::vector<OpId>>(best_.order)});
    while (!open_.empty()) {
      result_.bound = std::max(result_.bound, std::min({open_.top().bound, best_.peak, unresolved_}));
      if (result_.bound >= best_.peak || result_.num_nodes >= options_.max_nodes || control_.stop(best_.peak, result_.bound))
        return;
      Node node = open_.top();
      open_.pop();
      ++result_.num_nodes;
      if (!expand(node)) return;  // out of time: the node stays open and its bound is already counted
    }
    result_.bound = std::max(result_.bound, std::min(best_.peak, unresolved_));
  }

 private:
  // False if time ran out before the node was settled.
  bool expand(Node& node) {
    for (bool changed = true; changed && node.bound < best_.peak;) {
      const std::optional<Graph> constrained = graph_.constrained_if_acyclic(node.edges);
      if (!constrained) return true;  // no order better than the best one obeys what this node implies
      Schedule schedule = repaired(*constrained, *node.order);
      if (Schedule other = repaired(*constrained, best_.order); other.peak < schedule.peak) schedule = std::move(other);
      Refiner refiner(*constrained, control_, options_.seed + static_cast<std::uint64_t>(result_.num_nodes));
      changed = improve(*constrained, refiner, schedule, node);
      result_.num_cuts += refiner.num_cuts();
      if (control_.stop(best_.peak, result_.bound)) return false;
    }
    return true;
  }

  // Settles or branches the node (false), or adds precedences to it and asks for another round (true).
  bool improve(const Graph& graph, Refiner& refiner, Schedule& schedule, Node& node) {
    constexpr int kPasses = 6;
    constexpr std::int64_t kBoundCuts = 40;
    refiner.refine(schedule, node.bound, TieBreak::kPrefix, kPasses);
    if (schedule.peak < best_.peak) best_ = schedule;
    if (node.bound < best_.peak) refiner.raise_bound(schedule, node.bound, kBoundCuts);
    if (node.bound >= best_.peak) return false;
    node.order = std::make_shared<std::vector<OpId>>(schedule.order);
    if (propagate(refiner, schedule, node)) return true;

    Schedule followed = schedule;
    std::vector<Conflict> conflicts;
    if (!refiner.pass(followed, node.bound, TieBreak::kPrefix, &conflicts)) return false;
    followed.update_peak(graph);
    if (followed.peak < best_.peak) {
      best_ = followed;
      return true;
    }
    const std::optional<Branch> chosen = choose(refiner, schedule, pairs_at_stake(graph, conflicts));
    if (!chosen) {
      unresolved_ = std::min(unresolved_, node.bound);
      return false;
    }
    const bool open[2] = {chosen->need[0] < best_.peak, chosen->need[1] < best_.peak};
    if (open[0] != open[1]) {
      node.edges.push_back(chosen->edge[open[0] ? 0 : 1]);
      return true;
    }
    for (int i = 0; i < 2 && open[0]; ++i) push_child(node, chosen->edge[i], chosen->need[i]);
    return false;
  }

  // Adds to the node what every order better than the best one must obey at the ops that stand highest. False if nothing is new.
  bool propagate(Refiner& refiner, const Schedule& schedule, Node& node) {
    constexpr std::size_t kOps = 24;
    std::vector<OpId> ops = schedule.order;
    auto higher = [&](OpId a, OpId b) {
      return std::pair(-schedule.live[schedule.step[a]], a) < std::pair(-schedule.live[schedule.step[b]], b);
    };
    const auto end = ops.begin() + static_cast<std::ptrdiff_t>(std::min(kOps, ops.size()));
    std::partial_sort(ops.begin(), end, ops.end(), higher);
    const std::size_t before = node.edges.size();
    for (auto it = ops.begin(); it != end; ++it) {
      const std::vector<Edge> edges = refiner.implied(schedule, *it, best_.peak - 1);
      node.edges.insert(node.edges.end(), edges.begin(), edges.end());
    }
    return node.edges.size() > before;
  }

  void push_child(const Node& node, Edge edge, Bytes bound) {
    Node child{std::max(node.bound, bound), ++num_created_, node.edges, node.order};
    child.edges.push_back(edge);
    open_.push(std::move(child));
  }

  Schedule repaired(const Graph& graph, std::span<const OpId> order) const {
    if (graph.is_order(order)) return Schedule(graph, {order.begin(), order.end()});
    Schedule forward(graph, repair(graph, order, false)), backward(graph, repair(graph, order, true));
    return forward.peak <= backward.peak ? forward : backward;
  }

  // Strong branching: the pair whose easier direction needs most. Nothing without a pair, or if time ran out.
  std::optional<Branch> choose(Refiner& refiner, const Schedule& schedule, std::span<const Edge> pairs) {
    std::optional<Branch> best;
    for (const Edge& pair : pairs) {
      Branch branch{{pair, {pair.second, pair.first}}, {0, 0}};
      for (int i = 0; i < 2; ++i) {
        for (const OpId v : {pair.first, pair.second}) {
          if (branch.need[i] >= best_.peak) break;
          branch.need[i] = std::max(branch.need[i], refiner.whole_cut(schedule, v, branch.edge[i], best_.peak).value);
        }
      }
      if (control_.stop(best_.peak, result_.bound)) return std::nullopt;
      if (!best || std::pair(branch.weaker(), branch.stronger()) > std::pair(best->weaker(), best->stronger())) best = branch;
      if (best->stronger() >= best_.peak) break;  // one child is closed already: the other precedence is implied
    }
    return best;
  }

  // (waypoint, op) for the conflicts that stand highest, where neither has to run before the other.
  std::vector<Edge> pairs_at_stake(const Graph& graph, std::vector<Conflict>& conflicts) const {
    constexpr std::size_t kPairs = 24;
    std::stable_sort(conflicts.begin(), conflicts.end(), [](const Conflict& a, const Conflict& b) { return a.value > b.value; });
    std::vector<Edge> pairs;
    for (const Conflict& conflict : conflicts) {
      if (conflict.value < best_.peak) break;
      const auto ancestors = reached(graph, conflict.op, true), descendants = reached(graph, conflict.op, false);
      for (const OpId u : conflict.waypoints) {
        if (ancestors[u] == 0 && descendants[u] == 0 && pairs.size() < kPairs) pairs.emplace_back(u, conflict.op);
      }
    }
    return pairs;
  }

  const Graph& graph_;
  const OrderOptions& options_;
  Control& control_;
  Schedule& best_;
  OrderResult& result_;
  std::priority_queue<Node, std::vector<Node>, Later> open_;
  std::int64_t num_created_ = 0;
  Bytes unresolved_ = kMaxBytes;  // least bound of the nodes given up without a proof
};

}  // namespace

void branch_and_bound(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result) {
  Tree(graph, options, control, best, result).search();
}

}  // namespace olla
