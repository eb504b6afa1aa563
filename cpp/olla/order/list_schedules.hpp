// The list schedules of PyTorch Inductor (torch/_inductor/memory.py, torch 2.13) on our graphs. Its memory model is that of
// profile.hpp without workspaces. Rules and ties are its own; the data structures are ours, and nothing recurses. Item s of an
// order is the op at step s.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

// Least peak memory first: among the ready ops that do not raise the highest memory so far, the one after which least is live; if
// all raise it, the one that raises it least. O((ops + dependencies + uses) log ops); Inductor's own scans all ready ops each time.
std::vector<OpId> least_peak_order(const Graph& graph);

// First in, first out: the ready op whose predecessors ran earliest, their steps compared from the earliest on.
// O((ops + dependencies) log ops) comparisons.
std::vector<OpId> breadth_first_order(const Graph& graph);

// Depth first: ops by rising bytes touched, each behind its remaining predecessors in the same order.
// O((ops + dependencies) log ops).
std::vector<OpId> depth_first_order(const Graph& graph);

}  // namespace olla
