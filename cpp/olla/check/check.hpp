// An independent checker: is this plan what it says it is? It reads only the lists of the graph file and derives dependencies,
// lifetimes and memory anew, straight from the memory model (docs/architecture.md), sharing no code with the planners.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

// What a plan reports about itself. All include resident memory except arena and load, which cover the arena alone.
struct Figures {
  Bytes peak_bytes, lower_bound_bytes, program_peak_bytes, resident_bytes, donated_bytes, arena_bytes, load_bytes;
};

struct PlanView {
  std::span<const OpId> order;                // op that runs at step s
  std::span<const Offset> offsets;            // of tensor t in the arena; kNotInArena where it keeps its own storage
  std::span<const Offset> workspace_offsets;  // of op v's workspace; kNotInArena where it has none
  Bytes alignment;                            // every offset is a multiple of it; buffers take their size rounded up to it
  std::span<const OpId> before, after;        // extra precedences: before[i] runs before after[i]
  Figures figures;
  const Graph* given;  // the graph whose program order program_peak_bytes is of; nullptr: it is not at hand, and not checked
};

// Throws PlanError with the rule the plan breaks first and the ids concerned:
//   order    "permutation" "dependency" "mutation_order" "random_order" "extra_precedence"
//   layout   "offsets_length" "alignment" "negative_offset" "unplanned_offset" "missing_offset" "overlap" "arena"
//   figures  "resident_bytes" "donated_bytes" "peak" "program_peak" "bound" "load"
// A plan without a layout has no offset, no arena and no load. O(m log m) for m = ops + tensors + uses.
void check(const Graph& graph, const PlanView& plan);

}  // namespace olla
