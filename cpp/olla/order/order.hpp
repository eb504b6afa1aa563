// The best operator order, and a proof: lower bound, min-cut refinement, branch and bound on pairs of ops.
#pragma once

#include "olla/base/control.hpp"
#include "olla/graph/graph.hpp"
#include "olla/order/options.hpp"

namespace olla {

// starts: at least one valid order. The result is never worse than the best of them. Deterministic unless time ends it.
OrderResult order(const Graph& graph, std::span<const std::vector<OpId>> starts, const OrderOptions& options, Control& control);

// A lower bound on the peak of every order, from the cuts of at most max_cuts ops of one order, highest first.
Bytes lower_bound(const Graph& graph, std::vector<OpId> order, std::int64_t max_cuts, Control& control);

}  // namespace olla
