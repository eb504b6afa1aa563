// Offsets of least height for given lifetimes by OLLA's address program (address_program.hpp), solved by HiGHS.
#pragma once

#include "olla/ilp/ilp_search.hpp"
#include "olla/layout/layout.hpp"

namespace olla {

struct AddressIlpResult {
  std::vector<Offset> offsets;  // of buffer i
  Bytes height = 0;             // of the rounded sizes, as load and bound
  Bytes load = 0;
  Bytes bound = 0;                    // no layout with these fixed offsets is lower; at least the load
  Status status = Status::kFeasible;  // kOptimal exactly when height == bound
  IlpFigures figures;
};

// Sizes are rounded up to the alignment. fixed: an offset that buffer i keeps, or kNotInArena; empty for none. start: a layout that
// keeps them, or empty for a first fit. lower_bound: proven bound of the height, or 0. Independent parts are solved one after the
// other. A program beyond max_nonzeros, or with a height of more than 2^26 units, is not built: the start comes back.
// PlanError "sizes", "alignment", "lengths", "fixed", "start"; SolverError as IlpSearch says.
AddressIlpResult address_ilp(std::span<const Buffer> buffers, Bytes alignment, std::span<const Offset> fixed,
                             std::span<const Offset> start, Bytes lower_bound, const Highs& highs, const IlpOptions& options,
                             Control& control);

// The best of first fits by size, length of life and both: each buffer in the lowest gap among those placed. O(n^2 log n).
std::vector<Offset> first_fit(std::span<const Buffer> buffers, std::span<const Offset> fixed);

}  // namespace olla
