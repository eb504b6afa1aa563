// The order of least peak by OLLA's lifetime program (order_program.hpp), solved by HiGHS.
#pragma once

#include "olla/base/control.hpp"
#include "olla/graph/graph.hpp"
#include "olla/ilp/highs.hpp"

namespace olla {

struct OrderIlpOptions {
  std::int32_t seed = 0;
  std::int32_t num_threads = 1;
  bool reduce = true;
  std::int64_t max_nonzeros = 2'000'000;
};

struct OrderIlpResult {
  std::vector<OpId> order;
  Bytes peak = 0;
  Bytes lower_bound = 0;              // proven
  Status status = Status::kFeasible;  // kOptimal exactly when peak == lower_bound
  std::string message;                // why it ended, for a person
  Column num_columns = 0;
  std::int64_t num_rows = 0, num_nonzeros = 0, num_nodes = 0;
  double seconds_build = 0.0, seconds_solve = 0.0;
};

// The best order HiGHS finds within the time limit of control; never worse than start, re-simulated, with the bound it proved.
// lower_bound: a proven bound of the peak, or 0. A program beyond max_nonzeros is not built: start comes back, with a message.
// Throws PlanError if start is no order of the graph; SolverError if lower_bound exceeds a peak that is reached, or if HiGHS fails
// or claims, three times, an optimum that the simulation of its own order contradicts.
OrderIlpResult order_ilp(const Graph& graph, std::span<const OpId> start, Bytes lower_bound, const Highs& highs,
                         const OrderIlpOptions& options, Control& control);

}  // namespace olla
