#include "olla/order/flow.hpp"

#include <algorithm>

namespace olla {

void FlowNetwork::reset() {
  arcs_.clear();
  first_.assign(2, -1);
}

FlowNetwork::Node FlowNetwork::add_node() {
  first_.push_back(-1);
  return num_nodes() - 1;
}

void FlowNetwork::add_edge(Node from, Node to, Bytes capacity) {
  arcs_.push_back({to, first_[from], capacity});
  first_[from] = static_cast<std::int32_t>(arcs_.size()) - 1;
  arcs_.push_back({from, first_[to], 0});
  first_[to] = static_cast<std::int32_t>(arcs_.size()) - 1;
}

// Level = residual distance to the sink.
bool FlowNetwork::assign_levels() {
  level_.assign(first_.size(), -1);
  queue_.assign(1, kSink);
  level_[kSink] = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const Node node = queue_[i];
    if (node == kSource) return true;  // all shorter levels are set
    for (std::int32_t a = first_[node]; a >= 0; a = arcs_[a].next) {
      const Node from = arcs_[a].to;
      if (level_[from] < 0 && arcs_[a ^ 1].residual > 0) {
        level_[from] = level_[node] + 1;
        queue_.push_back(from);
      }
    }
  }
  return false;
}

Bytes FlowNetwork::blocking_flow(Bytes enough) {
  Bytes total = 0;
  current_ = first_;
  path_.clear();
  Node node = kSource;
  while (true) {
    if (node == kSink) {
      Bytes amount = kInfinite;
      for (const std::int32_t a : path_) amount = std::min(amount, arcs_[a].residual);
      std::size_t saturated = path_.size();
      for (std::size_t i = path_.size(); i-- > 0;) {
        arcs_[path_[i]].residual -= amount;
        arcs_[path_[i] ^ 1].residual += amount;
        if (arcs_[path_[i]].residual == 0) saturated = i;
      }
      total += amount;
      if (total > enough) return total;
      node = arcs_[path_[saturated] ^ 1].to;  // go on from the tail of the first saturated arc
      path_.resize(saturated);
      continue;
    }
    std::int32_t& a = current_[node];
    while (a >= 0 && (arcs_[a].residual == 0 || level_[arcs_[a].to] != level_[node] - 1)) a = arcs_[a].next;
    if (a >= 0) {
      path_.push_back(a);
      node = arcs_[a].to;
    } else if (node == kSource) {
      return total;
    } else {
      level_[node] = -1;  // a dead end in this phase
      node = arcs_[path_.back() ^ 1].to;
      path_.pop_back();
    }
  }
}

void FlowNetwork::mark(std::vector<Node> seeds, Bytes above, std::int32_t direction, std::vector<std::uint8_t>& marked) const {
  marked.assign(first_.size(), 0);
  for (const Node node : seeds) marked[node] = 1;
  while (!seeds.empty()) {
    const Node node = seeds.back();
    seeds.pop_back();
    for (std::int32_t a = first_[node]; a >= 0; a = arcs_[a].next) {
      if (marked[arcs_[a].to] == 0 && arcs_[a ^ direction].residual > above) {
        marked[arcs_[a].to] = 1;
        seeds.push_back(arcs_[a].to);
      }
    }
  }
}

}  // namespace olla
