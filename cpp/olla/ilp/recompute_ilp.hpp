// Recomputation by the program of recompute_program.hpp and HiGHS: the best drops for one base order.
#pragma once

#include "olla/ilp/ilp_search.hpp"
#include "olla/ilp/recompute_program.hpp"

namespace olla {

struct RecomputeIlpResult {
  Status status = Status::kFeasible;  // kOptimal: proved for the base order; kInfeasible: proved, nothing fits the peak
  double bound = 0;  // of the seconds or bytes minimised: no set of drops does better. Of a pruned program: none of its
  bool pruned = false;
  std::int64_t num_answers = 0;  // simulated
  IlpFigures figures;
};

// Puts the best decisions found in force; they are never worse than those that were. An answer is simulated, and ruled out where it
// needs more than the program says. Of the target's peak and added time, the one that is minimised is a proven bound. Where a
// program of all values is too large, those are taken that are idle above the target; where that is too large, none. Throws
// SolverError where HiGHS fails, or an answer adds more time than claimed.
RecomputeIlpResult recompute_ilp(RecomputeSearch& search, const Target& target, const Highs& highs, const IlpOptions& options,
                                 Control& control);

}  // namespace olla
