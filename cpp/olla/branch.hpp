// Branch and bound over precedences between pairs of ops.
//
// A node is a set of extra precedences. Its bound is a minimum cut under them, its incumbent a short refinement. Where the
// incumbent stands above the bound, the cut of its peak op v disagrees with the prefix before v on some ops u: "u before v" or "v
// before u".
#pragma once

#include "olla/order.hpp"
#include "olla/schedule.hpp"

namespace olla {

// Improves best and bound until they meet, the tree is empty, or a limit is reached.
void branch_and_bound(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result);

}  // namespace olla
