// Out-trees in which all children of an op read the same tensor, and nothing is left in the end: an order, and a bound.
//
// Which child reads last and frees the tensor depends on the order, so segments alone (series_parallel.hpp) are not exact here;
// choosing it can be a knapsack problem, so no fast method is. For every op v: segments that run its tree once v has run, for the
// least budget that a greedy order of the children fits. That order: children whose whole tree fits beside the tensor; of the
// others the first op and what frees memory within the budget; the last reader; the rest by Johnson's rule. The bound lets every
// child go as far as it could if all others were at their least memory: beside the tensor, then, once it is freed, beside the
// least of the others. Both meet at nearly every op.
#pragma once

#include "olla/graph/graph.hpp"
#include "olla/graph/paths.hpp"
#include "olla/order/segments.hpp"

namespace olla {

// How a tree is run once its root has been.
struct OutTree {
  std::vector<Segment> segments;               // of an order
  std::vector<std::pair<Bytes, Bytes>> least;  // (budget, memory): no smaller budget reaches so little memory
  Bytes whole = 0, least_whole = 0;            // budget of the whole tree: in that order, and at least in any
};

class OutTrees {
 public:
  // Links ops of a segment by next.
  OutTrees(const Graph& graph, const Precedences& known, std::vector<OpId>& next);

  const std::vector<OpId>& roots() const { return roots_; }  // roots of trees that no other tree contains
  bool below(OpId v) const { return inner_[v] != 0; }        // an op of such a tree, the root left out
  const OutTree& tree(OpId root) const { return trees_[root]; }
  std::vector<Segment> least_segments(OpId root) const;  // the bound's: as if memory fell to the least at once; no ops

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
