// The best operator order, and a proof: lower bound, min-cut refinement, branch and bound on pairs of ops.
#pragma once

#include "olla/base/control.hpp"
#include "olla/graph/graph.hpp"
#include "olla/order/options.hpp"

namespace olla {

// starts: at least one valid order, item s the op at step s; the result is never worse than the best of them. Deterministic unless
// time ends it. Throws PlanError "order" (index of the start) where there is none, or one is not valid. A minimum cut per op and
// pass; the tree behind it is exponential, up to options.max_nodes.
OrderResult order(const Graph& graph, std::span<const std::vector<OpId>> starts, const OrderOptions& options, Control& control);

// A lower bound in bytes on the peak of every order, from the minimum cuts around at most max_cuts ops of one order, those with
// most live memory first. Throws PlanError "order" where that is not valid. A maximum flow per cut.
Bytes lower_bound(const Graph& graph, std::vector<OpId> order, std::int64_t max_cuts, Control& control);

}  // namespace olla
