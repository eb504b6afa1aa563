#include "olla/order/cut.hpp"

#include <algorithm>

namespace olla {

CutSolver::Side CutSolver::side(OpId v) const {
  const Step s = schedule_->step[v];
  if (s < query_.lo) return kInside;
  return s < query_.hi ? side_[v] : kOutside;
}

// Marks `from` and, inside the window, all its ancestors (kInside) or descendants (kOutside).
void CutSolver::mark(OpId from, Side to) {
  if (side(from) == to) return;
  auto visit = [&](OpId v) {
    if (side(v) == kFree) {
      side_[v] = to;
      queue_.push_back(v);
    }
  };
  visit(from);
  while (!queue_.empty()) {
    const OpId v = queue_.back();
    queue_.pop_back();
    for (const OpId u : to == kInside ? graph_.preds(v) : graph_.succs(v)) visit(u);
  }
}

Cut CutSolver::solve(const Schedule& schedule, const CutQuery& query) {
  ++num_cuts_;
  control_.spend(query.hi - query.lo);
  schedule_ = &schedule;
  query_ = query;
  for (Step s = query.lo; s < query.hi; ++s) side_[schedule.order[s]] = kFree;
  const OpId v = query.op;
  mark(v, kOutside);
  for (const OpId u : graph_.preds(v)) mark(u, kInside);
  for (const OpId u : query.inside) mark(u, kInside);
  for (const OpId u : query.outside) mark(u, kOutside);

  const Bytes constant = live_inside() + graph_.new_bytes(v) + graph_.workspace(v) - build_network();
  bool stopped = false;
  Cut cut;
  cut.value = constant + network_.maximise(query.enough - constant, [&] {
    control_.spend(network_.num_nodes());
    stopped = control_.over();
    return stopped;
  });
  cut.exact = !stopped && cut.value <= query.enough;
  if (cut.exact) cut.inside = read_cut();
  return cut;
}

// Live memory of the smallest downset allowed: everything before the window and the marked ancestors.
Bytes CutSolver::live_inside() {
  Bytes live = schedule_->before[query_.lo];
  for (Step s = query_.lo; s < query_.hi; ++s) {
    const OpId u = schedule_->order[s];
    if (side_[u] != kInside) continue;
    live += graph_.new_bytes(u);
    auto free_if_dead = [&](TensorId t) {
      if (!graph_.planned(t) || graph_.output(t) || counted_[t] == num_cuts_) return;
      counted_[t] = num_cuts_;
      if (std::ranges::all_of(graph_.users(t), [&](OpId w) { return side(w) == kInside; })) live -= graph_.bytes(t);
    };
    for (const TensorId t : graph_.writes(u)) free_if_dead(t);
    for (const TensorId t : graph_.uses(u)) free_if_dead(t);
  }
  return live;
}

// Builds the network over the free ops. Returns the bytes of tensors already live that free ops can still free.
Bytes CutSolver::build_network() {
  network_.reset();
  free_.clear();
  for (Step s = query_.lo; s < query_.hi; ++s) {
    const OpId v = schedule_->order[s];
    if (side_[v] != kFree) continue;
    free_.push_back(v);
    node_[v] = network_.add_node();
  }
  Bytes freeable = 0;
  for (const OpId v : free_) {
    for (const OpId u : graph_.preds(v)) {
      if (side(u) == kFree) network_.add_edge(node_[v], node_[u], FlowNetwork::kInfinite);
    }
    for (const TensorId t : graph_.writes(v)) add_tensor(t, node_[v]);
    for (const TensorId t : graph_.uses(v)) {
      const bool inherited = graph_.planned(t) && (graph_.producer(t) == kNoOp || side(graph_.producer(t)) == kInside);
      if (!inherited || in_network_[t] == num_cuts_) continue;
      in_network_[t] = num_cuts_;
      if (add_tensor(t, FlowNetwork::kSource)) freeable += graph_.bytes(t);
    }
  }
  return freeable;
}

// Adds what it costs to keep tensor t, whose producer is a free op or lies inside (the source). False if it is free or certain to
// be live.
bool CutSolver::add_tensor(TensorId t, FlowNetwork::Node producer) {
  if (graph_.bytes(t) == 0) return false;
  bool kept = graph_.output(t);
  readers_.clear();
  for (const OpId v : graph_.users(t)) {
    const Side where = side(v);
    kept = kept || where == kOutside;
    if (where == kFree) readers_.push_back(node_[v]);
  }
  if (kept) {
    if (producer != FlowNetwork::kSource) network_.add_edge(producer, FlowNetwork::kSink, graph_.bytes(t));
    return false;
  }
  if (readers_.empty()) return false;
  if (readers_.size() == 1) {
    network_.add_edge(producer, readers_[0], graph_.bytes(t));
    return true;
  }
  const FlowNetwork::Node all_read = network_.add_node();
  network_.add_edge(producer, all_read, graph_.bytes(t));
  for (const FlowNetwork::Node reader : readers_) network_.add_edge(all_read, reader, FlowNetwork::kInfinite);
  return true;
}

// Every residual-closed set between the smallest and the largest minimum cut is one; the seeds choose among them.
std::vector<OpId> CutSolver::read_cut() {
  network_.reaching_sink(0, reaches_sink_);
  const Step step_of_op = schedule_->step[query_.op];
  std::vector<FlowNetwork::Node> seeds{FlowNetwork::kSource};
  for (const OpId v : free_) {
    if (reaches_sink_[node_[v]] != 0) continue;
    const bool wanted = query_.tie == TieBreak::kLargest || (query_.tie == TieBreak::kPrefix && schedule_->step[v] < step_of_op) ||
                        (query_.tie == TieBreak::kRandom && (random_() & 1) != 0);
    if (wanted) seeds.push_back(node_[v]);
  }
  network_.reached(std::move(seeds), 0, chosen_);
  std::vector<OpId> inside;
  for (Step s = query_.lo; s < query_.hi; ++s) {
    const OpId v = schedule_->order[s];
    if (side_[v] == kInside || (side_[v] == kFree && chosen_[node_[v]] != 0)) inside.push_back(v);
  }
  return inside;
}

std::vector<Edge> CutSolver::implied(const Schedule& schedule, OpId v, Bytes limit) {
  std::vector<Edge> edges;
  const Cut cut = solve(schedule, {.op = v, .lo = 0, .hi = schedule.num_steps(), .enough = limit});
  if (!cut.exact) return edges;
  const Bytes slack = limit - cut.value;
  network_.reaching_sink(slack, reaches_sink_);
  network_.reached({FlowNetwork::kSource}, slack, chosen_);
  const auto in_chosen = [&](OpId u) { return side(u) == kFree && chosen_[node_[u]] != 0; };
  const auto in_reaching = [&](OpId u) { return side(u) == kFree && reaches_sink_[node_[u]] != 0; };
  for (const OpId u : free_) {  // only the last op inside and the first one outside on every path: the others follow
    if (in_chosen(u) && std::ranges::none_of(graph_.succs(u), in_chosen)) edges.emplace_back(u, v);
    if (in_reaching(u) && std::ranges::none_of(graph_.preds(u), in_reaching)) edges.emplace_back(v, u);
  }
  return edges;
}

}  // namespace olla
