#include "olla/order/branch.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <queue>
#include <ranges>
#include <tuple>

#include "olla/order/refine.hpp"

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

// Precedences a child adds to its node, and the memory they force on some op: a bound of the child.
struct Alternative {
  std::vector<Edge> edges;
  Bytes need = 0;
};

// Alternatives of which every order obeys one.
using Branching = std::vector<Alternative>;

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
    std::optional<Branching> chosen = choose(graph, refiner, schedule, conflicts);
    if (!chosen) {
      unresolved_ = std::min(unresolved_, node.bound);
      return false;
    }
    std::erase_if(*chosen, [&](const Alternative& a) { return a.need >= best_.peak; });
    if (chosen->size() == 1) {
      node.edges.insert(node.edges.end(), chosen->front().edges.begin(), chosen->front().edges.end());
      return true;
    }
    for (const Alternative& alternative : *chosen) push_child(node, alternative);
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

  void push_child(const Node& node, const Alternative& alternative) {
    Node child{std::max(node.bound, alternative.need), ++num_created_, node.edges, node.order};
    child.edges.insert(child.edges.end(), alternative.edges.begin(), alternative.edges.end());
    open_.push(std::move(child));
  }

  Schedule repaired(const Graph& graph, std::span<const OpId> order) const {
    if (graph.is_order(order)) return Schedule(graph, {order.begin(), order.end()});
    Schedule forward(graph, nearest_order(graph, order)), backward(graph, nearest_order(graph, order, true));
    return forward.peak <= backward.peak ? forward : backward;
  }

  // Strong branching: the branching whose easiest alternative needs most. Nothing if none is at stake, or time ran out.
  std::optional<Branching> choose(const Graph& graph, Refiner& refiner, const Schedule& schedule,
                                  std::vector<Conflict>& conflicts) {
    constexpr std::size_t kPairs = 24, kRivals = 64;
    std::ranges::stable_sort(conflicts, std::ranges::greater(), &Conflict::value);
    std::optional<Branching> best;
    bool in_time = true;
    auto decided = [&](Branching branching) {
      in_time = !control_.stop(best_.peak, result_.bound);
      if (!best || rank(branching) > rank(*best)) best = std::move(branching);
      return !in_time || num_open(*best) <= 1;
    };
    std::size_t num_pairs = 0;
    bool done = false;
    for (std::size_t i = 0; i < conflicts.size() && conflicts[i].value >= best_.peak && !done; ++i) {
      const OpId v = conflicts[i].op;
      std::vector<OpId> rivals = incomparable(graph, v, conflicts[i].waypoints);
      for (std::size_t j = 0; j < rivals.size() && num_pairs++ < kPairs && !done; ++j) {
        done = decided({before(refiner, schedule, rivals[j], v), before(refiner, schedule, v, rivals[j])});
      }
      if (i > 0 || rivals.size() < 2 || rivals.size() > kRivals) continue;
      rivals.push_back(v);
      done = done || decided(last_or_first(graph, refiner, schedule, rivals, true)) ||
             decided(last_or_first(graph, refiner, schedule, rivals, false));
    }
    return in_time ? best : std::nullopt;
  }

  std::int64_t num_open(const Branching& branching) const {
    return std::count_if(branching.begin(), branching.end(), [&](const Alternative& a) { return a.need < best_.peak; });
  }

  std::tuple<Bytes, std::int64_t, Bytes> rank(const Branching& branching) const {
    if (branching.empty()) return {kMaxBytes, 0, kMaxBytes};
    const auto [easiest, hardest] = std::ranges::minmax(branching | std::views::transform(&Alternative::need));
    return {easiest, -num_open(branching), hardest};
  }

  Alternative before(Refiner& refiner, const Schedule& schedule, OpId u, OpId v) const {
    Bytes need = refiner.need(schedule, v, std::span(&u, 1), {}, best_.peak);
    if (need < best_.peak) need = std::max(need, refiner.need(schedule, u, {}, std::span(&v, 1), best_.peak));
    return {{{u, v}}, need};
  }

  // One of several ops runs after all the others, or before them: no single cut knows that.
  Branching last_or_first(const Graph& graph, Refiner& refiner, const Schedule& schedule, std::span<const OpId> ops,
                          bool last) const {
    Branching branching;
    std::vector<OpId> others;
    for (const OpId v : ops) {
      others.assign(ops.begin(), ops.end());
      std::erase(others, v);
      const auto wrong_side = reached(graph, v, !last);
      if (std::any_of(others.begin(), others.end(), [&](OpId u) { return wrong_side[u] != 0; })) continue;
      Alternative alternative;
      for (const OpId u : others) alternative.edges.push_back(last ? Edge{u, v} : Edge{v, u});
      alternative.need =
          last ? refiner.need(schedule, v, others, {}, best_.peak) : refiner.need(schedule, v, {}, others, best_.peak);
      branching.push_back(std::move(alternative));
    }
    return branching;
  }

  std::vector<OpId> incomparable(const Graph& graph, OpId v, std::span<const OpId> ops) const {
    const auto ancestors = reached(graph, v, true), descendants = reached(graph, v, false);
    std::vector<OpId> result;
    for (const OpId u : ops) {
      if (ancestors[u] == 0 && descendants[u] == 0) result.push_back(u);
    }
    return result;
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
