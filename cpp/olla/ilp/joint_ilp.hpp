// The order and the layout of the smallest arena by OLLA's joint program (joint_program.hpp), solved by HiGHS.
#pragma once

#include "olla/graph/graph.hpp"
#include "olla/ilp/ilp_search.hpp"

namespace olla {

struct JointIlpResult {
  std::vector<OpId> order;
  std::vector<Offset> offsets;            // of tensor t; kNotInArena where no op writes it
  std::vector<Offset> workspace_offsets;  // of op v; kNotInArena where it has none
  Bytes arena = 0;
  Bytes lower_bound = 0;              // proven: no order and layout have a smaller arena
  Status status = Status::kFeasible;  // kOptimal exactly when arena == lower_bound
  IlpFigures figures;
};

// arena: an arena graph (see arena_graph), whose sizes are rounded already. The start is an order with offsets of its tensors and
// workspaces; without offsets (empty), it is laid out by first fit. lower_bound: proven, or 0. Never worse than the start.
// PlanError "order", "lengths", "start"; SolverError as IlpSearch says.
JointIlpResult joint_ilp(const Graph& arena, std::span<const OpId> order, std::span<const Offset> offsets,
                         std::span<const Offset> workspace_offsets, Bytes lower_bound, const Highs& highs,
                         const IlpOptions& options, Control& control);

}  // namespace olla
