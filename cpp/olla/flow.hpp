// Maximum flow and minimum cuts on a directed network with integer capacities.
// Source: Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation" (1970).
#pragma once

#include "olla/types.hpp"

namespace olla {

class FlowNetwork {
 public:
  using Node = std::int32_t;
  static constexpr Node kSource = 0, kSink = 1;
  static constexpr Bytes kInfinite = kMaxBytes + 1;  // above every finite cut

  void reset();  // leaves the source and the sink
  Node add_node();
  void add_edge(Node from, Node to, Bytes capacity);
  Node num_nodes() const { return static_cast<Node>(first_.size()); }

  // Pushes flow until it is maximum, its value passes `enough`, or stop() answers true between two phases; returns the value, a
  // lower bound on every cut. O(nodes^2 arcs) at worst; in practice a few phases, each about linear.
  template <class Stop>
  Bytes maximise(Bytes enough, Stop stop) {
    Bytes total = 0;
    while (total <= enough && !stop() && assign_levels()) total += blocking_flow(enough - total);
    return total;
  }

  // After maximise. A minimum cut's source side is any set that holds the source, not the sink, and is closed under residual edges.
  void mark_reaching_sink(std::vector<std::uint8_t>& marked) const;              // no minimum cut may hold these
  void close(std::vector<Node> seeds, std::vector<std::uint8_t>& marked) const;  // seeds and all they reach

 private:
  struct Arc {
    Node to;
    std::int32_t next;  // next arc out of the same node, or -1
    Bytes residual;
  };
  bool assign_levels();
  Bytes blocking_flow(Bytes enough);

  std::vector<std::int32_t> first_;  // first arc out of a node, or -1; arc a ^ 1 is the reverse of arc a
  std::vector<Arc> arcs_;
  std::vector<std::int32_t> level_, current_;
  std::vector<Node> queue_;
  std::vector<std::int32_t> path_;
};

}  // namespace olla
