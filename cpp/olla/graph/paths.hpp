// Which ops depend on which others through more than a direct dependency: asked of many pairs at once, in linear memory.
#pragma once

#include <functional>

#include "olla/graph/graph.hpp"

namespace olla {

// Of pair i: whether a path of at least two dependencies leads from its first op to its second. Empty once stop() answers true.
// The ops that a path may end at are taken 512 at a time: O(ops + dependencies) memory, O(dependencies * ops / 64) time.
std::vector<std::uint8_t> longer_paths(const Graph& graph, std::span<const Edge> pairs, const std::function<bool()>& stop);

// The direct predecessors of every op that no longer path implies (the transitive reduction), and, of tensor t, the user that runs
// last in every order; kNoOp where there is none, or that depends on the order.
struct Precedences {
  Csr<OpId> preds;
  std::vector<OpId> last_user;
};

// Empty lists once stop() answers true. As longer_paths.
Precedences precedences(const Graph& graph, const std::function<bool()>& stop);

}  // namespace olla
