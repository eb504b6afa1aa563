// The order of least peak by OLLA's lifetime program (order_program.hpp), solved by HiGHS.
#pragma once

#include "olla/graph/graph.hpp"
#include "olla/ilp/ilp_search.hpp"

namespace olla {

struct OrderIlpOptions : IlpOptions {
  bool reduce = true;  // false: every op may run at every step of its span
};

struct OrderIlpResult {
  std::vector<OpId> order;
  Bytes peak = 0;
  Bytes lower_bound = 0;              // proven
  Status status = Status::kFeasible;  // kOptimal exactly when peak == lower_bound
  IlpFigures figures;
};

// The best order HiGHS finds within the time limit of control; never worse than start, re-simulated, with the bound it proved.
// lower_bound: a proven bound of the peak, or 0. A program beyond max_nonzeros is not built: start comes back, with a message.
// Throws PlanError if start is no order of the graph; SolverError if lower_bound exceeds a peak that is reached, or if HiGHS fails
// or claims, three times, an optimum that the simulation of its own order contradicts.
OrderIlpResult order_ilp(const Graph& graph, std::span<const OpId> start, Bytes lower_bound, const Highs& highs,
                         const OrderIlpOptions& options, Control& control);

}  // namespace olla
