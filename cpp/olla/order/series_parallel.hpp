// Best orders of series-parallel graphs, trees among them, with a proof: no search, and about linear time.
//
// Exact where (1) the precedences between ops are series-parallel: single ops, one part behind all of another (series), or beside
// it (parallel), nested to any depth, whatever transitive dependencies say the same again; in-trees, out-trees, chains and forests
// are; and (2) of every tensor that is freed, one user is known to run last. Workspaces, in-place changes, results that nobody
// reads, donated inputs and outputs are all as in profile.hpp.
//
// Then op v adds rise(v) to what is live, whatever ran before, and needs hill(v) on the way: the least highest sum of such a
// sequence is sought. Idea of the proof (Monma, Sidney 1979): let A and B be runs of ops that may change places. AB is no higher
// than BA if A stands before B by Johnson's rule (segments.hpp); that rule is a weak order, of glued runs too. If A must precede B
// but should follow it by the rule, then what stands between A and B in a best order can move before A or behind B, one of which
// costs nothing: A and B are glued. By induction over the parts every part has a canonical list of segments that some best order
// of the whole contains as a subsequence, each segment in one run. Free segments go by the rule. What holds of one part holds of
// any other with the same list.
//
// Where (2) fails, such a tensor is charged to one of its users. It is freed no earlier than that one runs, so the least peak under
// any charge is a lower bound; charging the user that runs last in an order, that order's own memory is counted exactly. So the
// order found under one charge gives the next. Trees whose children all read one tensor have an order and a bound of their own
// (out_tree.hpp). Where (1) fails there is no answer.
#pragma once

#include "olla/base/control.hpp"
#include "olla/graph/graph.hpp"

namespace olla {

struct SeriesParallelResult {
  std::vector<OpId> order;  // empty: the graph is not series-parallel, or time was up
  Bytes peak = 0;           // of that order
  Bytes bound = 0;          // no order needs less
};

// start: a valid order; its last users are charged first. O(dependencies * ops / 64) for the reduction, O(ops log^2 ops) for each
// of at most max_rounds charges.
SeriesParallelResult series_parallel_order(const Graph& graph, std::span<const OpId> start, int max_rounds, Control& control);

}  // namespace olla
