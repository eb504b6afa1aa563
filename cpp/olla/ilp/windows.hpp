// The steps at which each block of ops can start in an order whose peak stays within a target.
#pragma once

#include <optional>

#include "olla/graph/spans.hpp"
#include "olla/ilp/blocks.hpp"

namespace olla {

struct Windows {
  Csr<Step> starts;  // of block b: its possible first steps, rising; never empty
  Csr<OpId> preds;   // blocks directly before each block
  Spans spans;       // of op v, from the starts of its block

  Step num_columns() const { return static_cast<Step>(starts.item.size()) - static_cast<Step>(starts.size()); }
};

// nullopt: some block has no step left, so no order has peak <= target. certain: see certain_tensors.
// A step falls away where precedences leave no room for the ops before or after, or where op v at that step would need more than
// target bytes: those live in every order while v runs, plus those live in every order at that step. Source: OLLA (arXiv
// 2210.12924), equations (10) to (12), sharpened by the target.
std::optional<Windows> find_windows(const Graph& graph, const Closure& closure, const Blocks& blocks, const Csr<TensorId>& certain,
                                    Bytes target);

}  // namespace olla
