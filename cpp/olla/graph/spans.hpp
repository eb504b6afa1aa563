// Earliest and latest step of every op when exactly one op runs per step, and the lifetimes that follow from them.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

struct Spans {
  std::vector<Step> earliest;  // of op v: number of its ancestors
  std::vector<Step> latest;    // num_ops - 1 - number of its descendants
};

// O(ops * edges / 512) time, O(64 * ops) bytes: ancestors are counted in blocks of 512 columns.
Spans spans(const Graph& graph);

// Steps at which tensor t can be live, and steps at which it is live in every order (empty when first >= last).
// Source: OLLA (arXiv 2210.12924), equations (10) to (12).
struct Lifetime {
  Step first, last;
};
Lifetime widest_lifetime(const Graph& graph, const Spans& spans, TensorId t);
Lifetime certain_lifetime(const Graph& graph, const Spans& spans, TensorId t);

}  // namespace olla
