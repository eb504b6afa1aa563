// What is asked of order(), and its answer; the branch and bound below it fills in the same answer.
#pragma once

#include "olla/base/types.hpp"

namespace olla {

struct OrderOptions {
  std::uint64_t seed = 0;
  int num_restarts = 8;                // refinements with ties broken at random
  std::int64_t max_nodes = 1'000'000;  // of the branch and bound; 0 leaves it out
};

struct OrderResult {
  std::vector<OpId> order;  // op at step s
  Bytes peak = 0;           // of that order, resident memory included
  Bytes bound = 0;          // no order needs less
  Status status = Status::kFeasible;
  std::int64_t num_nodes = 0, num_cuts = 0;
};

}  // namespace olla
