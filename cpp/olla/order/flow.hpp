// Maximum flow and minimum cuts on a directed network with integer capacities.
// Source: Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation" (1970).
#pragma once

#include "olla/base/types.hpp"

namespace olla {

class FlowNetwork {
 public:
  using Node = std::int32_t;
  static constexpr Node kSource = 0, kSink = 1;
  static constexpr Bytes kInfinite = kMaxBytes + 1;  // above every finite cut

  void reset();                                       // leaves the source and the sink
  Node add_node();                                    // the next number, from 2 on
  void add_edge(Node from, Node to, Bytes capacity);  // capacity: 0 to kInfinite
  Node num_nodes() const { return static_cast<Node>(first_.size()); }

  // Pushes flow until it is maximum, its value passes `enough`, or stop() answers true between two phases; returns the value, a
  // lower bound on every cut. O(nodes^2 arcs) at worst; in practice a few phases, each about linear.
  template <class Stop>
  Bytes maximise(Bytes enough, Stop stop) {
    Bytes total = 0;
    while (total <= enough && !stop() && assign_levels()) total += blocking_flow(enough - total);
    return total;
  }

  // After maximise, over residual arcs of more than `above`: the nodes that reach the sink, and what the seeds reach (the seeds
  // too). With above = 0: a set holding the source and closed under `reached` is the source side of a minimum cut, unless it holds
  // a node that reaches the sink. With above = x: a node that reaches the sink costs more than x to take in, one reached from the
  // source more than x to leave out.
  void reaching_sink(Bytes above, std::vector<std::uint8_t>& marked) const { mark({kSink}, above, 1, marked); }
  void reached(std::vector<Node> seeds, Bytes above, std::vector<std::uint8_t>& marked) const {
    mark(std::move(seeds), above, 0, marked);
  }

 private:
  struct Arc {
    Node to;
    std::int32_t next;  // next arc out of the same node, or -1
    Bytes residual;
  };
  // direction: 0 follows the arcs, 1 goes against them.
  void mark(std::vector<Node> seeds, Bytes above, std::int32_t direction, std::vector<std::uint8_t>& marked) const;
  bool assign_levels();
  Bytes blocking_flow(Bytes enough);

  std::vector<std::int32_t> first_;  // first arc out of a node, or -1; arc a ^ 1 is the reverse of arc a
  std::vector<Arc> arcs_;
  std::vector<std::int32_t> level_, current_;
  std::vector<Node> queue_;
  std::vector<std::int32_t> path_;
};

}  // namespace olla
