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

struct Branch {
  Edge agree, oppose;  // with the cut, against it
  Bytes agree_bound, oppose_bound;
  Bytes weaker() const { return std::min(agree_bound, oppose_bound); }
  Bytes stronger() const { return std::max(agree_bound, oppose_bound); }
};

class Tree {
 public:
  Tree(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result)
      : graph_(graph), options_(options), control_(control), best_(best), result_(result) {}

  void search() {
    open_.push({result_.bound, 0, {}, std::make_shared<std::vector<OpId>>(best_.order)});
    while (!open_.empty()) {
      result_.bound = std::max(result_.bound, std::min(open_.top().bound, best_.peak));
      if (result_.bound >= best_.peak || result_.num_nodes >= options_.max_nodes || control_.stop(best_.peak, result_.bound)) return;
      Node node = open_.top();
      open_.pop();
      ++result_.num_nodes;
      if (!expand(node)) return;  // out of time: the node stays open and its bound is already counted
    }
    result_.bound = best_.peak;
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
      if (getenv("DBG")) fprintf(stderr, "node %ld edges %zu bound %.3f peak %.3f best %.3f open %zu changed %d cuts %ld t %.2f\n", result_.num_nodes, node.edges.size(), node.bound/1e6, schedule.peak/1e6, best_.peak/1e6, open_.size(), changed, refiner.num_cuts(), control_.seconds());
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

    const auto [chosen, in_time] = choose(graph, refiner, schedule, node);
    if (!in_time) return false;
    const bool agree_open = chosen.agree_bound < best_.peak, oppose_open = chosen.oppose_bound < best_.peak;
    if (agree_open != oppose_open) {
      node.edges.push_back(agree_open ? chosen.agree : chosen.oppose);
      return true;
    }
    if (agree_open) {
      push_child(node, chosen.oppose, chosen.oppose_bound);
      push_child(node, chosen.agree, chosen.agree_bound);
    }
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

  // Strong branching: the pair whose weaker child has the highest bound.
  std::pair<Branch, bool> choose(const Graph& graph, Refiner& refiner, const Schedule& schedule, const Node& node) {
    const Step peak = schedule.peak_step(0, schedule.num_steps());
    const OpId v = schedule.order[peak];
    const Cut cut = refiner.whole_cut(schedule, v);
    if (!cut.exact) return {{}, false};

    // Where following the cut of v leads: the op that stands highest then is what speaks against it.
    Schedule followed = schedule;
    Bytes ignored = node.bound;
    if (!refiner.pass(followed, ignored, TieBreak::kPrefix)) return {{}, false};
    const OpId rival = followed.order[followed.peak_step(0, followed.num_steps())];

    const Cut rival_cut = refiner.whole_cut(schedule, rival);
    if (!rival_cut.exact) return {{}, false};

    Branch best{{}, {}, -1, -1};
    for (const OpId u : disputed(graph, schedule, peak, cut, rival_cut)) {
      const bool before = schedule.step[u] > peak;  // the cut wants u before v, the prefix has it after, or the reverse
      Branch b{before ? Edge{u, v} : Edge{v, u}, before ? Edge{v, u} : Edge{u, v}, node.bound, node.bound};
      const Bytes enough = best_.peak;
      if (rival != v) b.agree_bound = std::max(b.agree_bound, refiner.whole_cut(schedule, rival, b.agree, enough).value);
      if (rival != u) b.agree_bound = std::max(b.agree_bound, refiner.whole_cut(schedule, u, b.agree, enough).value);
      b.oppose_bound = std::max(b.oppose_bound, refiner.whole_cut(schedule, v, b.oppose, enough).value);
      if (control_.stop(best_.peak, result_.bound)) return {{}, false};
      if (b.weaker() > best.weaker() || (b.weaker() == best.weaker() && b.stronger() > best.stronger())) best = b;
      if (b.stronger() >= best_.peak) return {b, true};  // one child is closed already: the other precedence is implied
    }
    return {best, true};
  }

  // Ops on which the cut of the peak op and the prefix before it disagree: those where the rival's cut disagrees with it as well come
  // first, then those that move most memory.
  std::vector<OpId> disputed(const Graph& graph, const Schedule& schedule, Step peak, const Cut& cut, const Cut& rival_cut) const {
    std::vector<std::uint8_t> inside(graph.num_ops(), 0), rival_inside(graph.num_ops(), 0);
    for (const OpId u : cut.inside) inside[u] = 1;
    for (const OpId u : rival_cut.inside) rival_inside[u] = 1;
    std::vector<OpId> ops;
    for (Step s = 0; s < schedule.num_steps(); ++s) {
      if (s != peak && (s < peak) != (inside[schedule.order[s]] != 0)) ops.push_back(schedule.order[s]);
    }
    auto rank = [&](OpId u) {
      const Bytes change = schedule.before[schedule.step[u] + 1] - schedule.before[schedule.step[u]];
      return std::tuple(inside[u] == rival_inside[u], -std::abs(change), schedule.step[u]);
    };
    std::sort(ops.begin(), ops.end(), [&](OpId a, OpId b) { return rank(a) < rank(b); });
    constexpr std::size_t kCandidates = 16;
    if (ops.size() > kCandidates) ops.resize(kCandidates);
    return ops;
  }

  const Graph& graph_;
  const OrderOptions& options_;
  Control& control_;
  Schedule& best_;
  OrderResult& result_;
  std::priority_queue<Node, std::vector<Node>, Later> open_;
  std::int64_t num_created_ = 0;
};

}  // namespace

void branch_and_bound(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result) {
  Tree(graph, options, control, best, result).search();
}

}  // namespace olla
