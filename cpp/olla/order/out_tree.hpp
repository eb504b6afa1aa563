// Out-trees in which all children of an op read the same tensor, and nothing is left in the end: an order, and a bound.
//
// Which child reads last, and frees the tensor, is not known, so segments alone (series_parallel.hpp) are not exact here, and as
// sizes may pose a knapsack, nothing fast is. For every op v: a list of segments from where v has run to where its tree has, found
// for the least budget that a greedy order of the children fits: those that can be run as a whole beside the tensor; then of the
// others the first op, and what is freed behind it within the budget; the last reader; then the rest by Johnson's rule. The bound
// lets every child go as far as it could were all others at their least: beside the tensor, or once it is freed, beside the least
// that the others can have come to. Both meet at nearly every op.
#pragma once

#include "olla/graph/graph.hpp"
#include "olla/graph/paths.hpp"
#include "olla/order/segments.hpp"

namespace olla {

// How a tree is run once its root has been.
struct OutTree {
  std::vector<Segment> segments;               // of an order
  std::vector<std::pair<Bytes, Bytes>> least;  // (budget, memory): no order comes to less memory within less than the budget
  Bytes whole = 0, least_whole = 0;            // budget to run it all: of the order, and of any
};

class OutTrees {
 public:
  // Links ops of a segment by next.
  OutTrees(const Graph& graph, const Precedences& known, std::vector<OpId>& next);

  const std::vector<OpId>& roots() const { return roots_; }  // whose trees are in no other one
  bool below(OpId v) const { return inner_[v] != 0; }        // an op of such a tree, the root left out
  const OutTree& tree(OpId root) const { return trees_[root]; }
  std::vector<Segment> least_segments(OpId root) const;  // as if it came to the least at once; without ops

 private:
  bool leads(OpId v) const;
  bool inside(OpId v) const;
  Bytes kept(OpId v) const;
  void chain(OpId v, OpId child);
  void fork(OpId v);

  const Graph& graph_;
  const Precedences& known_;
  std::vector<OpId>& next_;
  Csr<OpId> succs_;
  std::vector<OutTree> trees_;
  std::vector<std::uint8_t> leads_, inner_;
  std::vector<OpId> roots_;
};

}  // namespace olla
