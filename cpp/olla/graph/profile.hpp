// An order -> lifetimes, live bytes per step, peak. The memory model of the whole project stands here:
// at op v live = resident + donated not yet freed + live temporaries + what v writes + v's workspace; after v every written or
// donated tensor whose last user has run, and which is not an output, is freed. A tensor nobody uses is live during its own op.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

struct Lifetimes {
  std::vector<Step> first;  // of tensor t: step that produces it; 0 if resident
  std::vector<Step> last;   // step of its last user + 1; num_ops if an output or resident; 0 if donated and never used
};

struct Profile {
  Lifetimes lifetimes;
  std::vector<Bytes> live;  // bytes live during step s, resident memory and workspaces included
  Bytes peak = 0;           // max(live); resident_bytes for a graph without ops
  Step peak_step = 0;       // first step at the peak
};

// order must be valid for the graph (Graph::is_order). O(ops + tensors + uses).
Lifetimes lifetimes(const Graph& graph, std::span<const OpId> order);
Profile profile(const Graph& graph, std::span<const OpId> order);

}  // namespace olla
