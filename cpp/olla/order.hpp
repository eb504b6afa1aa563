// The best operator order, and a proof: lower bound, min-cut refinement, branch and bound on pairs of ops.
#pragma once

#include "olla/control.hpp"
#include "olla/graph.hpp"

namespace olla {

struct OrderOptions {
  std::uint64_t seed = 0;
  int num_restarts = 8;                // refinements with ties broken at random
  std::int64_t max_nodes = 1'000'000;  // of the branch and bound; 0 leaves it out
};

struct OrderResult {
  std::vector<OpId> order;  // op at step s
  Bytes peak = 0;
  Bytes bound = 0;  // no order needs less
  Status status = Status::kFeasible;
  std::int64_t num_nodes = 0, num_cuts = 0;
};

// starts: at least one valid order. The result is never worse than the best of them. Deterministic unless time ends it.
OrderResult order(const Graph& graph, std::span<const std::vector<OpId>> starts, const OrderOptions& options, Control& control);

// A lower bound on the peak of every order, from the cuts of at most max_cuts ops of one order, highest first.
Bytes lower_bound(const Graph& graph, std::vector<OpId> order, std::int64_t max_cuts, Control& control);

}  // namespace olla
