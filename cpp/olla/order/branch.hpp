// Branch and bound over precedences between ops.
//
// A node is a set of extra precedences. Its bound is a minimum cut under them, its incumbent a short refinement. A cut alone does
// not know in which order the ops that contend for the peak run. A refinement pass that gets stuck names them: the op it is stuck
// at, and the ops whose cuts bound the window it is stuck in (see Conflict). The tree branches on which of two of them runs
// first, or on which of all of them runs last, or first, whichever raises the bound of the easiest child most. Precedences that
// every order better than the best one must obey are read off the residual networks and added on the way.
#pragma once

#include "olla/base/control.hpp"
#include "olla/graph/schedule.hpp"
#include "olla/order/options.hpp"

namespace olla {

// Improves best and result.bound until they meet, the tree is empty (best is optimal), or options.max_nodes or the limits of
// control are reached. Counts nodes and cuts in result. A minimum cut per op of a conflict at every node.
void branch_and_bound(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result);

}  // namespace olla
